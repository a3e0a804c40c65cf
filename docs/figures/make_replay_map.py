"""Print the table of docs/routing-replay.md on what replay is worth to training, from the runs kept in `replay-map.jsonl`.

    git checkout ab1215e1 && python -m dev bench replay-map --data docs/figures/replay-map.jsonl   # made the runs
    python docs/figures/make_replay_map.py                           # writes the table into the page
    python docs/figures/make_replay_map.py --check                   # exits 1 if the page has another

A line of that file is one run: its settings, its seed, and means of ten steps of reward, drift and agreement.
"""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import msgspec

from r3async.data.statistics import t_quantile

HERE = Path(__file__).parent
DATA = HERE / "replay-map.jsonl"
PAGE = HERE.parent / "routing-replay.md"
FIRST = "step 1: "


class Run(msgspec.Struct, frozen=True):
    """One run, a line of the data file. Each value of a curve is the mean of ten steps.

    `replayed` and `served` are the k3 of the rollout policy to the learner, with the routes that the loss sees and with
    the learner's own (`rollout_kl/k3`, `rollout_kl/served_k3`).
    """

    point: str
    setting: dict[str, Any]
    replay: str
    seed: int
    reward: list[float]
    replayed: list[float]
    served: list[float]
    agreement: list[float]
    seconds: float

    @property
    def end(self) -> float:
        """The mean reward of the last quarter."""
        return fmean(self.reward[-max(1, len(self.reward) // 4) :])

    @property
    def collapsed(self) -> bool:
        return self.reward[-1] < 0.5 * max(self.reward)


class Difference(msgspec.Struct, frozen=True):
    """Differences of paired runs, R3's value less the other's.

    Attributes:
        half_width: half the width of the mean's 95 % interval.
        detectable: the true difference that this many pairs would find with a probability of 0.8 (two-sided test at 5
            %).
    """

    pairs: int
    mean: float
    half_width: float
    detectable: float


class Row(msgspec.Struct, frozen=True):
    """One point in one mode, with means over seeds: `reward` of the last quarter of a run, KL and agreement of whole
    runs. `gain` is the gain of R3's reward over this mode's."""

    point: str
    replay: str
    seeds: int
    reward: float
    replayed: float
    served: float
    agreement: float
    collapsed: int
    gain: Difference | None


def rows(runs: Iterable[Run]) -> list[Row]:
    """Return one row for each point and mode, in the order of the runs."""
    by: dict[str, dict[str, dict[int, Run]]] = {}
    for r in runs:
        by.setdefault(r.point, {}).setdefault(r.replay, {})[r.seed] = r
    out = []
    for point, modes in by.items():
        for mode in (m for m in ("off", "learner", "rollout") if m in modes):
            of, r3 = modes[mode], modes.get("rollout", {})
            pairs = [r3[seed].end - r.end for seed, r in of.items() if seed in r3]
            out.append(
                Row(
                    point,
                    mode,
                    len(of),
                    fmean(r.end for r in of.values()),
                    fmean(fmean(r.replayed) for r in of.values()),
                    fmean(fmean(r.served) for r in of.values()),
                    fmean(fmean(r.agreement) for r in of.values()),
                    sum(r.collapsed for r in of.values()),
                    difference(pairs) if mode != "rollout" and len(pairs) > 1 else None,
                )
            )
    return out


def difference(values: Sequence[float]) -> Difference:
    """Summarize at least two paired differences."""
    n = len(values)
    wide, power = t_quantile(n - 1), t_quantile(n - 1, 0.6)
    error = stdev(values) / math.sqrt(n)
    return Difference(n, fmean(values), wide * error, (wide + power) * error)


HEADS = (
    "point",
    "KL: off; R3, replayed; R3, served",
    "reward, last quarter: off; R2; R3",
    "R3 - off, 95 % interval",
)


def read(data: Path) -> list[Run]:
    return [msgspec.json.decode(line, type=Run) for line in data.read_bytes().splitlines()]


def markdown(heads: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    head, *rest = (f"| {' | '.join(line)} |\n" for line in [heads, *lines])
    return "".join([head, "|---" * len(heads) + "|\n", *rest])


def trained(runs: Sequence[Run]) -> str:
    """While it trains: a line for each point that was trained in all modes."""
    by: dict[str, dict[str, Row]] = {}
    for row in rows([r for r in runs if not r.point.startswith(FIRST)]):
        by.setdefault(row.point, {})[row.replay] = row
    lines = []
    for point, modes in by.items():
        if len(modes) < 3:
            continue
        off, r2, r3 = (modes[mode] for mode in ("off", "learner", "rollout"))
        assert off.gain is not None
        lines.append(
            [
                point.replace("noise=0.0 precision=", ""),
                f"{off.served:.2g}; {r3.replayed:.2g}; {r3.served:.2g}",
                f"{off.reward:.3f}; {r2.reward:.3f}; {r3.reward:.3f}",
                f"{off.gain.mean:+.3f} ± {off.gain.half_width:.3f}",
            ]
        )
    return markdown(HEADS, lines)


def page(text: str, runs: Sequence[Run]) -> str:
    """The page with its table, between `<!-- replay map: trained -->` and `<!-- end of trained -->`."""
    place = re.compile(r"(<!-- replay map: trained -->\n).*?(<!-- end of trained -->)", re.DOTALL)
    table = trained(runs)
    text, count = place.subn(lambda m: f"{m[1]}{table}{m[2]}", text)
    if count != 1:
        raise SystemExit(f"{PAGE} has {count} places for the table")
    return text


if __name__ == "__main__":
    text = PAGE.read_text()
    made = page(text, read(DATA))
    if sys.argv[1:] == ["--check"]:
        sys.exit(made != text)
    PAGE.write_text(made)
