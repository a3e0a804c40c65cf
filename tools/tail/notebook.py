"""The view of a run in a notebook: under the cell a bar, the last step's line, and the reward so
far, drawn in place."""

from __future__ import annotations

import html
import sys
import time
from collections.abc import Callable
from typing import Any

from r3async.data.metrics import finite_or_none

from ..terminal import SafeConsole
from .live import LiveView

DRAW_SECONDS = 0.5
"""A notebook keeps every drawing until it has shown it: steps that follow faster
are drawn together."""
WIDTH = 560
HEIGHT = 120
"""Of the plot, in pixels; a longer run has a point for each pixel."""

ShowHtml = Callable[[str], None]


def find_notebook() -> ShowHtml | None:
    """Return a function that shows HTML under the running cell, in place of what it showed; None
    outside of a notebook.

    A kernel has an application, and IPython on a terminal has none.
    """
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython else None
    if shell is None or not hasattr(shell, "kernel"):
        return None
    from IPython.display import HTML, display

    handle = display(HTML(""), display_id=True)
    return lambda text: handle.update(HTML(text))


def make_view(steps: int) -> LiveView:
    """Return the view of the place where this program runs: a notebook's, or lines
    on standard error."""
    show = find_notebook()
    return (
        LiveView(SafeConsole(file=sys.stderr), steps) if show is None else NotebookView(steps, show)
    )


class NotebookView(LiveView):
    """A view that draws steps in place; everything else is a line on standard
    error, as elsewhere."""

    def __init__(self, steps: int, show: ShowHtml):
        super().__init__(SafeConsole(file=sys.stderr, force_terminal=False), steps)
        self._show = show
        self._phase = "starting"
        self._line = ""
        self._drawn_at = 0.0
        self._rewards: dict[int, float] = {}

    def __exit__(self, *exc: object) -> None:
        self._draw()
        super().__exit__(*exc)

    def show_phase(self, text: str) -> None:
        if text != self._phase:
            self._phase = text
            self._draw()

    def rewind_to_step(self, step: int) -> None:
        super().rewind_to_step(step)
        self._rewards = {at: reward for at, reward in self._rewards.items() if at <= step}

    def show_row(self, row: dict[str, Any], text: str, phase: str = "training") -> None:
        self.shown_step = row["step"]
        self._phase = phase
        self._pace.add_step(row)
        self._line = text + self._pace.describe(self._steps)
        reward = finite_or_none(row.get("reward/mean"))
        if reward is not None:
            self._rewards[row["step"]] = reward
        if time.monotonic() - self._drawn_at >= DRAW_SECONDS:
            self._draw()

    def _draw(self) -> None:
        self._drawn_at = time.monotonic()
        self._show(
            f"<div><progress value='{self.shown_step}' max='{self._steps}' "
            f"style='width:{WIDTH}px'></progress> {self.shown_step}/{self._steps} "
            f"{html.escape(self._phase)}</div>"
            "<code "
            f"style='font-size:12px'>{html.escape(self._line)}</code>{draw_reward(self._rewards, self._steps)}"
        )


def draw_reward(rewards: dict[int, float], steps: int) -> str:
    """Draw the reward by step, as SVG; empty below two steps. The axis ends at what it
    reached, and at `steps`."""
    if len(rewards) < 2:
        return ""
    low = min(rewards.values())
    high = max(rewards.values())
    last = max(steps, *rewards)
    every = -(-len(rewards) // WIDTH)
    points = " ".join(
        f"{WIDTH * step / last:.1f},{HEIGHT * (high - reward) / ((high - low) or 1):.1f}"
        for step, reward in [*list(rewards.items())[:-1:every], list(rewards.items())[-1]]
    )
    return (
        f"<svg width='{WIDTH + 110}' height='{HEIGHT + 16}' viewBox='0 -8 {WIDTH + 110} "
        f"{HEIGHT + 16}' role='img' aria-label='reward {low:.3g} to {high:.3g}' "
        "style='display:block;font:11px sans-serif' fill='currentColor'>"
        f"<polyline points='{points}' fill='none' stroke='#2f66d8' stroke-width='2'/>"
        f"<text x='{WIDTH + 6}' y='4'>reward {high:.3g}</text><text x='{WIDTH + 6}' "
        f"y='{HEIGHT}'>{low:.3g}</text></svg>"
    )
