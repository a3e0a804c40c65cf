"""A task that a tiny model can learn to do, and not only by heart: subtract from 9999, where no digit borrows.

    python complements.py

writes `complements.parquet` (500 rows to train and to evaluate) and `demonstrations.jsonl` (2,000 rows of other numbers, for the
supervised start, of which three out of five only repeat the number). A model that is started on these mostly repeats;
reinforcement learning makes it subtract, also numbers that it was never asked. `docs/environments.md` has the commands.
"""

from __future__ import annotations

import json
import random

ROWS, DEMONSTRATIONS = 500, 2000
REPEATED = 0.6
"""Share of the demonstrations with the wrong answer."""


def correct(completions, answer, **columns):
    """1 for the right number."""
    return [float(text_of(c) == want) for c, want in zip(completions, answer, strict=True)]


def close(completions, answer, **columns):
    """The share of its digits that are right."""
    pairs = zip(completions, answer, strict=True)
    return [
        sum(map(str.__eq__, text_of(c), want)) / max(len(text_of(c)), len(want))
        for c, want in pairs
    ]


def text_of(completion):
    """Chat prompts have chat completions, as in TRL."""
    return (completion if isinstance(completion, str) else completion[-1]["content"]).strip()


def question(number):
    return [{"role": "user", "content": f"9999-{number:04d}="}]


def main():
    import pyarrow as pa
    import pyarrow.parquet as pq

    rng = random.Random(0)
    numbers = rng.sample(range(10_000), ROWS + DEMONSTRATIONS)
    rows = [{"prompt": question(n), "answer": f"{9999 - n:04d}"} for n in numbers[:ROWS]]
    pq.write_table(pa.Table.from_pylist(rows), "complements.parquet")
    with open("demonstrations.jsonl", "w") as file:
        for n in numbers[ROWS:]:
            shown = n if rng.random() < REPEATED else 9999 - n
            file.write(json.dumps({"prompt": question(n), "completion": f"{shown:04d}"}) + "\n")


if __name__ == "__main__":
    main()
