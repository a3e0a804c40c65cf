"""What a report draws besides curves: heat maps of routing, a histogram of ages, and the timeline with who waited for whom."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from typing import Annotated, Any

import msgspec

from r3async.record.catalogue import finite_or_none
from r3async.record.reading import convert_valid
from r3async.record.timeline import Span, compute_busy_shares
from r3async.views.summary import format_percent

MAX_MAP_COLUMNS = 400
STALENESS_METRIC = re.compile(r"staleness/age_(\d+)")
"""A metric that counts the trained tokens of that age."""


class AgreementLine(msgspec.Struct):
    """Of a line of `routing.jsonl`: by MoE layer, the share of recorded tokens for which the learner would choose the engine's
    experts."""

    step: float
    agreement: Annotated[list[float], msgspec.Meta(min_length=1)]


class ExpertLoadLine(msgspec.Struct):
    """Of such a line: tokens by MoE layer and expert."""

    load: Annotated[list[Annotated[list[float], msgspec.Meta(min_length=1)]], msgspec.Meta(min_length=1)]
    step: Any = "?"


def build_route_maps(lines: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The maps that there is data for, as the page's script wants them; none for a dense model or an older run."""
    return [found for found in (_build_agreement_map(lines), _build_load_map(lines)) if found is not None]


