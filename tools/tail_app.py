"""The terminal view of `r3async tail`. It only lays out what `tail_view` says, and asks the run for news once a second."""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar

from rich.text import Text
from textual.app import App, ComposeResult
from textual.binding import Binding
from textual.containers import VerticalScroll
from textual.events import Resize
from textual.widgets import Footer, Static

from r3async.observe.follow import FollowedRun
from tools import tail_view as view

POLL_SECONDS = 1.0
WIDE, TALL = 130, 30
"""From this size on there is room for charts beside the overview."""
WINDOWS = (None, 200, 50, 20)
"""Steps that the curves show; None: all."""

HELP = """\
 r3async tail shows a run while it goes on, or after it has ended. Closing it does nothing to the run.

 o  overview     m  every metric     e  events, whole     w  only warnings and errors
 z  zoom: curves over all steps, the last 200, 50 or 20
 space  hold the screen still, and let it go again
 arrows, page up/down, home, end  scroll     ?  this page     q  quit

 reward        mean of the last step's trajectories; what it began at and the best step
 drift         KL(rollout ‖ learner), k3, nats per trained token. Green: within twice its target
 age           weight versions between sampling a token and training it, mean. Red: beyond the bound
 routes agree  (token, MoE layer) where the learner's router would choose the engine's experts
 generated, trained    tokens a second, of wall time
 learner       seconds of the last step; waited: for data. Its curve is the waiting
 weights       the newest version; how long delivery took, and how long engines paused for it
 slots         groups that are leased, waiting or in training. All taken: generators wait for the learner
 buffer        complete groups that wait for the learner. None: the learner waits for generators
 arrived       trajectories; those that came again, or were refused
 generators    processes that play, and how often any was restarted"""


class TailApp(App[None]):
    """`poll` brings the run's files up to date (it is the reader's own, unless they come from elsewhere)."""

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

    def __init__(self, run: FollowedRun, poll: Callable[[], object] | None = None):
        super().__init__(ansi_color=True)
        self.run_followed = run
        self._poll = poll or run.poll
        self.shown, self.window_index, self.held = "overview", 0, False
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
        if not self.held:
            self._poll()
            self.redraw()

    def action_show(self, what: str) -> None:
        self.shown = "overview" if what == self.shown else what
        self.redraw()
        body = self.query_one("#body", VerticalScroll)
        if what in ("events", "warnings"):
            body.scroll_end(animate=False)
        else:
            body.scroll_home(animate=False)

    def action_zoom(self) -> None:
        self.window_index = (self.window_index + 1) % len(WINDOWS)
        self.redraw()

    def action_hold(self) -> None:
        self.held = not self.held
        self.news()
        self.redraw()

    def redraw(self) -> None:
        """Only what differs from the screen is drawn again: over ssh every cell costs."""
        width, height = self.size.width, self.size.height - 3
        if width < 1 or height < 1:
            return
        top = view.header(self.run_followed, width, held=self.held, window=WINDOWS[self.window_index])
        lines = self._body(width, height)
        body = self.query_one("#body", VerticalScroll)
        follows = body.max_scroll_y - body.scroll_y < 1  # a reader at the end stays at the end
        if top != self._top:
            self.query_one("#top", Static).update(Text("\n").join(top))
            self._top = top
        if lines != self._lines:
            self.query_one("#text", Static).update(Text("\n").join(lines))
            self._lines = lines
            if self.shown in ("events", "warnings") and follows:
                body.scroll_end(animate=False)

    def _body(self, width: int, height: int) -> list[Text]:
        run, window = self.run_followed, WINDOWS[self.window_index]
        if self.shown == "help":
            return [Text(line) for line in HELP.splitlines()]
        if self.shown == "metrics":
            return view.metric_lines(run, width - 1, window)
        if self.shown in ("events", "warnings"):
            loud = self.shown == "warnings"
            shown = [e for e in run.events if not loud or e.get("level") in view.LEVELS]
            title = view.rule(view.events_title(run, loud), width - 1)
            return [title, *(view.event_line(e) for e in shown or ())] if shown else view.event_lines(run, width, 1, loud=loud)
        return self._overview(run, width, height, window)

    def _overview(self, run: FollowedRun, width: int, height: int, window: int | None) -> list[Text]:
        wide = width >= WIDE and height >= TALL
        left = min(90, width // 2) if wide else width
        lines = view.overview(run, left, window)
        room = height - len(lines) - 1
        if room > 0:
            lines.append(view.rule(view.events_title(run), left))
            lines += view.event_lines(run, left, room)
        if not wide:
            return lines[:height] if room > 0 else lines
        charts = view.charts(run, width - left - 1, height, window)
        lines += [Text()] * (height - len(lines))
        for line in lines:
            line.pad_right(max(0, left + 1 - line.cell_len))
        return [Text.assemble(line, chart) for line, chart in zip(lines, charts, strict=False)]
