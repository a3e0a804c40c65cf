"""Make `train.jsonl` and `test.jsonl`: word problems in the shape of GSM8K's rows, with made-up contents.

GSM8K itself has the same columns: `data.path=openai/gsm8k data.subset=main` in place of the file.
"""

import json
import random

PEOPLE = ("Ada", "Ben", "Cleo", "Dan", "Eve", "Finn")
THINGS = ("pens", "eggs", "cards", "figs", "coins", "seeds")


def make_row(rng: random.Random) -> dict[str, str]:
    person, thing = rng.choice(PEOPLE), rng.choice(THINGS)
    boxes, each = rng.randint(2, 9), rng.randint(2, 9)
    given = rng.randint(1, boxes * each - 1)
    return {
        "question": f"{person} has {boxes} boxes of {each} {thing} and gives {given} away. How many are left?",
        "answer": f"{boxes}*{each}={boxes * each}\n{boxes * each}-{given}={boxes * each - given}\n"
        f"#### {boxes * each - given}",
    }


def main() -> None:
    rng = random.Random(0)
    rows = {row["question"]: row for row in (make_row(rng) for _ in range(2000))}
    questions = list(rows)
    for name, part in (("train", questions[:-100]), ("test", questions[-100:])):
        with open(f"{name}.jsonl", "w") as file:
            file.writelines(json.dumps(rows[question]) + "\n" for question in part)
        print(f"{name}.jsonl: {len(part)} rows")


if __name__ == "__main__":
    main()
