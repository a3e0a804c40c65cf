#!/usr/bin/env bash
# math-verify 0.9.0: 10% equals 10 and 0.1, and 1e5 is one times Euler's number times five.
#
# Guess: a percentage equals one number, and 1e5 is 100000, as a program that prints a float writes it.
# Behaviour: `verify` accepts 10 % for a gold answer of 10 and for one of 0.1, which do not equal each other. A number in
# exponent notation is parsed as a product with E, so 1e5 never equals 100000. A subscript of a base is dropped: 12_3 is
# 12. All parse without a warning, so rewards are wrong in both directions.
# Seen on Python 3.11: True, True, False; False; 1*E*5; 12.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install --quiet --disable-pip-version-check 'math-verify[antlr4_13_2]==0.9.0'
cd "$folder"
"$folder/env/bin/python" -W ignore - <<'PYTHON' || { echo "the behaviour has changed" >&2; exit 1; }
from math_verify import parse, verify


def equal(gold, answer):
    return verify(parse(gold), parse(answer))


percent = [equal("$10$", r"$10\%$"), equal("$0.1$", r"$10\%$"), equal("$10$", "$0.1$")]
print("10 and 10%, 0.1 and 10%, 10 and 0.1:", percent)
print("1e5:", parse("$1e5$")[0], "- equals 100000:", equal("$100000$", "$1e5$"), "- 12_3:", parse("$12_3$")[0])
assert percent == [True, True, False]
assert not equal("$100000$", "$1e5$")
assert str(parse("$12_3$")[0]) == "12"
PYTHON
