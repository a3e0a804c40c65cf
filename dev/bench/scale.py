"""The benchmark `bench scale`: growth of our own CPU time against growth of the work.

An **axis** is something that grows in use: turns of an episode, samples of a step, generators. For each of its sizes an
axis measures CPU time of our code (no model, no engine) and the work done, in the axis's unit. The exponent `b` of
`seconds = a · work^b`, fitted by least squares in logarithms, is 1 if cost grows in proportion to work.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import msgspec
import numpy as np

from dev.bench.jobs import Say, table
from r3async.config import ConfigError, did_you_mean

LIMIT = 1.1
"""Exponent above which the benchmark fails, unless an axis has a separate limit."""
REQUESTS_LIMIT = 1.5
"""Limit of axis `requests`. Each request of an agent repeats its conversation: those messages are compared with the
request before, and freed."""


class Point(msgspec.Struct, frozen=True):
    """The measurement of one size of an axis.

    Attributes:
        work: units of work done.
        cpu_seconds: CPU time of our code for them, the median of `repeats`.
        spread: (largest - smallest) / median of the repeats.
        counts: operations that it took (messages rendered, bytes copied).
    """

    size: int
    work: float
    cpu_seconds: float
    repeats: int = 1
    spread: float = 0.0
    counts: dict[str, float] = {}

    @property
    def unit_us(self) -> float:
        """The CPU microseconds per unit of work."""
        return 1e6 * self.cpu_seconds / self.work


class Axis(msgspec.Struct, frozen=True):
    """The result of one axis.

    Attributes:
        exponent: exponent over all points.
        tail: exponent over the larger half of the points, where a constant start no longer shows.
    """

    name: str
    unit: str
    points: list[Point]
    exponent: float
    tail: float
    limit: float = LIMIT


class Report(msgspec.Struct, frozen=True):
    benchmark: str
    axes: list[Axis]

    @property
    def steep(self) -> list[str]:
        """The axes whose cost grows faster than their work."""
        return [axis.name for axis in self.axes if max(axis.exponent, axis.tail) > axis.limit]


class Growth(msgspec.Struct, frozen=True):
    """A way to measure an axis: `measure(quick, say)` returns its points, small sizes first. `unit` names one unit of
    work."""

    unit: str
    measure: Callable[[bool, Say], list[Point]]
    limit: float = LIMIT


def _turns(quick: bool, say: Say) -> list[Point]:
    from dev.bench.scale_turns import measure

    return measure(quick, say)


def _of_data(name: str) -> Callable[[bool, Say], list[Point]]:
    def measure(quick: bool, say: Say) -> list[Point]:
        from dev.bench import scale_data

        points: list[Point] = getattr(scale_data, name)(quick, say)
        return points

    return measure


def _requests(quick: bool, say: Say) -> list[Point]:
    from dev.bench.scale_turns import measure_requests

    return measure_requests(quick, say)


AXES: Mapping[str, Growth] = {
    "turns": Growth("token", _turns),
    "rows": Growth("row", _of_data("rows")),
    "layers": Growth("layer", _of_data("layers")),
    "experts": Growth("expert", _of_data("experts")),
    "generators": Growth("group", _of_data("generators")),
    "requests": Growth("token", _requests, REQUESTS_LIMIT),
}
"""Axes by name. The code that an axis measures is imported when it is measured."""


def run(only: Sequence[str], *, quick: bool, say: Say) -> Report:
    """Measure the named axes, or all. Raises `ConfigError` for an unknown name."""
    for name in only:
        if name not in AXES:
            known = ", ".join(AXES)
            raise ConfigError(f"--only {name!r}: {did_you_mean(name, AXES, f'there are {known}')}")
    axes = []
    for name in only or AXES:
        points = AXES[name].measure(quick, say)
        half = points[len(points) // 2 :] if len(points) > 3 else points
        axes.append(Axis(name, AXES[name].unit, points, exponent(points), exponent(half), AXES[name].limit))
    return Report("scale", axes)


def exponent(points: Sequence[Point]) -> float:
    """Return the slope of log(seconds) against log(work), by least squares."""
    work, seconds = (np.log([getattr(p, name) for p in points]) for name in ("work", "cpu_seconds"))
    return float(np.polyfit(work, seconds, 1)[0])


def render(report: Report) -> str:
    lines = []
    for axis in report.axes:
        counts = list(dict.fromkeys(name for p in axis.points for name in p.counts))
        heads = [axis.name, f"{axis.unit}s", f"CPU µs a {axis.unit}", "spread", *counts]
        rows = [
            (
                p.size,
                f"{p.work:.0f}",
                f"{p.unit_us:.2f}",
                f"{p.spread:.0%}",
                *(f"{p.counts[name]:.4g}" for name in counts),
            )
            for p in axis.points
        ]
        steep = "" if axis.name not in report.steep else f": more than {axis.limit}"
        lines += [*table(heads, rows), f"exponent {axis.exponent:.3f}, of the larger half {axis.tail:.3f}{steep}", ""]
    return "\n".join(lines)
