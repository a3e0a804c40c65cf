"""Tabulate and draw predicted clusters by staleness bound and size: `r3async plan PRESET --capacity`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from html import escape

import msgspec

from .cluster import Model, Prediction, predict

IDLE = 0.1
"""Share of its time below which a waiting learner counts as busy."""
SLOWER = 1.05
"""Factor on the seconds per step up to which one cluster counts as fast as another."""


class Point(msgspec.Struct, frozen=True):
    """One predicted cluster."""

    max_staleness: int
    generators: int
    prediction: Prediction


class Report(msgspec.Struct, frozen=True):
    """The predicted clusters and a recommendation.

    Attributes:
        advice: In words, the fewest generators and the smallest bound that are as fast as any here.
    """

    simulate: str
    model: Model
    points: list[Point]
    advice: str


def sweep(
    model: Model,
    *,
    staleness: Sequence[int],
    generators: Sequence[int],
    steps: int = 32,
    settle: int = 8,
    seed: int = 0,
    say: Callable[[str], object] = lambda _: None,
) -> Report:
    """Predict every combination. An engine has places for what the slots let it play, and at most those of `model`."""
    points = []
    for count in generators:
        for bound in staleness:
            settings = msgspec.structs.replace(model, max_staleness=bound, generators=count)
            made = predict(settings, steps=steps, settle=settle, seed=seed)
            points.append(Point(bound, count, msgspec.structs.replace(made, step_ends=[])))
            say(f"{count} generators, max_staleness {bound}: {made.seconds_per_step:.2f} s a step")
    return Report("capacity", model, points, advise(points))


def best(points: Sequence[Point]) -> Point:
    """Return the cluster with the fewest generators, then the smallest bound, of those as fast as the fastest."""
    fastest = min(p.prediction.seconds_per_step for p in points)
    able = [p for p in points if p.prediction.seconds_per_step <= SLOWER * fastest]
    return min(able, key=lambda p: (p.generators, p.max_staleness))


def advise(points: Sequence[Point]) -> str:
    chosen = best(points)
    made = chosen.prediction
    said = (
        f"generator.count = {chosen.generators} and schedule.max_staleness = {chosen.max_staleness}: "
        f"{made.seconds_per_step:.2f} s a step, tokens of age {made.mean_age:.1f} ({made.max_age} at most)"
    )
    if made.learner_idle > IDLE:
        return f"{said}; the learner still waits {made.learner_idle:.0%} of its time: more generators would help"
    if made.engine_idle > 0.5:
        return f"{said}; engines are idle {made.engine_idle:.0%} of their time: more learner ranks would help"
    return said


def lines(report: Report) -> list[str]:
    """Return a readable table."""
    head = (
        f"{'generators':>10} {'staleness':>9} {'s/step':>8} {'learner idle':>12} {'engine idle':>11} "
        f"{'running':>8} {'age':>5} {'max':>4} {'tokens/s':>9} {'MB/s':>7} {'lost':>6}"
    )
    rows = [
        f"{p.generators:>10} {p.max_staleness:>9} {m.seconds_per_step:>8.2f} {m.learner_idle:>12.0%} {m.engine_idle:>11.0%} "
        f"{m.mean_running:>8.1f} {m.mean_age:>5.1f} {m.max_age:>4} {m.trained_tokens:>9,.0f} {m.network_bytes / 1e6:>7.1f} "
        f"{m.lost_tokens:>6.1%}"
        for p in report.points
        for m in [p.prediction]
    ]
    return [head, *rows, "", report.advice]


WIDTH, HEIGHT, LEFT, TOP = 720, 380, 70, 30
COLOURS = ("#2563eb", "#dc2626", "#059669", "#d97706", "#7c3aed", "#0891b2", "#4b5563")


def picture(report: Report) -> str:
    """Return an SVG of seconds per step against the staleness bound, with one line per number of generators."""
    points = report.points
    bounds = sorted({p.max_staleness for p in points})
    most = max(p.prediction.seconds_per_step for p in points) * 1.08 or 1.0
    wide, high = WIDTH - LEFT - 140, HEIGHT - TOP - 60

    def place(bound: int, seconds: float) -> tuple[float, float]:
        share = bounds.index(bound) / max(len(bounds) - 1, 1)
        return LEFT + share * wide, TOP + high * (1 - seconds / most)

    drawn = []
    for tick in range(5):
        value = most * tick / 4
        _, y = place(bounds[0], value)
        drawn.append(f'<line x1="{LEFT}" x2="{LEFT + wide}" y1="{y:.1f}" y2="{y:.1f}" stroke="#e5e7eb"/>')
        drawn.append(f'<text x="{LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{value:.3g}</text>')
    for bound in bounds:
        x, _ = place(bound, 0)
        drawn.append(f'<text x="{x:.1f}" y="{TOP + high + 20}" text-anchor="middle">{bound}</text>')
    for number, count in enumerate(sorted({p.generators for p in points})):
        colour = COLOURS[number % len(COLOURS)]
        mine = sorted((p for p in points if p.generators == count), key=lambda p: p.max_staleness)
        path = [place(p.max_staleness, p.prediction.seconds_per_step) for p in mine]
        joined = " ".join(f"{x:.1f},{y:.1f}" for x, y in path)
        drawn.append(f'<polyline points="{joined}" fill="none" stroke="{colour}" stroke-width="2"/>')
        drawn += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3.5" fill="{colour}"/>' for x, y in path]
        y = TOP + 16 * number + 10
        drawn.append(
            f'<text x="{LEFT + wide + 14}" y="{y}" fill="{colour}">{count} generator{"s" * (count != 1)}</text>'
        )
    drawn.append(f'<text x="{LEFT + wide / 2}" y="{HEIGHT - 14}" text-anchor="middle">schedule.max_staleness</text>')
    drawn.append(f'<text x="{LEFT}" y="{TOP - 12}">seconds a step</text>')
    label = escape(report.advice)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" font-size="12" '
        f'role="img" aria-label="{label}"><title>{label}</title>{"".join(drawn)}</svg>\n'
    )
