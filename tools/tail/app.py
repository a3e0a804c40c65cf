"""The terminal view of `r3async tail`. It only lays out what `view.py` says, and asks the run for news once a second."""

from __future__ import annotations

import time
from typing import ClassVar

from rich.text import Text
from textual.app import App, ComposeResult
from textual.binding import Binding
from textual.containers import VerticalScroll
from textual.events import Resize
from textual.widgets import Footer, Static

from r3async.tools.tail import view
from r3async.tools.terminal import safe
from r3async.views.follow import FollowedRun

POLL_SECONDS = 1.0
BODY_SECONDS = 2.0
"""News are drawn this often at most; only the top moves every second. A large screen costs 25 ms."""
WIDE, TALL = 130, 30
"""From this size on charts are shown beside the overview."""
WINDOWS = (None, 200, 50, 20)
"""Steps that the curves show; None: all."""
EVENTS_SHOWN = 12
"""Lines, beside charts; above them are metrics."""

HELP = """\
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
        self.run_followed = run
        self.shown, self.window_index, self.held = "overview", 0, False
        self._news, self._drawn_at = True, -BODY_SECONDS
        self._top: list[Text] = []
        self._lines: list[Text] = []

    def compose(self) -> ComposeResult:
        yield Static(id="top")
        with VerticalScroll(id="body"):
            yield Static(id="text")
        yield Footer(show_command_palette=False, compact=True)

    def on_mount(self) -> None:
        self.query_one("#body").focus()
        self.news()
        self.set_interval(POLL_SECONDS, self.news)

    def on_resize(self, event: Resize) -> None:
        self.redraw()

    def news(self) -> None:
        """Take in what was written since the last time, and show it unless the screen is held."""
        if self.held:
            return
        rows, events = self.run_followed.poll()
        self._news = self._news or bool(rows or events)
        due = self._news and time.monotonic() - self._drawn_at >= BODY_SECONDS
        self.redraw(body=due)

    def action_show(self, what: str) -> None:
        self.shown = "overview" if what == self.shown else what
        self.redraw()
        body = self.query_one("#body", VerticalScroll)
        # The size of the new text is known after it was laid out.
        scroll = body.scroll_end if self.shown in ("events", "warnings") else body.scroll_home
        self.call_after_refresh(scroll, animate=False, immediate=True)

    def action_zoom(self) -> None:
        self.window_index = (self.window_index + 1) % len(WINDOWS)
        self.redraw()

    def action_hold(self) -> None:
        self.held = not self.held
        self.news()
        self.redraw()

    def redraw(self, *, body: bool = True) -> None:
        """Only what differs from the screen is drawn again: over ssh every cell costs. Without `body`: only the top,
        with the clock."""
        width, height = self.size.width, self.size.height - 3
        if width < 1 or height < 1:
            return
        top = view.header(self.run_followed, width, held=self.held, window=WINDOWS[self.window_index])
        if top != self._top:
            self.query_one("#top", Static).update(safe(Text("\n").join(top)))
            self._top = top
        if not body:
            return
        self._news, self._drawn_at = False, time.monotonic()
        lines = self._body(width, height)
        scroller = self.query_one("#body", VerticalScroll)
        follows = scroller.max_scroll_y - scroller.scroll_y < 1  # a reader at the end stays at the end
        if lines != self._lines:
            self.query_one("#text", Static).update(safe(Text("\n").join(lines)))
            self._lines = lines
            if self.shown in ("events", "warnings") and follows:
                scroller.scroll_end(animate=False)

    def _body(self, width: int, height: int) -> list[Text]:
        run, window = self.run_followed, WINDOWS[self.window_index]
        if self.shown == "help":
            return [Text(line) for line in [*HELP.splitlines(), "", *view.gauge_help(min(width, 78))]]
        if self.shown == "metrics":
            return view.metric_lines(run, width - 1, window)
        if self.shown in ("events", "warnings"):
            loud = self.shown == "warnings"
            shown = [e for e in run.events if not loud or e.get("level") in view.LEVELS]
            title = view.rule(view.events_title(run, loud), width - 1)
            lines = [view.event_line(run, event) for event in shown]
            return [title, *(lines or view.event_lines(run, width, 1, loud=loud))]
        return self._overview(run, width, height, window)

    def _overview(self, run: FollowedRun, width: int, height: int, window: int | None) -> list[Text]:
        wide = width >= WIDE and height >= TALL
        left = min(90, width // 2) if wide else width
        lines = view.overview(run, left, window)
        free = height - len(lines) - 1
        if wide and run.metrics.rows:
            metrics = view.metric_lines(run, left, window, max(0, free - EVENTS_SHOWN))
            lines += metrics
            free -= len(metrics)
        if free > 0:
            lines.append(view.rule(view.events_title(run), left))
            lines += view.event_lines(run, left, free)
        if not wide:
            return lines
        charts = view.charts(run, width - left - 1, height, window)
        lines += [Text()] * (height - len(lines))
        for line in lines:
            line.pad_right(max(0, left + 1 - line.cell_len))
        return [Text.assemble(line, chart) for line, chart in zip(lines, charts, strict=False)]
