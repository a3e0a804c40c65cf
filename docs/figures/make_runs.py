"""Keep what finished runs came to as data of the pages: means of metrics at the beginning and at the end, and evaluations.

    python docs/figures/make_runs.py NAME.json --commit C --command "r3async train …" RUN...
    python docs/figures/make_runs.py NAME.json --add --commit C --command "…" RUN...      # beside those it has

Standard library only.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
FIRST, LAST = 3, 10
"""Steps of the means."""
METRICS = ("reward/mean", "distillation/reverse_kl", "rollout_kl/k3", "rollout_kl/served_k3")
EVALUATED = ("evaluation/reward_mean", "evaluation/pass@1")


def rows_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.is_file() else []


def mean(rows: list[dict[str, Any]], name: str) -> float:
    return sum(row[name] for row in rows) / len(rows)


def came_to(run: Path) -> dict[str, Any]:
    """Of a run's directory: steps, and by metric the mean of its first and last steps; of evaluations the first and the last."""
    rows, evaluations = rows_of(run / "metrics.jsonl"), rows_of(run / "evaluation.jsonl")
    found: dict[str, Any] = {"steps": len(rows), "metrics": {}, "evaluations": {}}
    for name in METRICS:
        if all(name in row for row in rows):
            found["metrics"][name] = {
                "first": mean(rows[:FIRST], name),
                "last": mean(rows[-LAST:], name),
            }
    for name in EVALUATED:
        with_it = [row[name] for row in evaluations if name in row]
        if with_it:
            found["evaluations"][name] = {"first": with_it[0], "last": with_it[-1]}
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("name", help="of the file, in docs/figures")
    parser.add_argument("runs", nargs="+", type=Path, help="directories of finished runs")
    parser.add_argument("--commit", required=True, help="that the runs were made at")
    parser.add_argument("--command", required=True, help="that made them")
    parser.add_argument("--add", action="store_true", help="keep the runs that the file has")
    asked = parser.parse_args()
    path = HERE / asked.name
    data: dict[str, Any] = (
        json.loads(path.read_text()) if asked.add else {"first": FIRST, "last": LAST, "runs": {}}
    )
    for run in asked.runs:
        data["runs"][run.name] = {"commit": asked.commit, "command": asked.command} | came_to(run)
    path.write_text(json.dumps(data) + "\n")


if __name__ == "__main__":
    main()
