"""Draw `trust-region.svg` from the runs kept in `trust-region.jsonl`, and print the table of docs/trust-region.md.

    python docs/figures/make_trust_region.py                   # draw, print
    python docs/figures/make_trust_region.py runs/drift-*      # first keep these runs instead

A line of `trust-region.jsonl` is a run: its settings, and its drift, coefficient, reward and mean age of the trained tokens by
step. Standard library only. The drawing has a background of its own, light or dark as the reader's system asks for.
"""

from __future__ import annotations

import json
import math
import statistics
import sys
import tomllib
from collections.abc import Callable, Sequence
from html import escape
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
DATA = HERE / "trust-region.jsonl"
TARGET = 0.05
WINDOW = 10
"""Steps of the rolling mean."""
WITHIN = 1.5

COLUMNS = {
    "drift": "rollout_kl/k3",
    "coef": "rollout_kl/coef",
    "reward": "reward/mean",
    "age": "staleness/mean",
    "grad_norm": "grad_norm",
}
KINDS = {"none": ("a", "no term"), "fixed": ("c", "coef 0.01"), "target": ("b", f"target {TARGET:g}")}

WIDTH, HEIGHT = 860, 590
STYLE = """
.card{fill:#fff}.ink{fill:#24292f}.soft{fill:#57606a}.axis{stroke:#8c959f}.grid{stroke:#e3e6ea}
.a{stroke:#b3541e}.b{stroke:#0969da}.c{stroke:#8250df}.goal{stroke:#24292f}.band{fill:#0969da}
@media (prefers-color-scheme: dark){
.card{fill:#0d1117}.ink{fill:#e6edf3}.soft{fill:#9da7b1}.axis{stroke:#6e7681}.grid{stroke:#262c34}
.a{stroke:#f0883e}.b{stroke:#58a6ff}.c{stroke:#a78bfa}.goal{stroke:#e6edf3}.band{fill:#58a6ff}}
text{font:12px system-ui,-apple-system,"Segoe UI",sans-serif}.title{font-weight:600;font-size:13px}
.line{fill:none;stroke-width:2}.dash{stroke-dasharray:5 4}.raw{fill:none;stroke-width:1;opacity:.35}
.goal{stroke-width:1.5}.band{opacity:.12}
"""

Run = dict[str, Any]


def kept(directory: Path) -> Run:
    """What is kept of a run."""
    config = tomllib.loads((directory / "config.toml").read_text())
    rows = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    term = config["algorithm"]["rollout_kl"]
    target, coef = term.get("target"), term["coef"]
    run: Run = {
        "kind": "target" if target else "fixed" if coef else "none",
        "seed": config["seed"],
        "target": target,
        "coef_at_first": coef,
        "lr": config["learner"]["lr"],
        "max_staleness": config["schedule"]["max_staleness"],
        "steps": len(rows),
    }
    return run | {name: [float(f"{row[metric]:.4g}") for row in rows] for name, metric in COLUMNS.items()}


def runs() -> list[Run]:
    return [json.loads(line) for line in DATA.read_text().splitlines()]


def drawn(run: Run) -> bool:
    """The others are only in the table."""
    return run["target"] in (None, TARGET)


def rolling(values: Sequence[float]) -> list[float]:
    """Means over `WINDOW` steps, the first of which ends with step `WINDOW`."""
    return [statistics.fmean(values[i : i + WINDOW]) for i in range(len(values) - WINDOW + 1)]


def summary(run: Run) -> dict[str, float]:
    """Of the last half of the run, but for `reward_run`. Drift is as a multiple of the target (of `TARGET` without one)."""
    half = len(run["drift"]) // 2
    drift = [value / (run["target"] or TARGET) for value in run["drift"][half:]]
    return {
        "drift": statistics.fmean(drift),
        "rolling_max": max(rolling(drift)),
        "rolling_within": statistics.fmean(value <= WITHIN for value in rolling(drift)),
        "step_max": max(drift),
        "steps_within": statistics.fmean(value <= WITHIN for value in drift),
        "reward_last": statistics.fmean(run["reward"][-WINDOW:]),
        "reward_half": statistics.fmean(run["reward"][half:]),
        "reward_run": statistics.fmean(run["reward"]),
        "coef": statistics.geometric_mean(run["coef"][half:]) if all(run["coef"][half:]) else 0.0,
        "age": statistics.fmean(run["age"][half:]),
    }


def percent(share: float) -> str:
    return f"{100 * share:.0f} %"


