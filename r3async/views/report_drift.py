"""How old and how far off the trained tokens were: a histogram of ages, and drift over the run as a table."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from r3async.record.catalogue import Stats, figure_label, finite, metric
from r3async.record.routes import RouteFileError, RouteIndex, TrainedRoutes, load
from r3async.views.summary import format_number

PARTS = 10
MAX_SAMPLES = 2000
COLUMNS = (
    ("rollout_kl/k1", "mean"),
    ("rollout_kl/k2", "mean"),
    ("rollout_kl/k3", "mean"),
    ("rollout_kl/k3", "high"),
    ("rollout_kl/coef", "mean"),
    ("ratio/ess", "mean"),
    ("ratio/max", "high"),
    ("rollout_corr/clipped_fraction", "mean"),
    ("routing/agreement", "mean"),
    ("staleness/mean", "mean"),
    ("optimizer/broken", "high"),
)
"""Metrics, and which of their `Stats` over a part of the run."""


def drift_table(rows: Sequence[dict[str, Any]]) -> dict[str, Any] | None:
    """`titles` of columns, and `lines` of steps and cells: ten parts of the run, then all of it. Columns that were never measured
    are left out; None without any of drift."""
    columns = [column for column in COLUMNS if Stats.of(rows, column[0]).mean is not None]
    if not {"rollout_kl/k1", "rollout_kl/k2", "rollout_kl/k3"} & {name for name, _ in columns}:
        return None
    edges = [len(rows) * part // min(PARTS, len(rows)) for part in range(min(PARTS, len(rows)) + 1)]
    parts = [(_steps(rows[a:b]), rows[a:b]) for a, b in pairwise(edges)]
    parts += [("all", rows)] if len(parts) > 1 else []
    titles = [figure_label(metric(name), of) for name, of in columns]
    lines = [
        (steps, [format_number(getattr(Stats.of(part, name), of)) for name, of in columns]) for steps, part in parts
    ]
    return {"titles": titles, "lines": lines}


def _steps(part: Sequence[dict[str, Any]]) -> str:
    first, last = part[0].get("step", "?"), part[-1].get("step", "?")
    return f"{first}" if first == last else f"{first} – {last}"


def describe_ages(run_dir: Path, rows: Sequence[dict[str, Any]], bound: int | None) -> dict[str, Any] | None:
    """Bars of age, in versions: shares of the trained tokens whose routes were kept; without any, of steps by their oldest."""
    made = {row.get("step"): row.get("version") for row in rows}
    counts: Counter[int] = Counter()
    samples = 0
    entries = RouteIndex(run_dir).trained
    for entry in entries[:: -(-len(entries) // MAX_SAMPLES) or 1]:
        version = made.get(entry.facts["step"])
        if not isinstance(version, int):
            continue
        try:
            trained = load(entry, TrainedRoutes)
        except RouteFileError:
            continue
        # The step that makes version v trains with the weights of v - 1.
        counts.update((version - 1 - trained.policy_version[trained.loss_mask]).tolist())
        samples += 1
    what = f"share of {counts.total():,} trained tokens, in the {samples} samples whose routes were kept"
    if not counts:
        counts.update(int(age) for row in rows if (age := finite(row.get("staleness/max"))) is not None)
        what = "share of steps by their oldest token"
    if not counts:
        return None
    ages = (
        list(range(min(0, *counts), max(*counts, bound or 0) + 1))
        if len(counts) > 1
        else sorted({*counts, 0, bound or 0})
    )
    return {
        "id": "ages",
        "title": "Age",
        "caption": f"versions between sampling and training; {what}",
        "x": ages,
        "y": [counts[age] / counts.total() for age in ages],
        "bound": bound,
    }
