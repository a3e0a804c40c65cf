"""The terminal view of `r3async tail`. It only lays out the lines of `view.py`, and polls the
run once a second."""

from __future__ import annotations

import time
from typing import ClassVar

from rich.text import Text
from textual.app import App, ComposeResult
from textual.binding import Binding
from textual.containers import VerticalScroll
from textual.events import Resize
from textual.widgets import Footer, Static

from r3async.views.follow import FollowedRun

from ..terminal import escape_text
from . import view

POLL_SECONDS = 1.0
BODY_REDRAW_SECONDS = 2.0
"""Minimum seconds between two redraws of the body; only the top moves every second. A large
screen costs 25 ms."""
MIN_CHARTS_WIDTH = 130
MIN_CHARTS_HEIGHT = 30
"""Minimum size of a screen that shows charts beside the overview."""
STEP_WINDOWS = (None, 200, 50, 20)
"""Numbers of steps that the curves show; None for all."""
MIN_EVENT_LINES = 12
"""Lines reserved for events, beside charts; above them are metrics."""

HELP_TEXT = """\
 r3async tail shows a run while it trains, or after it has ended. Closing it
 does nothing to the run.

 o  overview        m  every metric     e  events, whole     w  only warnings
 z  zoom: curves over all steps, the last 200, 50 or 20
 space  pause the screen, and continue
 arrows, page up/down, home, end  scroll     ?  this page     q  quit
"""


class TailApp(App[None]):
    """A view of `run`, which it polls."""

    ENABLE_COMMAND_PALETTE = False
    CSS = """
    Screen { background: ansi_default; }
    #top { height: 2; }
    #body { scrollbar-size-vertical: 1; background: ansi_default; }
    #text { height: auto; }
    Static, Footer { background: ansi_default; }
    """
    BINDINGS: ClassVar = [
        Binding("o", "show('overview')", "Overview"),
        Binding("m", "show('metrics')", "Metrics"),
        Binding("e", "show('events')", "Events"),
        Binding("w", "show('warnings')", "Warnings"),
        Binding("z", "zoom", "Zoom"),
        Binding("space", "hold", "Hold"),
        Binding("question_mark", "show('help')", "Help", key_display="?"),
        Binding("q", "quit", "Quit"),
        Binding("escape", "show('overview')", show=False),
    ]

    def __init__(self, run: FollowedRun):
        super().__init__(ansi_color=True)
        self.followed_run = run
        self.shown_view = "overview"
        self.window_index = 0
        self.is_held = False
        self._has_changes = True
        self._drawn_at = -BODY_REDRAW_SECONDS
        self._header_lines: list[Text] = []
        self._body_lines: list[Text] = []

    def compose(self) -> ComposeResult:
        yield Static(id="top")
        with VerticalScroll(id="body"):
            yield Static(id="text")
        yield Footer(show_command_palette=False, compact=True)

    def on_mount(self) -> None:
        self.query_one("#body").focus()
        self.update_run()
        self.set_interval(POLL_SECONDS, self.update_run)

    def on_resize(self, event: Resize) -> None:
        self.redraw_screen()

    def update_run(self) -> None:
        """Read what was written since the last time, and show it unless the screen is held."""
        if self.is_held:
            return
        rows, events = self.followed_run.read_new()
        self._has_changes = self._has_changes or bool(rows or events)
        due = self._has_changes and time.monotonic() - self._drawn_at >= BODY_REDRAW_SECONDS
        self.redraw_screen(draw_body=due)

    def action_show(self, what: str) -> None:
        self.shown_view = "overview" if what == self.shown_view else what
        self.redraw_screen()
        body = self.query_one("#body", VerticalScroll)
        # The size of the new text is known only after its layout.
        scroll = body.scroll_end if self.shown_view in ("events", "warnings") else body.scroll_home
        self.call_after_refresh(scroll, animate=False, immediate=True)

    def action_zoom(self) -> None:
        self.window_index = (self.window_index + 1) % len(STEP_WINDOWS)
        self.redraw_screen()

    def action_hold(self) -> None:
        self.is_held = not self.is_held
        self.update_run()
        self.redraw_screen()

    def redraw_screen(self, *, draw_body: bool = True) -> None:
        """Redraw only what differs from the screen, because over ssh every cell costs.

        Args:
            draw_body: Redraw the body too; otherwise only the top, with the clock.
        """
        width = self.size.width
        height = self.size.height - 3
        if width < 1 or height < 1:
            return
        top = view.render_header(
            self.followed_run, width, is_held=self.is_held, window=STEP_WINDOWS[self.window_index]
        )
        if top != self._header_lines:
            self.query_one("#top", Static).update(escape_text(Text("\n").join(top)))
            self._header_lines = top
        if not draw_body:
            return
        self._drawn_at = time.monotonic()
        self._has_changes = False
        lines = self._make_body(width, height)
        scroller = self.query_one("#body", VerticalScroll)
        # A reader at the end stays at the end.
        follows = scroller.max_scroll_y - scroller.scroll_y < 1
        if lines != self._body_lines:
            self.query_one("#text", Static).update(escape_text(Text("\n").join(lines)))
            self._body_lines = lines
            if self.shown_view in ("events", "warnings") and follows:
                scroller.scroll_end(animate=False)

    def _make_body(self, width: int, height: int) -> list[Text]:
        run = self.followed_run
        window = STEP_WINDOWS[self.window_index]
        if self.shown_view == "help":
            return [
                Text(line)
                for line in [*HELP_TEXT.splitlines(), "", *view.describe_gauges(min(width, 78))]
            ]
        if self.shown_view == "metrics":
            return view.render_metrics(run, width - 1, window)
        if self.shown_view in ("events", "warnings"):
            loud = self.shown_view == "warnings"
            shown = [e for e in run.events if not loud or e.get("level") in view.LEVEL_COLORS]
            title = view.render_rule(view.format_events_title(run, loud), width - 1)
            lines = [view.render_event(run, event) for event in shown]
            return [title, *(lines or view.render_events(run, width, 1, warnings_only=loud))]
        return self._make_overview(run, width, height, window)

    def _make_overview(
        self, run: FollowedRun, width: int, height: int, window: int | None
    ) -> list[Text]:
        wide = width >= MIN_CHARTS_WIDTH and height >= MIN_CHARTS_HEIGHT
        left = min(90, width // 2) if wide else width
        lines = view.render_overview(run, left, window)
        free = height - len(lines) - 1
        if wide and run.metrics.row_count:
            metrics = view.render_metrics(run, left, window, max(0, free - MIN_EVENT_LINES))
            lines += metrics
            free -= len(metrics)
        if free > 0:
            lines.append(view.render_rule(view.format_events_title(run), left))
            lines += view.render_events(run, left, free)
        if not wide:
            return lines
        charts = view.render_charts(run, width - left - 1, height, window)
        lines += [Text()] * (height - len(lines))
        for line in lines:
            line.pad_right(max(0, left + 1 - line.cell_len))
        return [Text.assemble(line, chart) for line, chart in zip(lines, charts, strict=False)]
