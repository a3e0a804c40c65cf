"""`r3async train`: from a configuration to a finished run directory."""

from __future__ import annotations

import asyncio
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from rich.console import Console

from actors.run_dir import RunDir, begin_again
from r3async.config import Config, ConfigError, to_dict
from r3async.world.real import REAL
from tools.capacity import check_capacity, full_disk_is_named
from tools.live import LiveView
from tools.run_dir import open_run
from tools.terminal import Terminal

if TYPE_CHECKING:
    from actors.pipeline import Pipeline

POLL_SECONDS = 0.5


class Outlets:
    """Where the driver hands each step's row on to: sinks, and its own Prometheus endpoint. Never waits but at the end."""

    def __init__(self, config: Config, run_dir: Path, say: Callable[[str], object]):
        from r3async.observe.prometheus import serve_metrics
        from r3async.observe.sinks import open_sinks

        self._sinks = open_sinks(config.observe, run_dir, to_dict(config), say)
        self._run_dir = run_dir
        self._endpoint = serve_metrics("driver", run_dir, config.observe)

    def show(self, status: Mapping[str, Any]) -> None:
        """A status of the conductor, with rows that were not in the one before."""
        for row in status["rows"]:
            self._sinks.write(row)
            if self._endpoint is not None:
                self._endpoint.update(row)

    def __enter__(self) -> Outlets:
        return self

    def __exit__(self, *exc: object) -> None:
        self._sinks.close()
        if self._endpoint is not None:
            self._endpoint.close()
        # The run is over: whoever did not take its address away was killed.
        shutil.rmtree(self._run_dir / "prometheus", ignore_errors=True)


class StoppedWhileLoading(BaseException):
    """A stop was requested before the actors could be told: nothing has to be finished."""


class StopRequest:
    """First Ctrl-C or SIGTERM: end in order, by `StoppedWhileLoading` while `loading`. Second: `KeyboardInterrupt` at once."""

    def __init__(self) -> None:
        self.requested = False
        self.loading = True
        """The main thread is in calls that take long and look at no flag."""

    def __call__(self, number: int, frame: FrameType | None) -> None:
        if self.requested:
            raise KeyboardInterrupt
        self.requested = True
        if self.loading:
            raise StoppedWhileLoading


