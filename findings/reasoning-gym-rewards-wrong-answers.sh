#!/usr/bin/env bash
# reasoning-gym 0.1.25: a number ten times too large earns two thirds and more, and two tasks give the full reward to any
# answer, or to "0".
#
# Guess: `score_answer` of a task with one right number is 1 for that number and 0, or little, for another one.
# Behaviour: where a task has no scorer of its own, an answer that contains the right one earns the share of its length,
# so 2920 for 292 earns 0.75. This is meant for words around an answer, but it rewards longer numbers more than words.
# coin_flip compares the leading characters up to the length of the shorter one: "0" earns 1 for each probability below 1.
# game_of_life_halting compares `bool` of two strings: each answer that is not empty earns 1. A policy learns from these
# rewards to write "0", or anything. r3async's adapter passes on the score as it is, so its runs on these tasks are
# affected unless their rewards are checked.
# Seen on Python 3.11: 0.75, 0.8, 0.75 and 0.67; coin_flip 19 of 20 for "0" (the other one is 1), and no right answer
# is 0; game_of_life_halting 20 of 20 for "no idea".
# Date: 2026-11-30.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install --quiet --disable-pip-version-check reasoning-gym==0.1.25
cd "$folder"
"$folder/env/bin/python" -W ignore - <<'PYTHON' || { echo "the behaviour has changed" >&2; exit 1; }
import reasoning_gym


def score(task, write, size=20):
    tasks = reasoning_gym.create_dataset(task, size=size, seed=1)
    return [float(tasks.score_answer(write(entry["answer"]), entry)) for entry in tasks]


for task in ("leg_counting", "lcm", "count_primes", "simple_equations"):
    entry = reasoning_gym.create_dataset(task, size=1, seed=1)[0]
    (tenfold,), (in_words,) = score(task, lambda right: right + "0", 1), score(task, "The answer is {}.".format, 1)
    print(f"{task}: {entry['answer']}, ten times as much {tenfold:.2f}, the right one in words {in_words:.2f}")
    assert tenfold > 0.6 > 0.3 > in_words > 0
zeros = score("coin_flip", lambda right: "0")
anything = score("game_of_life_halting", lambda right: "no idea")
right = [entry["answer"] for entry in reasoning_gym.create_dataset("coin_flip", size=20, seed=1)]
print(f"coin_flip: {sum(zeros):.0f} of 20 for 0, right are", right[:4])
print(f"game_of_life_halting: {sum(anything):.0f} of 20 for no idea")
assert zeros == [float(float(each) < 1) for each in right] and sum(zeros) == 19
assert sum(anything) == 20
PYTHON
