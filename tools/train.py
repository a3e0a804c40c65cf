"""`r3async train`: from a configuration to a finished run directory."""

from __future__ import annotations

import asyncio
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from rich.console import Console

from r3async.config import Config, check_policy_loss
from r3async.tools.callbacks import Callbacks
from r3async.tools.outlets import Outlets
from r3async.tools.run_dir import check_capacity, full_disk_is_named, open_run
from r3async.tools.tail.live import LiveView
from r3async.tools.terminal import Terminal
from r3async.world.real import REAL

if TYPE_CHECKING:
    from r3async.actors.supervise import Pipeline
    from r3async.world.appending import Report


class StoppedWhileLoading(BaseException):
    """A stop was requested before the actors could be told: nothing has to be finished."""


STOPS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class StopRequest:
    """First Ctrl-C, SIGTERM or SIGHUP (the terminal was closed): end in order, by `StoppedWhileLoading` while `loading`. Second
    Ctrl-C or SIGTERM: `KeyboardInterrupt` at once. The kernel and the shell both send SIGHUP: once more means nothing."""

    def __init__(self) -> None:
        self.requested = False
        self.loading = True
        """The main thread is in calls that take long and look at no flag."""

    def __call__(self, number: int, frame: FrameType | None) -> None:
        if self.requested:
            if number == signal.SIGHUP:
                return
            raise KeyboardInterrupt
        self.requested = True
        if self.loading:
            raise StoppedWhileLoading

    def install(self) -> dict[int, Any]:
        """Obey these signals, if this is the main thread; not a SIGHUP that is ignored, as `nohup` has it. Returns who did
        before."""
        if threading.current_thread() is not threading.main_thread():
            return {}
        ignored = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
        obeyed = [number for number in STOPS if number != signal.SIGHUP or not ignored]
        return {number: signal.signal(number, self) for number in obeyed}


@contextmanager
def stop_signals(request: StopRequest) -> Iterator[None]:
    """Have it obey signals meanwhile."""
    old = request.install()
    try:
        yield
    finally:
        for number, handler in old.items():
            signal.signal(number, handler)


class Front:
    """The terminal, the outlets and the signals: what a run's driver knows of the person; see `supervise.Person`."""

    def __init__(self, view: LiveView, outlets: Outlets, request: StopRequest, callbacks: Callbacks):
        self.view, self.outlets, self.request, self.callbacks = view, outlets, request, callbacks
        self.say, self.phase, self.report = view.say, view.phase, reporter(view)

    @property
    def stop_requested(self) -> bool:
        return self.request.requested or self.callbacks.failed is not None

    @property
    def step(self) -> int:
        return self.view.step

    def loading(self) -> None:
        """A stop is obeyed at once."""
        self.request.loading = True

    def started(self) -> None:
        """Raises `StoppedWhileLoading` if a stop was requested meanwhile."""
        self.request.install()  # Ray installed its own handlers when it started
        self.request.loading = False
        if self.request.requested:
            raise StoppedWhileLoading

    def rewind(self, step: int) -> None:
        self.outlets.rewind()
        self.view.rewind(step)
        self.callbacks.rewind(step)

    def show(self, status: dict[str, Any]) -> None:
        self.outlets.show(status)
        self.view.show(status)
        self.callbacks.show(status)


def train(
    config: Config,
    preset: str,
    console: Console | None = None,
    root: Path = Path("runs"),
    pipeline: type[Pipeline] | None = None,
    callbacks: Sequence[Any] = (),
    request: StopRequest | None = None,
) -> Path:
    """Run to the end; returns the run directory. `pipeline`: with other actors than usual. `callbacks`: see `Callbacks`.
    `request`: by which another thread may ask for a stop.

    Raises `ConfigError`, `CheckpointError` or `RunFailed` with what to do about it. `NotTrained` (no step made an update),
    `StoppedBeforeStep` and `CallbackFailed` are `RunFailed`, too.
    """
    from r3async.actors.process import StoppedBeforeStep

    request, heard = request or StopRequest(), Callbacks(callbacks)
    console = console or Terminal(file=sys.stderr)
    with stop_signals(request), LiveView(console, config.steps) as view:
        try:
            try:
                path = _train(config, preset, view, root, pipeline, request, heard)
            except StoppedWhileLoading:
                path = root / config.name
                name = f" with name={config.name}" if config.name else ""
                resume = f"to resume: the same command{name}"
                if not view.step:
                    raise StoppedBeforeStep(f"stopped while loading, before a step was made; {resume}") from None
                view.say(f"stopped while loading, after step {view.step}; {resume}")
            heard.end(None)
            return path
        except Exception as error:
            if error is not heard.failed:
                heard.end(error)
            raise


