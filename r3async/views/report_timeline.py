"""The timeline in a report, with what each process waited for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from r3async.record.timeline import Span, compute_busy_shares
from r3async.views.number_formats import format_percent

HIDDEN_ACTIVITIES = ("busy", "call", "environment")
"""Activities of the engine and of single episodes, which are too many and too short to be drawn."""
MAX_SPANS = 4000
INITIAL_STEPS = 12
"""Number of steps that the page shows at first; the reader can zoom out to all kept steps."""

ACTIVITY_STYLES = {
    "play": ("runs episodes", "green"),
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
"""Label and color of each activity (`Span.what`). Other activities are gray and have their
own name as label."""


def _get_lane_order(actor: str) -> tuple[int, str]:
    order = ("generator", "engine", "transport", "learner", "weights")
    return next((i for i, name in enumerate(order) if actor.startswith(name)), len(order)), actor


def build_timeline(spans: Sequence[Span]) -> dict[str, Any] | None:
    """Build lanes and bars of the last `MAX_SPANS` spans, in seconds since the first span.
    None without spans."""
    if not spans:
        return None
    origin = min(span.start for span in spans)
    kept = [span for span in spans if span.what not in HIDDEN_ACTIVITIES][-MAX_SPANS:]
    first = min((span.start for span in kept), default=origin)
    bars = []
    for what in sorted(
        {span.what for span in kept},
        key=lambda w: (
            list(ACTIVITY_STYLES).index(w) if w in ACTIVITY_STYLES else len(ACTIVITY_STYLES)
        ),
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
    zoom = (
        min(
            (span.start for span in kept if since is not None and span.step == since), default=first
        )
        - origin
    )
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
    """Describe in sentences who waited for whom, as shares of the whole time."""
    shares = compute_busy_shares(spans)
    sentences = []
    train = shares.get(("learner", "train"), 0.0)
    wait = shares.get(("learner", "wait"), 0.0)
    if train or wait:
        sentences.append(
            f"The learner trained {format_percent(train)} of the time and waited "
            f"{format_percent(wait)} for data."
        )
        if wait > 0.25 and wait > 0.5 * train:
            sentences.append("The generators were the bottleneck.")
        elif wait < 0.05:
            sentences.append("The learner was the bottleneck.")
    paused = max((share for (who, what), share in shares.items() if what == "pause"), default=0.0)
    if paused:
        sentences.append(
            f"Engines were paused {format_percent(paused)} of the time for new weights."
        )
    blocked = max(
        (share for (who, what), share in shares.items() if what == "lease_wait"), default=0.0
    )
    if blocked:
        sentences.append(
            f"A generator waited {format_percent(blocked)} of the time for a free slot."
        )
    return " ".join(sentences)