@contextmanager
def stop_signals(request: StopRequest) -> Iterator[None]:
    """Install the handlers. Ray installs its own for SIGTERM when it starts: enter this again after that."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    old = {number: signal.signal(number, request) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in old.items():
            signal.signal(number, handler)


def train(
    config: Config,
    preset: str,
    console: Console | None = None,
    root: Path = Path("runs"),
    pipeline: type[Pipeline] | None = None,
) -> Path:
    """Run to the end; returns the run directory. `pipeline`: with other actors than usual.

    Raises `ConfigError`, `CheckpointError` or `RunFailed` with what to do about it; `NotTrained`, which is one, if no step
    made an update.
    """
    request = StopRequest()
    console = console or Terminal(file=sys.stderr)
    with stop_signals(request), LiveView(console, config.steps) as view:
        try:
            return _train(config, preset, view, root, pipeline, request)
        except StoppedWhileLoading:
            name = f" with name={config.name}" if config.name else ""
            view.say(f"stopped while loading, before a step was made; to resume: the same command{name}")
            return root / config.name


def _train(
    config: Config, preset: str, view: LiveView, root: Path, pipeline: type[Pipeline] | None, request: StopRequest
) -> Path:
    from actors.pipeline import Pipeline
    from r3async.observe.sinks import check_sinks
    from r3async.serving.agents import check_environment

    check_environment(config)  # a wrong environment is refused before anything starts
    check_sinks(config.observe)
    if config.model.path and not (Path(config.model.path) / "config.json").is_file():
        raise ConfigError(f"`model.path` = {config.model.path!r} is not a model directory (no config.json in it)")
    check_capacity(root)
    with full_disk_is_named(root):
        run = open_run(config, preset, view.say, root, _reporter(view))
    view.say(f"run directory: {run.path}")
    view.rewind(run.resume.state.steps if run.resume else 0)
    try:
        with full_disk_is_named(run.path):
            model_path = run.model_path(config) or _model(config, run.path, view)
        with Outlets(config, run.path, view.say) as outlets:
            _run_on(config, model_path, run, view, outlets, pipeline or Pipeline, request)
    finally:
        run.lock.close()
        _report(run.path, view)
    return run.path


def _reporter(view: LiveView) -> Callable[..., None]:
    """Tells the person what was found among the checkpoints."""

    def report(event: str, /, **facts: object) -> None:
        view.say(f"{event.replace('_', ' ')}: {' '.join(f'{k}={v}' for k, v in facts.items())}")

    return report


def _model(config: Config, run_dir: Path, view: LiveView) -> Path:
    from tools.init_model import init_model

    directory = run_dir / "init"
    init_model(directory, config, progress=view.phase)
    return directory.absolute()


def _run_on(
    config: Config,
    model_path: Path,
    run: RunDir,
    view: LiveView,
    outlets: Outlets,
    kind: type[Pipeline],
    request: StopRequest,
) -> None:
    """The run, and again from its newest checkpoint if a process that it can not do without dies."""
    from actors.deaths import ProcessDied

    restarts = 0
    while True:
        try:
            return _run(kind(REAL, config, model_path, run.path, run.resume), view, outlets, request)
        except ProcessDied as error:
            if request.requested or restarts == config.supervise.max_run_restarts:
                raise
            restarts += 1
            request.loading = True
            allowed = config.supervise.max_run_restarts
            view.say(f"{error}; the run begins again ({restarts} of {allowed}, supervise.max_run_restarts)")
            run = asyncio.run(begin_again(config, run, view.say, _reporter(view)))
            step = run.resume.state.steps if run.resume else 0
            view.say(f"going on from step {step}")
            view.rewind(step)


def _run(pipeline: Pipeline, view: LiveView, outlets: Outlets, request: StopRequest) -> None:
    from actors.deaths import NotTrained, RunFailed
    from actors.pipeline import RESULT_SECONDS

    config, run_dir = pipeline.config, pipeline.run_dir
    view.phase("starting Ray and the actors")
    try:
        _start(pipeline, request)
        with stop_signals(request):
            request.loading = False
            told = 0.0
            while not pipeline.finished(POLL_SECONDS):
                status = pipeline.status(view.step)
                if status is not None:
                    outlets.show(status)
                    view.show(status)
                pipeline.check(view.say)
                if request.requested and not told:
                    told = time.monotonic()
                    view.say("stopping: the running step is finished and a checkpoint written (again to stop at once)")
                    pipeline.stop()
                limit = 4 * config.supervise.stop_grace_seconds
                if told and time.monotonic() - told > limit:
                    raise RunFailed(
                        f"the actors did not end within {limit:g} s (4 x supervise.stop_grace_seconds) and are ended now; "
                        f"the same command with name={run_dir.name} resumes from the newest checkpoint"
                    )
            status = pipeline.status(view.step, RESULT_SECONDS)
            if status is not None:
                outlets.show(status)
                view.show(status)
            result = pipeline.result()
            if result["model"]:
                view.say(f"trained model: {run_dir / 'model'}")
            if result["stopped"] and result["steps"]:
                done = f"{result['steps']} of {config.steps} steps" + (
                    "" if result["updates"] else " without an update"
                )
                view.say(f"stopped after {done}; to go on: the same command with name={run_dir.name}")
            elif result["stopped"]:
                view.say(f"stopped before a step was made; to resume: the same command with name={run_dir.name}")
            elif result["steps"] and not result["updates"]:
                raise NotTrained(
                    f"none of {result['steps']} steps made an update ({result['without_update']}); the "
                    "weights are those that the run began with, so no model is saved"
                )
    finally:
        pipeline.shutdown()


def _start(pipeline: Pipeline, request: StopRequest) -> None:
    try:
        pipeline.start()
    except SystemExit as error:  # of the handlers that Ray installs while it starts: it has ended its processes
        request.requested = True
        raise StoppedWhileLoading from error
    if request.requested:
        raise StoppedWhileLoading


def _report(run_dir: Path, view: LiveView) -> None:
    from r3async.observe.report import write_report
    from r3async.observe.summary import format_summary, summarize

    if not (run_dir / "metrics.jsonl").exists():
        return
    try:
        view.say(f"report: {write_report(run_dir)}")
    except OSError as error:
        view.say(f"the report was not written ({error}); to write it later: r3async report {run_dir.name}")
    view.console.print(format_summary(summarize(run_dir)))