def _build_agreement_map(lines: Sequence[dict[str, Any]]) -> dict[str, Any] | None:
    rows = list(convert_valid(lines, AgreementLine))
    rows = [row for row in rows if len(row.agreement) == len(rows[-1].agreement)]
    if not rows:
        return None
    rows = rows[:: -len(rows) // MAX_MAP_COLUMNS][::-1]  # the last step is always among them
    shares = [row.agreement for row in rows]
    return {
        "id": "map-agreement",
        "title": "Agreement by layer",
        "caption": "recorded tokens for which the learner's router would choose the engine's experts",
        "x": [row.step for row in rows],
        "y": list(range(len(shares[0]))),
        "z": [[round(share, 4) for share in layer] for layer in zip(*shares, strict=True)],
        "x_title": "step",
        "format": ".2%",
        "range": [min(0.99, *map(min, shares)), 1],
        "colors": ["orange", "blue-soft"],
        "each": "step %{x}, MoE layer %{y}",
    }


def _build_load_map(lines: Sequence[dict[str, Any]]) -> dict[str, Any] | None:
    found = [line for line in convert_valid(lines, ExpertLoadLine) if len({len(layer) for layer in line.load}) == 1]
    if not found:
        return None
    step, table = found[-1].step, found[-1].load
    shares = [[round(tokens / max(sum(layer) / len(layer), 1e-9), 3) for tokens in layer] for layer in table]
    return {
        "id": "map-load",
        "title": "Load per expert",
        "caption": f"step {step}: tokens sent to each expert, over its layer's mean",
        "x": list(range(len(table[0]))),
        "y": list(range(len(table))),
        "z": shares,
        "x_title": "expert",
        "format": ".2f",
        "range": [0, max(2, *map(max, shares))],
        "colors": ["grey-soft", "blue"],
        "each": "expert %{x}, MoE layer %{y}",
    }


def build_staleness_histogram(rows: Sequence[dict[str, Any]], bound: int | None) -> dict[str, Any] | None:
    """Bars of age, in versions: shares of all trained tokens; where rows do not say, of steps by their oldest token."""
    counts: Counter[int] = Counter()
    for name in sorted(set().union(*rows)):
        if age := STALENESS_METRIC.fullmatch(name):
            counts[int(age[1])] = int(sum(finite_or_none(row.get(name)) or 0 for row in rows))
    counts = +counts
    what = f"share of {counts.total():,} trained tokens"
    if not counts:
        counts.update(int(oldest) for row in rows if (oldest := finite_or_none(row.get("staleness/max"))) is not None)
        what = "share of steps by their oldest token"
    if not counts:
        return None
    ages = sorted({*range((bound or 0) + 1), *counts})
    return {
        "id": "ages",
        "title": "Age",
        "caption": f"versions between sampling and training; {what}",
        "x": ages,
        "y": [counts[age] / counts.total() for age in ages],
        "bound": bound,
    }


# -- timeline ----------------------------------------------------------------------------------------------------------

HIDDEN_ACTIVITIES = ("busy", "call", "environment")
"""Of the engine, and of single episodes: too many, and too short, to be seen here."""
MAX_SPANS = 4000
INITIAL_STEPS = 12
"""Steps that the page shows at first; the reader can zoom out to all that were kept."""

ACTIVITY_STYLES = {
    "play": ("plays", "green"),
    "start": ("starts", "violet"),
    "pause": ("is paused for weights", "red"),
    "wait": ("waits for data", "orange"),
    "lease_wait": ("waits for a free slot", "orange"),
    "send": ("sends", "violet"),
    "receive": ("receives", "violet"),
    "train": ("trains", "blue"),
    "snapshot": ("copies weights", "violet"),
    "write": ("writes weights", "amber"),
    "deliver": ("delivers weights", "teal"),
}
"""By `what`: in words, and the colour. Others are grey, under their own name."""


def _get_lane_order(actor: str) -> tuple[int, str]:
    order = ("generator", "engine", "transport", "learner", "weights")
    return next((i for i, name in enumerate(order) if actor.startswith(name)), len(order)), actor


def build_timeline(spans: Sequence[Span]) -> dict[str, Any] | None:
    """Lanes and bars, in seconds since the first span; the last `MAX_SPANS`. None without spans."""
    if not spans:
        return None
    origin = min(span.start for span in spans)
    kept = [span for span in spans if span.what not in HIDDEN_ACTIVITIES][-MAX_SPANS:]
    first = min((span.start for span in kept), default=origin)
    bars = []
    for what in sorted(
        {span.what for span in kept},
        key=lambda w: list(ACTIVITY_STYLES).index(w) if w in ACTIVITY_STYLES else len(ACTIVITY_STYLES),
    ):
        of = [span for span in kept if span.what == what]
        label, color = ACTIVITY_STYLES.get(what, (what, "faint"))
        bars.append(
            {
                "label": label,
                "color": color,
                "lane": [span.who for span in of],
                "start": [round(span.start - origin, 4) for span in of],
                "seconds": [round(span.end - span.start, 4) for span in of],
                "step": [_format_span_step(span) for span in of],
            }
        )
    end = max(span.end for span in spans) - origin
    steps = sorted({span.step for span in kept if span.step is not None})
    since = steps[-INITIAL_STEPS] if len(steps) >= INITIAL_STEPS else None
    zoom = min((span.start for span in kept if since is not None and span.step == since), default=first) - origin
    return {
        "id": "timeline",
        "caption": "as every process wrote it down; drag to zoom, double-click to see everything",
        "lanes": sorted({span.who for span in kept}, key=_get_lane_order, reverse=True),
        "bars": bars,
        "range": [round(zoom, 3), round(end, 3)],
    }


def _format_span_step(span: Span) -> str:
    step = "" if span.step is None else f" step {span.step}"
    return step + ("" if span.version is None else f" version {span.version}")


def summarize_waits(spans: Sequence[Span]) -> str:
    """Sentences: who waited for whom, in shares of the whole time."""
    shares = compute_busy_shares(spans)
    sentences = []
    train, wait = shares.get(("learner", "train"), 0.0), shares.get(("learner", "wait"), 0.0)
    if train or wait:
        sentences.append(
            f"The learner trained {format_percent(train)} of the time and waited {format_percent(wait)} for data."
        )
        if wait > 0.25 and wait > 0.5 * train:
            sentences.append("The generators were the bottleneck.")
        elif wait < 0.05:
            sentences.append("The learner was the bottleneck.")
    paused = max((share for (who, what), share in shares.items() if what == "pause"), default=0.0)
    if paused:
        sentences.append(f"Engines were paused {format_percent(paused)} of the time for new weights.")
    blocked = max((share for (who, what), share in shares.items() if what == "lease_wait"), default=0.0)
    if blocked:
        sentences.append(f"A generator waited {format_percent(blocked)} of the time for a free slot.")
    return " ".join(sentences)
