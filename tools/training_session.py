"""Train from a configuration to a finished run directory, as `r3async train` (`cli.py`) does."""

from __future__ import annotations

import asyncio
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from rich.console import Console

from r3async.config import Config
from r3async.world import EventReporter
from r3async.world.keeper import STOP_SIGNALS
from r3async.world.real import REAL_WORLD

from .callbacks import CallbackRunner
from .outlets import MetricsForwarder
from .run_dir import check_disk_space, explain_full_disk, open_named_run
from .tail.live import LiveView
from .tail.notebook import make_view

if TYPE_CHECKING:
    from r3async.actors.driver import RunLauncher


class StoppedWhileLoading(BaseException):
    """A stop that was requested before the actors could be told: nothing has to be finished."""


REPEAT_SECONDS = 1.0
"""Seconds within which the same signal is the same request: `timeout` signals the command,
and then its group."""


class StopRequest:
    """The signal handler of a run, and its record of a requested stop.

    The first Ctrl-C, SIGTERM or SIGHUP (the terminal was closed) requests an orderly end, and
    raises `StoppedWhileLoading` while `is_loading`. A second Ctrl-C or SIGTERM raises
    `KeyboardInterrupt` at once, unless the first one was the same less than `REPEAT_SECONDS` ago. A
    second SIGHUP means nothing, because the kernel and the shell both send one.
    """

    def __init__(self) -> None:
        self.requested = False
        self._first: tuple[int, float] | None = None
        self.is_loading = True
        """True while the main thread is in long calls that check no flag."""

    def __call__(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if self.requested:
            first, since = self._first or (0, now)
            if number == signal.SIGHUP or (number == first and now < since + REPEAT_SECONDS):
                return
            raise KeyboardInterrupt
        self.requested = True
        self._first = (number, now)
        if self.is_loading:
            raise StoppedWhileLoading

    def install_handlers(self) -> dict[int, Any]:
        """Handle these signals, if this is the main thread; but not a SIGHUP that is ignored,
        as under `nohup`.

        Returns the previous handlers.
        """
        if threading.current_thread() is not threading.main_thread():
            return {}
        ignored = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
        obeyed = [number for number in STOP_SIGNALS if number != signal.SIGHUP or not ignored]
        return {number: signal.signal(number, self) for number in obeyed}


@contextmanager
def handle_stop_signals(request: StopRequest) -> Iterator[None]:
    """Let the request handle signals inside this block."""
    old = request.install_handlers()
    try:
        yield
    finally:
        for number, handler in old.items():
            signal.signal(number, handler)


class TerminalUI:
    """The terminal, the outlets and the signals: the driver's interface to the user; see
    `driver.DriverUI`."""

    def __init__(
        self,
        view: LiveView,
        forwarder: MetricsForwarder,
        request: StopRequest,
        callbacks: CallbackRunner,
    ):
        self.view = view
        self.forwarder = forwarder
        self.request = request
        self.callbacks = callbacks
        self.print_line = view.print_line
        self.show_phase = view.show_phase
        self.report_event = make_reporter(view)

    @property
    def stop_requested(self) -> bool:
        return self.request.requested or self.callbacks.failure is not None

    @property
    def shown_step(self) -> int:
        return self.view.shown_step

    def begin_loading(self) -> None:
        """Obey a stop at once from now on."""
        self.request.is_loading = True

    def confirm_started(self) -> None:
        """Confirm the start. Raises `StoppedWhileLoading` if a stop was requested meanwhile."""
        self.request.is_loading = False
        if self.request.requested:
            raise StoppedWhileLoading

    def rewind_to_step(self, step: int) -> None:
        self.forwarder.skip_written()
        self.view.rewind_to_step(step)
        self.callbacks.rewind_to_step(step)

    def show_status(self, status: dict[str, Any]) -> None:
        self.forwarder.show_status(status)
        self.view.show_status(status)
        self.callbacks.show_status(status)


def train(
    config: Config,
    preset: str,
    console: Console | None = None,
    root: Path = Path("runs"),
    make_launcher: Callable[..., RunLauncher] | None = None,
    callbacks: Sequence[Any] = (),
    request: StopRequest | None = None,
) -> Path:
    """Run to the end and return the run directory.

    Args:
        make_launcher: Takes the arguments of `RunLauncher`, and returns one that starts other
            actors than usual.
        callbacks: Callbacks as in `CallbackRunner`.
        request: The request through which another thread may ask for a stop.

    Raises `ConfigError`, `CheckpointError` or `RunFailed` with a remedy. `NotTrained` (no step made
    an update), `StoppedBeforeStep` and `CallbackFailed` are subclasses of `RunFailed`.
    """
    from r3async.actors.process import StoppedBeforeStep
    from r3async.rollout.vllm.scratch import remove_abandoned

    request = request or StopRequest()
    heard = CallbackRunner(callbacks)
    view = make_view(config.steps) if console is None else LiveView(console, config.steps)
    with handle_stop_signals(request), view:
        try:
            try:
                path = _prepare_and_train(config, preset, view, root, make_launcher, request, heard)
            except StoppedWhileLoading:
                path = root / config.name
                name = f" with name={config.name}" if config.name else ""
                resume = f"to resume: the same command{name}"
                if not view.shown_step:
                    raise StoppedBeforeStep(
                        f"stopped while loading, before a step was made; {resume}"
                    ) from None
                view.print_line(f"stopped while loading, after step {view.shown_step}; {resume}")
            heard.end_run(None)
            return path
        except Exception as error:
            if error is not heard.failure:
                heard.end_run(error)
            raise
        finally:
            # A generator that is ended while it loads its engine leaves the engine's directory.
            remove_abandoned()


def _prepare_and_train(
    config: Config,
    preset: str,
    view: LiveView,
    root: Path,
    make_launcher: Callable[..., RunLauncher] | None,
    request: StopRequest,
    callbacks: CallbackRunner,
) -> Path:
    from r3async.actors.driver import RunLauncher, supervise_run
    from r3async.actors.process import RunFailed
    from r3async.envs.mix import add_default_evaluation_sets

    from .diagnose.afterwards import diagnose_failed_run
    from .hub import is_hub_name, resolve_hub_model
    from .preflight import check_start

    config = add_default_evaluation_sets(config)
    check_disk_space(root)  # a model may be fetched
    if is_hub_name(config.model.path):
        view.show_phase(f"looking for {config.model.path}")
    config = resolve_hub_model(config, download=True)
    start = check_start(config, root)
    config = start.config
    for line in start.notes:
        view.print_line(line)
    with explain_full_disk(root):
        run = open_named_run(config, preset, view.print_line, root, make_reporter(view))
    view.print_line(f"run directory: {run.path}")
    step = run.resume_from.state.steps if run.resume_from else 0
    view.rewind_to_step(step)
    try:
        with explain_full_disk(run.path):
            model_path = run.find_start_model(config) or _make_start_model(config, run.path, view)
        with MetricsForwarder(config, run.path, view.print_line) as outlets:
            callbacks.begin_run(config, run.path, step)
            front = TerminalUI(view, outlets, request, callbacks)
            try:
                asyncio.run(
                    supervise_run(
                        REAL_WORLD, config, model_path, run, front, make_launcher or RunLauncher
                    )
                )
            except RunFailed:
                diagnose_failed_run(run.path, view.print_line, view.show_phase)
                raise
    finally:
        REAL_WORLD.actors.leave_cluster()
        run.lock.close()
        report_ended_run(run.path, view)
    return run.path


def make_reporter(view: LiveView) -> EventReporter:
    """Return a reporter that tells the user what was found among the checkpoints."""

    def report(event: str, /, **facts: object) -> None:
        view.print_line(
            f"{event.replace('_', ' ')}: {' '.join(f'{k}={v}' for k, v in facts.items())}"
        )

    return report


def _make_start_model(config: Config, run_dir: Path, view: LiveView) -> Path:
    """Make the start model of a run that has none. Ray starts meanwhile."""
    from r3async.actors.driver import connect_cluster

    from .init_model import init_model_in_process, init_or_copy_model

    def meanwhile() -> None:
        view.show_phase("starting Ray")
        connect_cluster(REAL_WORLD, config)

    directory = run_dir / "init"
    init_or_copy_model(
        directory, config, view.show_phase, partial(init_model_in_process, meanwhile=meanwhile)
    )
    return directory.absolute()


def report_ended_run(run_dir: Path, view: LiveView) -> None:
    """Write the report of a run that ended, and print its summary."""
    from r3async.views.report import write_report
    from r3async.views.summary import format_summary, summarize_run

    if not (run_dir / "metrics.jsonl").exists():
        return
    try:
        view.print_line(f"report: {write_report(run_dir)}")
    except OSError as error:
        view.print_line(
            f"the report was not written ({error}); to write it later: r3async report {run_dir}"
        )
    view.console.print(format_summary(summarize_run(run_dir)))
