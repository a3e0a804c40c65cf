"""How old and how far off the trained tokens were: a histogram of ages, and drift over the run as a table."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from html import escape
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from r3async.observe.charts import finite
from r3async.observe.routes import RouteFileError, RouteIndex, TrainedRoutes, load
from r3async.observe.summary import format_number

PARTS = 10
MAX_SAMPLES = 2000


class Column(NamedTuple):
    title: str
    metric: str
    worst: bool = False
    """The largest of the part's steps, not their mean."""


COLUMNS = (
    Column("k1", "rollout_kl/k1"),
    Column("k2", "rollout_kl/k2"),
    Column("k3", "rollout_kl/k3"),
    Column("worst k3", "rollout_kl/k3", True),
    Column("coefficient", "rollout_kl/coef"),
    Column("effective samples", "ratio/ess"),
    Column("largest ratio", "ratio/max", True),
    Column("clipped", "rollout_corr/clipped_fraction"),
    Column("agreement", "routing/agreement"),
    Column("mean age", "staleness/mean"),
    Column("refused", "optimizer/broken", True),
)


def _known(rows: Sequence[dict[str, Any]], column: Column) -> list[float]:
    return [value for row in rows if (value := finite(row.get(column.metric))) is not None]


def drift_table(rows: Sequence[dict[str, Any]]) -> str:
    """Ten parts of the run, then all of it. Columns that were never measured are left out."""
    columns = [column for column in COLUMNS if _known(rows, column)]
    if not columns or not any(column.metric.startswith("rollout_kl/k") for column in columns):
        return ""
    edges = [len(rows) * part // min(PARTS, len(rows)) for part in range(min(PARTS, len(rows)) + 1)]
    parts = [rows[a:b] for a, b in pairwise(edges)]
    lines = [_line(_steps(part), part, columns) for part in parts]
    if len(parts) > 1:
        lines.append(_line("all", rows, columns, "class='total'"))
    head = "".join(f"<th>{escape(column.title)}</th>" for column in columns)
    return (
        "<h2>Drift<small>KL(rollout ‖ learner) in nats, means over steps</small></h2>\n"
        f"<div class='card wide numbers'><table><tr><th>steps</th>{head}</tr>{''.join(lines)}</table></div>"
    )


def _steps(part: Sequence[dict[str, Any]]) -> str:
    first, last = part[0].get("step", "?"), part[-1].get("step", "?")
    return f"{first}" if first == last else f"{first} – {last}"


def _line(title: str, rows: Sequence[dict[str, Any]], columns: Sequence[Column], kind: str = "") -> str:
    cells = []
    for column in columns:
        values = _known(rows, column)
        number = None if not values else max(values) if column.worst else sum(values) / len(values)
        cells.append(f"<td>{format_number(number)}</td>")
    return f"<tr {kind}><td>{escape(title)}</td>{''.join(cells)}</tr>"


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