def table() -> str:
    lines = [
        "| run | seed | mean drift | / target | 10-step means within 1.5x | worst | steps within 1.5x | worst "
        "| coefficient | reward, last 10 steps | reward, last half | mean age |",
        "|" + "---|" * 12,
    ]
    for run in runs():
        s = summary(run)
        name = f"`target={run['target']:g}`" if run["target"] else f"`coef={run['coef_at_first']:g}`"
        cells = [
            name,
            str(run["seed"]),
            f"{s['drift'] * (run['target'] or TARGET):.3f}",
            f"{s['drift']:.2f}",
            percent(s["rolling_within"]),
            f"{s['rolling_max']:.2f}",
            percent(s["steps_within"]),
            f"{s['step_max']:.2f}",
            f"{s['coef']:.2g}",
            f"{s['reward_last']:.3f}",
            f"{s['reward_half']:.3f}",
            f"{s['age']:.2f}",
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def linear(value: float) -> float:
    return value


class Panel:
    """A pair of axes, at `left`, `top`, of `size`. `x`, `y`: (smallest, largest). `scale`: of y."""

    def __init__(
        self,
        title: str,
        place: tuple[int, int, int, int],
        x: tuple[float, float],
        y: tuple[float, float],
        scale: Callable[[float], float] = linear,
    ):
        self.left, self.top, self.width, self.height = place
        self.x, self.y, self.scale = x, y, scale
        self.parts = [text(self.left, self.top - 12, title, "title ink")]

    def at(self, x: float, y: float) -> tuple[float, float]:
        low, high = self.scale(self.y[0]), self.scale(self.y[1])
        share = (self.scale(min(max(y, self.y[0]), self.y[1])) - low) / (high - low)
        across = (x - self.x[0]) / (self.x[1] - self.x[0])
        return self.left + self.width * across, self.top + self.height * (1 - share)

    def axes(self, xs: Sequence[float], ys: Sequence[float]) -> None:
        bottom, right = self.top + self.height, self.left + self.width
        for value in xs:
            x, _ = self.at(value, self.y[0])
            self.parts += [line(x, self.top, x, bottom, "grid"), text(x, bottom + 18, f"{value:g}", "soft", "middle")]
        for value in ys:
            _, y = self.at(self.x[0], value)
            self.parts += [
                line(self.left, y, right, y, "grid"),
                text(self.left - 8, y + 4, f"{value:g}", "soft", "end"),
            ]
        self.parts.append(line(self.left, bottom, right, bottom, "axis"))

    def draw(self, values: Sequence[float], kind: str, first: int = 1) -> None:
        """`values` of the steps from `first` on."""
        points = " ".join("{:.1f},{:.1f}".format(*self.at(first + i, value)) for i, value in enumerate(values))
        self.parts.append(f'<polyline class="{kind}" points="{points}"/>')

    def bound(self, value: float, factor: float) -> None:
        """A line at `value`, and a band from there to `factor` times as much."""
        (x1, y), (x2, top) = self.at(self.x[0], value), self.at(self.x[1], value * factor)
        self.parts.append(
            f'<rect class="band" x="{x1:.1f}" y="{top:.1f}" width="{x2 - x1:.1f}" height="{y - top:.1f}"/>'
        )
        self.parts.append(line(x1, y, x2, y, "goal"))


def text(x: float, y: float, words: str, kind: str, anchor: str = "start") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" class="{kind}" text-anchor="{anchor}">{escape(words)}</text>'


def line(x1: float, y1: float, x2: float, y2: float, kind: str) -> str:
    return f'<line class="{kind}" x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"/>'


def legend() -> list[str]:
    parts, x = [], 70
    for kind, name in KINDS.values():
        parts += [line(x, 22, x + 26, 22, f"line {kind}"), text(x + 32, 26, name, "ink")]
        x += 110
    parts += [line(x, 22, x + 26, 22, "goal"), text(x + 32, 26, "the target, and up to 1.5 times it", "ink")]
    return [*parts, text(x + 250, 26, "dashed: seed 1", "soft")]


def draw() -> str:
    shown = [run for run in runs() if drawn(run)]
    steps = max(run["steps"] for run in shown)
    ticks = range(0, steps + 1, 50)
    drift = Panel(
        f"Drift: KL(rollout || learner), nats a token, mean of {WINDOW} steps (thin: single steps, with the target)",
        (70, 70, 760, 240),
        (0, steps),
        (0.01, 1.0),
        math.log10,
    )
    drift.axes(ticks, [0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1])
    drift.bound(TARGET, WITHIN)
    coef = Panel("Coefficient", (70, 370, 340, 170), (0, steps), (0.005, 5.0), math.log10)
    coef.axes(ticks, [0.01, 0.1, 1])
    reward = Panel(f"Reward, mean of {WINDOW} steps", (490, 370, 340, 170), (0, steps), (0.4, 1.0))
    reward.axes(ticks, [0.4, 0.6, 0.8, 1])
    for run in sorted(shown, key=lambda run: list(KINDS).index(run["kind"])):
        colour = KINDS[run["kind"]][0]
        stroke = f"line {colour}" + (" dash" if run["seed"] else "")
        if run["kind"] == "target":
            drift.draw(run["drift"][1:], f"raw {colour}", 2)
        drift.draw(rolling(run["drift"]), stroke, WINDOW)
        reward.draw(rolling(run["reward"]), stroke, WINDOW)
        if run["kind"] != "none":
            coef.draw(run["coef"], stroke)
    parts = [part for panel in (drift, coef, reward) for part in panel.parts]
    parts += [text(x + 170, 576, "step", "ink", "middle") for x in (70, 490)]
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}" role="img" '
        'aria-label="Without the term drift grows; with a target it settles there, and reward ends no lower">'
    )
    card = f'<rect class="card" width="{WIDTH}" height="{HEIGHT}" rx="8"/>'
    return "\n".join([head, f"<style>{STYLE}</style>", card, *legend(), *parts, "</svg>"]) + "\n"


if __name__ == "__main__":
    if sys.argv[1:]:
        DATA.write_text("".join(json.dumps(kept(Path(name)), separators=(",", ":")) + "\n" for name in sys.argv[1:]))
    (HERE / "trust-region.svg").write_text(draw())
    print(table())
