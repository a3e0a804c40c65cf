#!/usr/bin/env bash
# reasoning-gym 0.1.25: data sets of neighbouring seeds are the same tasks, shifted by one.
#
# Guess: a data set of seed 0 and one of seed 1 have hardly a task in common, so one can train and the other evaluate.
# Behaviour: task i of seed s is made with the seed s + i. Task 1 of seed 0 is task 0 of seed 1, and of 100 tasks each
# the two data sets share 99. Held-out tasks need a seed that is further away than the training set is long.
# Seen on Python 3.11: 99 of 100 for each of the four.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install --quiet --disable-pip-version-check reasoning-gym==0.1.25
cd "$folder"
"$folder/env/bin/python" -W ignore - <<'PYTHON' || { echo "the behaviour has changed" >&2; exit 1; }
import reasoning_gym

seen = {}
for name in ("leg_counting", "basic_arithmetic", "spell_backward", "chain_sum"):
    first, second = (
        [task["question"] for task in reasoning_gym.create_dataset(name, seed=seed, size=100)] for seed in (0, 1)
    )
    seen[name] = first[1:] == second[:-1], len(set(first) & set(second))
    print(name, "second set is the first, shifted:", seen[name][0], "- tasks in common:", seen[name][1])
assert all(found == (True, 99) for found in seen.values()), seen
PYTHON
