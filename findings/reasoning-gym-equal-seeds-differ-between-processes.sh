#!/usr/bin/env bash
# reasoning-gym 0.1.25: with equal seeds, three tasks ask other questions in another process.
#
# Guess: a task with a seed is the same in each process, as the package's page says of its generators.
# Behaviour: isomorphic_strings, ransom_note and polynomial_multiplication iterate over sets of strings or symbols, so
# their questions follow PYTHONHASHSEED, which Python draws anew for each process. A group whose members are asked in
# several processes then compares answers to different questions. leg_counting, for comparison, does not change.
# Seen on Python 3.11: 0, 0 and 0 of 20 questions equal between the hash seeds 1 and 2; leg_counting 20 of 20.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install --quiet --disable-pip-version-check reasoning-gym==0.1.25
cd "$folder"
"$folder/env/bin/python" -W ignore - <<'PYTHON' || { echo "the behaviour has changed" >&2; exit 1; }
import json
import os
import subprocess
import sys

ASK = """
import json, sys, reasoning_gym
print(json.dumps([reasoning_gym.create_dataset(sys.argv[1], seed=7, size=20)[i]["question"] for i in range(20)]))
"""


def ask(name, hash_seed):
    environment = {**os.environ, "PYTHONHASHSEED": hash_seed}
    done = subprocess.run([sys.executable, "-c", ASK, name], env=environment, capture_output=True, check=True)
    return json.loads(done.stdout)


for name in ("isomorphic_strings", "ransom_note", "polynomial_multiplication", "leg_counting"):
    first, again, other = ask(name, "1"), ask(name, "1"), ask(name, "2")
    equal = sum(a == b for a, b in zip(first, other, strict=True))
    print(name, "equal between two hash seeds:", equal, "of 20")
    assert first == again
    assert equal == 20 if name == "leg_counting" else equal < 5
PYTHON
