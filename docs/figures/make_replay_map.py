"""Print the tables of docs/routing-replay.md on what replay is worth to training, from the runs kept in `replay-map.jsonl`.

    python -m dev bench replay-map --data docs/figures/replay-map.jsonl    # makes the runs that are not there yet
    python docs/figures/make_replay_map.py                           # writes the tables into the page
    python docs/figures/make_replay_map.py --check                   # exits 1 if the page has others

A line of that file is one run: its settings, its seed, and means of ten steps of reward, drift and agreement.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean

from dev.bench.replay_map import HEADS, Run, cells, read, rows

HERE = Path(__file__).parent
DATA = HERE / "replay-map.jsonl"
PAGE = HERE.parent / "routing-replay.md"
FIRST = "step 1: "


def markdown(heads: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    head, *rest = (f"| {' | '.join(line)} |\n" for line in [heads, *lines])
    return "".join([head, "|---" * len(heads) + "|\n", *rest])


def apart(runs: Sequence[Run]) -> str:
    """Before training: what engine and learner differ by while their weights are equal."""
    lines = []
    for row in rows([r for r in runs if r.point.startswith(FIRST)]):
        mine = [r for r in runs if r.point == row.point]
        ratios = sorted(fmean(r.served) / fmean(r.replayed) for r in mine if fmean(r.replayed) > 1e-9)
        ratio = f"{row.served / row.replayed:.1f} ({ratios[0]:.1f} - {ratios[-1]:.1f})" if ratios else ""
        name = row.point.removeprefix(FIRST).replace("noise=0.0 precision=", "").replace("=", " ")
        lines.append([name, str(row.seeds), f"{row.agreement:.3f}", f"{row.served:.2g}", f"{row.replayed:.2g}", ratio])
    heads = ("disturbance", "seeds", "agreement", "KL, own routing", "KL, replayed", "ratio (by seed)")
    return markdown(heads, lines)


def trained(runs: Sequence[Run]) -> str:
    return markdown(HEADS, cells(rows([r for r in runs if not r.point.startswith(FIRST)])))


TABLES = {"apart": apart, "trained": trained}


def page(text: str, runs: Sequence[Run]) -> str:
    """The page with its tables, which stand between `<!-- replay map: NAME -->` and `<!-- end of NAME -->`."""
    for name, made in TABLES.items():
        place = re.compile(rf"(<!-- replay map: {name} -->\n).*?(<!-- end of {name} -->)", re.DOTALL)
        table = made(runs)
        text, count = place.subn(lambda m, table=table: f"{m[1]}{table}{m[2]}", text)
        if count != 1:
            raise SystemExit(f"{PAGE} has {count} places for the table {name!r}")
    return text


if __name__ == "__main__":
    text = PAGE.read_text()
    made = page(text, read(DATA))
    if sys.argv[1:] == ["--check"]:
        sys.exit(made != text)
    PAGE.write_text(made)