def _train(
    config: Config,
    preset: str,
    view: LiveView,
    root: Path,
    pipeline: type[Pipeline] | None,
    request: StopRequest,
    callbacks: Callbacks,
) -> Path:
    from r3async.actors.process import RunFailed
    from r3async.actors.supervise import Pipeline, supervise
    from r3async.envs.mix import evaluate_each
    from r3async.record.sinks import check_sinks
    from r3async.rollout.evaluation import check_environment
    from r3async.tools.diagnose.afterwards import diagnose_failed
    from r3async.tools.hub import is_hub_name, with_model
    from r3async.tools.preflight import check_start
    from r3async.tools.rows import note_rows

    config = evaluate_each(config)
    check_policy_loss(config.algorithm)
    check_environment(config)  # a wrong environment is refused before anything starts
    check_sinks(config.observe)
    check_capacity(root)
    if is_hub_name(config.model.path):
        view.phase(f"looking for {config.model.path}")
    config = with_model(config, fetch=True)
    check_start(config)
    config = note_rows(config, view.say)
    with full_disk_is_named(root):
        run = open_run(config, preset, view.say, root, reporter(view))
    view.say(f"run directory: {run.path}")
    view.rewind(step := run.resume.state.steps if run.resume else 0)
    try:
        with full_disk_is_named(run.path):
            model_path = run.model_path(config) or _model(config, run.path, view, request)
        with Outlets(config, run.path, view.say) as outlets:
            callbacks.begin(config, run.path, step)
            front = Front(view, outlets, request, callbacks)
            try:
                asyncio.run(supervise(REAL, config, model_path, run, front, pipeline or Pipeline))
            except RunFailed:
                diagnose_failed(run.path, view.say, view.phase)
                raise
    except SystemExit as error:  # of the handlers that Ray installs while it starts: it has ended its processes
        if not request.loading:
            raise
        raise StoppedWhileLoading from error
    finally:
        REAL.actors.disconnect()
        run.lock.close()
        report_run(run.path, view)
    return run.path


def reporter(view: LiveView) -> Report:
    """Tells the person what was found among the checkpoints."""

    def report(event: str, /, **facts: object) -> None:
        view.say(f"{event.replace('_', ' ')}: {' '.join(f'{k}={v}' for k, v in facts.items())}")

    return report


def _model(config: Config, run_dir: Path, view: LiveView, request: StopRequest) -> Path:
    """The start model of a run that has none. While it is made, Ray starts."""
    from r3async.actors.supervise import connect
    from r3async.tools.init_model import init_model_apart, kept_model

    def meanwhile() -> None:
        view.phase("starting Ray")
        connect(REAL, config)
        request.install()  # Ray installed its own handlers

    directory = run_dir / "init"
    kept_model(directory, config, view.phase, partial(init_model_apart, meanwhile=meanwhile))
    return directory.absolute()


def report_run(run_dir: Path, view: LiveView) -> None:
    """Write the report of a run that ended, and print what it comes to."""
    from r3async.views.report import write_report
    from r3async.views.summary import format_summary, summarize

    if not (run_dir / "metrics.jsonl").exists():
        return
    try:
        view.say(f"report: {write_report(run_dir)}")
    except OSError as error:
        view.say(f"the report was not written ({error}); to write it later: r3async report {run_dir}")
    view.console.print(format_summary(summarize(run_dir)))
