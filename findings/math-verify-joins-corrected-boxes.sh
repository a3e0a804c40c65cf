#!/usr/bin/env bash
# math-verify 0.9.0: an answer that corrects its own box is wrong, whichever box is right.
#
# Guess: the last \boxed{} of a text is its answer, as in the usual extractors.
# Behaviour: `parse` joins all boxes of a text into one set, {3, 4}, which equals neither 3 nor 4. A policy that thinks
# aloud, boxes a number and corrects it, earns nothing. Without boxes the number behind "the answer is" counts, also
# where a later sentence corrects it.
# Seen on Python 3.11: parsed {3, 4}; verify against 3 and against 4: False, False; without boxes 3 is read: True, False.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install --quiet --disable-pip-version-check 'math-verify[antlr4_13_2]==0.9.0'
cd "$folder"
"$folder/env/bin/python" -W ignore - <<'PYTHON' || { echo "the behaviour has changed" >&2; exit 1; }
from math_verify import parse, verify

boxed = r"So the answer is \boxed{3}. Wait, I forgot a term: it is \boxed{4}."
plain = "So the answer is 3. Wait, I forgot a term: it is 4."
seen = [verify(parse(gold), parse(answer)) for answer in (boxed, plain) for gold in ("$3$", "$4$")]
print(parse(boxed), parse(plain), seen)
assert str(parse(boxed)[0]) == "{3, 4}"
assert seen == [False, False, True, False]
PYTHON
