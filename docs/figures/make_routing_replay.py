"""Draw `routing-replay.svg` from two reports of the benchmark, which lie next to it.

    git checkout ab1215e1    # which has the benchmark
    python -m dev bench replay --json | tail -n 1 > docs/figures/routing-replay.json
    python -m dev bench replay --seeds 0 --pairs 0 --table --json | tail -n 1 > docs/figures/routing-replay-table.json
    python docs/figures/make_routing_replay.py

Standard library only. The drawing has a background of its own, light or dark as the reader's system asks for.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from html import escape
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
WIDTH, HEIGHT = 860, 360
PANEL = (340, 220)
TOP = 64
LEFT = (70, 490)

STYLE = """
.card{fill:#fff}.ink{fill:#24292f}.soft{fill:#57606a}.axis{stroke:#8c959f}.grid{stroke:#e3e6ea}
.a{stroke:#b3541e}.b{stroke:#0969da}.c{stroke:#8250df}.fc{fill:#8250df}
@media (prefers-color-scheme: dark){
.card{fill:#0d1117}.ink{fill:#e6edf3}.soft{fill:#9da7b1}.axis{stroke:#6e7681}.grid{stroke:#262c34}
.a{stroke:#f0883e}.b{stroke:#58a6ff}.c{stroke:#a78bfa}.fc{fill:#a78bfa}}
text{font:12px system-ui,-apple-system,"Segoe UI",sans-serif}.title{font-weight:600;font-size:13px}
.line{fill:none;stroke-width:2}.dash{stroke-dasharray:5 4}
"""

Point = tuple[float, float]


class Panel:
    """One pair of logarithmic axes. `x`, `y`: (smallest, largest)."""

    def __init__(
        self, left: int, title: str, note: str, x: tuple[float, float], y: tuple[float, float]
    ):
        self.left, self.x, self.y = left, x, y
        self.parts = [text(left, TOP - 34, title, "title ink"), text(left, TOP - 16, note, "soft")]

    def at(self, x: float, y: float) -> Point:
        def share(value: float, ends: tuple[float, float]) -> float:
            low, high = map(math.log10, ends)
            return (math.log10(min(max(value, ends[0]), ends[1])) - low) / (high - low)

        return self.left + PANEL[0] * share(x, self.x), TOP + PANEL[1] * (1 - share(y, self.y))

    def axes(
        self, xs: Sequence[float], ys: Sequence[float], label: str, shown: Callable[[float], str]
    ) -> None:
        bottom, right = TOP + PANEL[1], self.left + PANEL[0]
        for value in xs:
            x, _ = self.at(value, self.y[0])
            self.parts += [
                line(x, TOP, x, bottom, "grid"),
                text(x, bottom + 18, f"{value:g}", "soft", "middle"),
            ]
        for value in ys:
            _, y = self.at(self.x[0], value)
            self.parts += [
                line(self.left, y, right, y, "grid"),
                text(self.left - 8, y + 4, shown(value), "soft", "end"),
            ]
        self.parts.append(line(self.left, bottom, right, bottom, "axis"))
        self.parts.append(text(self.left + PANEL[0] / 2, bottom + 40, label, "ink", "middle"))

    def draw(self, points: Sequence[Point], kind: str, dots: bool = False) -> None:
        placed = [self.at(*point) for point in points]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in placed)
        self.parts.append(f'<polyline class="line {kind}" points="{path}"/>')
        if dots:
            fill = "f" + kind.split()[0]
            self.parts += [
                f'<circle class="{fill}" cx="{x:.1f}" cy="{y:.1f}" r="4"/>' for x, y in placed
            ]

    def legend(self, entries: Sequence[tuple[str, str]], x: float, y: float) -> None:
        for row, (kind, name) in enumerate(entries):
            at = TOP + y + 18 * row
            self.parts.append(
                f'<polyline class="line {kind}" points="{self.left + x},{at} {self.left + x + 26},{at}"/>'
            )
            self.parts.append(text(self.left + x + 32, at + 4, name, "ink"))


def text(x: float, y: float, words: str, kind: str, anchor: str = "start") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" class="{kind}" text-anchor="{anchor}">{escape(words)}</text>'


def line(x1: float, y1: float, x2: float, y2: float, kind: str) -> str:
    return f'<line class="{kind}" x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"/>'


def above(
    histograms: Sequence[Sequence[int]], *, floor: int = -6, per_decade: int = 8
) -> list[Point]:
    """(|Δ|, share of tokens above it), from the histograms of several seeds added up."""
    counts = [sum(column) for column in zip(*histograms, strict=True)]
    total, left, points = sum(counts), sum(counts), []
    for index, count in enumerate(counts):
        if left:
            points.append((10 ** (floor + index / per_decade), left / total))
        left -= count
    return points


def shape(report: dict[str, Any]) -> str:
    r = report["headline"][0]["rollouts"]
    return f"{r['layers']} layers × {r['experts']} experts, top-{r['top_k']}"


def tails(report: dict[str, Any]) -> Panel:
    cases = [case["learners"]["bfloat16"] for case in report["headline"]]
    tokens = sum(case["rollouts"]["sampled_tokens"] for case in report["headline"])
    note = f"{shape(report)}, gate std 0.1; {tokens:,} tokens"
    panel = Panel(
        LEFT[0], "Share of sampled tokens with |Δ| above x", note, (1e-3, 0.3), (3e-5, 1.0)
    )
    panel.axes(
        [0.001, 0.01, 0.1],
        [1, 0.1, 0.01, 1e-3, 1e-4],
        "|Δ| = |log π − log μ|, nats",
        lambda v: f"{v:.4g}",
    )
    for side, kind in (("own", "a"), ("replay", "b")):
        panel.draw([p for p in above([c[side]["histogram"] for c in cases]) if p[0] >= 1e-3], kind)
    panel.legend([("a", "own routing"), ("b", "replay")], 16, 150)
    return panel


def sharpness(report: dict[str, Any], table: dict[str, Any]) -> Panel:
    panel = Panel(
        LEFT[1], "KL without replay / KL with replay", shape(report), (0.017, 1.2), (0.8, 30)
    )
    panel.axes(
        [0.02, 0.05, 0.1, 0.2, 0.5, 1],
        [1, 2, 5, 10, 20],
        "router weights, standard deviation",
        lambda v: f"{v:g}",
    )
    cases = [case for case in table["table"] if case["varied"] == "gate_std"]
    for dtype, kind in (("bfloat16", "c"), ("float32", "c dash")):
        points = [
            (case["rollouts"]["gate_std"], case["learners"][dtype]["kl_ratio"]) for case in cases
        ]
        points.append(
            (report["headline"][0]["rollouts"]["gate_std"], report["summary"][dtype]["kl_ratio"])
        )
        panel.draw(sorted(points), kind, dots=True)
    panel.legend([("c", "bfloat16 learner"), ("c dash", "float32 learner")], 180, 14)
    return panel


def draw() -> str:
    report, table = (
        json.loads((HERE / f"routing-replay{kind}.json").read_text()) for kind in ("", "-table")
    )
    parts = [part for panel in (tails(report), sharpness(report, table)) for part in panel.parts]
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}" role="img" '
        'aria-label="Replay shifts the differences between learner and engine down; the gain falls with sharper routers">'
    )
    card = f'<rect class="card" width="{WIDTH}" height="{HEIGHT}" rx="8"/>'
    drawing = [head, f"<style>{STYLE}</style>", card, *parts, "</svg>"]
    return "\n".join(drawing) + "\n"


if __name__ == "__main__":
    (HERE / "routing-replay.svg").write_text(draw())
