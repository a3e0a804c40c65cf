"""The timeline of a report: lanes of spans for the page's script, and a table of who waited for whom."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from r3async.record.timeline import Span, busy_shares
from r3async.views.summary import format_percent

DETAILS = ("busy", "call", "environment")
"""Of the engine, and of single episodes: too many, and too short, to be seen here."""
MAX_SPANS = 4000
SHOWN_STEPS = 12
"""Steps that the page shows at first; the reader can zoom out to all that were kept."""

KINDS = {
    "play": ("plays", "green"),
    "start": ("starts", "violet"),
    "pause": ("stands still for weights", "red"),
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


def _rank(who: str) -> tuple[int, str]:
    order = ("generator", "engine", "transport", "learner", "weights")
    return next((i for i, name in enumerate(order) if who.startswith(name)), len(order)), who


def describe_timeline(spans: Sequence[Span]) -> dict[str, Any] | None:
    """Lanes and bars, in seconds since the first span; the last `MAX_SPANS`. None without spans."""
    if not spans:
        return None
    origin = min(span.start for span in spans)
    kept = [span for span in spans if span.what not in DETAILS][-MAX_SPANS:]
    first = min((span.start for span in kept), default=origin)
    bars = []
    for what in sorted({span.what for span in kept}, key=lambda w: list(KINDS).index(w) if w in KINDS else len(KINDS)):
        of = [span for span in kept if span.what == what]
        label, color = KINDS.get(what, (what, "faint"))
        bars.append(
            {
                "label": label,
                "color": color,
                "lane": [span.who for span in of],
                "start": [round(span.start - origin, 4) for span in of],
                "seconds": [round(span.end - span.start, 4) for span in of],
                "step": [_where(span) for span in of],
            }
        )
    end = max(span.end for span in spans) - origin
    steps = sorted({span.step for span in kept if span.step is not None})
    since = steps[-SHOWN_STEPS] if len(steps) >= SHOWN_STEPS else None
    zoom = min((span.start for span in kept if since is not None and span.step == since), default=first) - origin
    return {
        "id": "timeline",
        "caption": "as every process wrote it down; drag to zoom, double-click to see everything",
        "lanes": sorted({span.who for span in kept}, key=_rank, reverse=True),
        "bars": bars,
        "range": [round(zoom, 3), round(end, 3)],
    }


def _where(span: Span) -> str:
    step = "" if span.step is None else f" step {span.step}"
    return step + ("" if span.version is None else f" version {span.version}")


def waits(spans: Sequence[Span]) -> str:
    """Sentences: who waited for whom, in shares of the whole time."""
    shares = busy_shares(spans)
    told = []
    train, wait = shares.get(("learner", "train"), 0.0), shares.get(("learner", "wait"), 0.0)
    if train or wait:
        told.append(
            f"The learner trained {format_percent(train)} of the time and waited {format_percent(wait)} for data."
        )
        if wait > 0.25 and wait > 0.5 * train:
            told.append("The generators were the bottleneck.")
        elif wait < 0.05:
            told.append("The learner was the bottleneck.")
    paused = max((share for (who, what), share in shares.items() if what == "pause"), default=0.0)
    if paused:
        told.append(f"Engines stood still {format_percent(paused)} of the time for new weights.")
    blocked = max((share for (who, what), share in shares.items() if what == "lease_wait"), default=0.0)
    if blocked:
        told.append(f"A generator waited {format_percent(blocked)} of the time for a free slot.")
    return " ".join(told)
