"""One simulated run, from its seed to its verdict."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import hashlib
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextvars import Context
from pathlib import Path
from typing import Any

import msgspec

from dev.simulation.faults import draw_faults, faults_end
from dev.simulation.history import FaultReported, RunEvent, RunFinished, TimePassed
from dev.simulation.inject import RUNS, FaultInjector
from dev.simulation.invariants import InvariantChecker, InvariantViolated
from dev.simulation.loop import DeadlockError, LimitReachedError
from dev.simulation.mutants import replace_attribute
from dev.simulation.network import DelayRanges
from dev.simulation.observe import WatchedSimulation
from dev.simulation.processes import HostProcess
from dev.simulation.shrink import SimulationCase
from dev.simulation.workload import CHUNK_BYTES, SimulatedWorkload, draw_workload
from dev.simulation.world import SimulatedHost
from r3async.actors.driver import RunLauncher, supervise_run
from r3async.actors.process import NotTrained, ProcessLost, RunFailed, StoppedBeforeStep
from r3async.actors.run_directory import LOCK_WAIT_SECONDS, open_run_directory
from r3async.checkpoint import CheckpointError
from r3async.config import Config, ConfigError, InitShape, supervise
from r3async.data.model_shape import read_moe_layers
from r3async.record.reading import EVALUATION_FILE, read_json_objects
from r3async.record.timeline import Span, read_timeline
from r3async.untrusted import decode_json_object
from r3async.weights import relay
from r3async.world import EventReporter, Files, ignore_event

MODEL_PATH = Path("model")
"""Path of the model. It is relative, so that a run writes the same wherever it is simulated."""
MAX_CALLBACKS = 3_000_000
MAX_SECONDS = 36_000.0
TICK_SECONDS = 5.0
DISK_SECONDS = 120.0
"""Seconds after the last fault during which the run may still fail because of a disk."""
REPEAT_SECONDS = 5.0
"""Seconds until the user repeats the command, after the driver ended or failed."""


class SimulationResult(msgspec.Struct, frozen=True):
    """The result of one simulated run.

    Attributes:
        digest: Digest of everything that happened.
        violated: Name of the invariant that was violated; "" for none.
        reason: Description of the violation.
        faults: Number of injected faults by kind.
        gave_up: Errors with which the run ended before the last fault was over, and
            was started again.
        unhandled: Errors that no task handled.
        seconds: Real seconds, which differ from time to time.
    """

    seed: int
    steps: int
    virtual_seconds: float
    events: int
    callbacks: int
    lineages: int
    digest: str
    violated: str = ""
    reason: str = ""
    faults: dict[str, int] = {}
    gave_up: list[str] = []
    unhandled: list[str] = []
    seconds: float = 0.0


class SimulatedUser:
    """The simulated user, an implementation of `r3async.actors.driver.DriverUI`. It shows nothing,
    and stops the run when a fault requires it."""

    def __init__(self) -> None:
        self.stop_requested = False
        self.shown_step = 0
        self.report_event: EventReporter = ignore_event
        self.resume_advised = False

    def print_line(self, line: str) -> None:
        self.resume_advised |= "to resume: the same command" in line

    def show_phase(self, text: str) -> None:
        pass

    def begin_loading(self) -> None:
        pass

    def confirm_started(self) -> None:
        pass

    def show_status(self, status: dict[str, Any]) -> None:
        for row in status["rows"]:
            self.shown_step = row["step"]

    def rewind_to_step(self, step: int) -> None:
        self.shown_step = step


@contextlib.contextmanager
def tiny_model_directory() -> Iterator[Path]:
    """Create a directory with the `config.json` and tokenizer of a tiny model, and make it the
    working directory until the end."""
    from r3async.tools.init_model import build_byte_tokenizer

    before = Path.cwd()
    directory = Path(tempfile.mkdtemp(prefix="r3async-simulate-"))
    model = directory / MODEL_PATH
    try:
        model.mkdir()
        build_byte_tokenizer().save_pretrained(model)
        model_config = InitShape(layers=2).build_model_config(512, rope_theta=10_000.0)
        (model / "config.json").write_bytes(msgspec.json.encode(model_config))
        os.chdir(directory)
        yield model
    finally:
        os.chdir(before)
        shutil.rmtree(directory, ignore_errors=True)


@contextlib.contextmanager
def small_constants(workload: SimulatedWorkload) -> Iterator[None]:
    """Use the time limits of `workload`, and small chunks and a small fan-out, so that the few
    bytes of the scripted learner are several chunks, and a few hosts form a tree."""
    with (
        replace_attribute(relay, "CHUNK_BYTES", lambda _: CHUNK_BYTES),
        replace_attribute(relay, "FANOUT", lambda _: workload.fanout),
        replace_attribute(supervise, "TIME_LIMITS", lambda _: workload.time_limits),
    ):
        yield


class SimulatedRun:
    """One simulated run. `run` returns its result, after which `history` and `spans` are available.
    An error that no task handles fails the run, too."""

    def __init__(
        self, case: SimulationCase, pipeline: type[RunLauncher] = RunLauncher, details: bool = False
    ):
        self.case = case
        self._pipeline = pipeline
        self.config: Config = case.workload.build_config(MODEL_PATH)
        described = decode_json_object((MODEL_PATH / "config.json").read_bytes())
        routing, _ = read_moe_layers(described)
        self.checker = InvariantChecker(case.workload.derive_guarantees())
        self.simulation = WatchedSimulation(
            case.workload.seed,
            self.checker,
            routing=routing,
            hosts=case.workload.host_names,
            delays=DelayRanges().scale_by(case.workload.slowness),
            max_callbacks=MAX_CALLBACKS,
            max_seconds=MAX_SECONDS,
            keep_details=details,
            memory_bytes_per_second=case.workload.memory_bytes_per_second,
        )
        self.gave_up: list[str] = []
        self._user = SimulatedUser()
        self._faults_end = faults_end(case.faults)
        self._training = self.simulation.rng_for("training")
        self.simulation.delay_training = self._delay_training
        self._injector = FaultInjector(self.simulation, case.faults, self._request_stop)
        self._copy_model()

    def _copy_model(self) -> None:
        """Copy the model's configuration to the simulated disk, under the same path."""
        host = next(iter(self.simulation.hosts.values()))
        process = self.simulation.begin_process("setup", host)
        files = host.disk.files_for(process)
        for directory in (RUNS, *(() if MODEL_PATH.is_absolute() else (MODEL_PATH,))):
            files.create_directory(directory)
        with files.open(MODEL_PATH / "config.json", exclusive=True) as file:
            file.append([(MODEL_PATH / "config.json").read_bytes()])
            file.fsync()
        host.disk.write_back()
        self.simulation.end_process(process, "the disk is ready")

    def _delay_training(self, process: HostProcess) -> float:
        least = self.case.workload.least_train_seconds
        most = self.case.workload.train_seconds
        return least + self._training.random() * (most - least)

    @property
    def history(self) -> list[RunEvent]:
        return self.simulation.history

    def run(self) -> SimulationResult:
        """Run to the end, or to the first event that violates an invariant."""
        began = time.perf_counter()
        loop = self.simulation.loop
        violation: InvariantViolated | None = None
        try:
            root = loop.create_task(self._act_as_user(), name="root", context=Context())
            root.add_done_callback(lambda _: loop.stop())
            with small_constants(self.case.workload):
                loop.run_forever()
            violation = self.simulation.violation
            if violation is None:
                root.result()
            if violation is None and loop.failures:
                violation = InvariantViolated("unhandled", loop.failures[0])
        except (DeadlockError, LimitReachedError) as error:
            violation = self.simulation.violation or InvariantViolated(
                "stuck", f"{type(error).__name__}: {error}"
            )
        self.spans = self._read_spans()
        self.simulation.close()
        state = self.checker.state
        return SimulationResult(
            seed=self.case.workload.seed,
            steps=len(state.current_branch.steps) if state.branches else 0,
            virtual_seconds=round(loop.now, 3),
            events=len(self.history),
            callbacks=loop.callback_count,
            lineages=len(state.branches),
            digest=self.compute_digest(),
            violated=violation.name if violation is not None else "",
            reason=violation.reason if violation is not None else "",
            faults=dict(sorted(self._injector.injected_counts.items())),
            gave_up=self.gave_up,
            unhandled=loop.failures,
            seconds=round(time.perf_counter() - began, 3),
        )

    def compute_digest(self) -> str:
        """Return the digest of every call, message and event."""
        digest = hashlib.blake2b(self.simulation.log.compute_digest().encode(), digest_size=16)
        for event in self.history:
            digest.update(msgspec.json.encode(event))
        return digest.hexdigest()

    def _read_spans(self) -> list[Span]:
        """Return the spans that the run's processes wrote to their timelines."""
        with self._open_files() as files:
            return read_timeline(RUNS / "run", files=files)

    @contextlib.contextmanager
    def _open_files(self) -> Iterator[Files]:
        """Provide the disk for reading what the run wrote."""
        host = next(iter(self.simulation.hosts.values()))
        process = self.simulation.begin_process("reader", host)
        try:
            yield host.disk.files_for(process)
        finally:
            self.simulation.end_process(process, "it has read")

    # -- the user and the driver -------------------------------------------------------------------

    def _request_stop(self) -> None:
        self._user.stop_requested = True

    async def _act_as_user(self) -> None:
        """Act as the user, in no process: start the command, and repeat it whenever it ended
        before the run did."""
        loop = self.simulation.loop
        host = next(iter(self.simulation.hosts.values()))
        watching = loop.create_task(self._pass_time())
        while True:
            outcome = await self._run_driver(self.simulation.begin_process("driver", host))
            if self._is_over(outcome):
                break
            await asyncio.sleep(REPEAT_SECONDS)
            await self._wait_for_host(host)
        watching.cancel()

    async def _wait_for_host(self, host: SimulatedHost) -> None:
        while host.is_lost:  # noqa: ASYNC110
            await asyncio.sleep(1.0)

    async def _pass_time(self) -> None:
        while True:
            await asyncio.sleep(TICK_SECONDS)
            self.simulation.see_event(
                TimePassed, tuple(p.name for p in self.simulation.processes if not p.running)
            )

    async def _run_driver(self, process: HostProcess) -> Exception | str | None:
        """Run the driver in a process. Returns what it raised, or why its process ended;
        None if it returned."""
        self._user = SimulatedUser()
        ended = self.simulation.loop.create_future()

        def set_ended() -> None:
            if not ended.done():
                ended.set_result("its process ended")

        process.add_end_callback(set_ended)
        task = self.simulation.loop.create_task(
            self._run_command(process), name="driver", context=process.context.copy()
        )
        await asyncio.wait([task, ended], return_when=asyncio.FIRST_COMPLETED)
        if ended.done():
            return ended.result()
        self.simulation.end_process(process, "the command has ended")
        return task.exception()  # type: ignore[return-value]

    async def _run_command(self, process: HostProcess) -> None:
        world = process.world
        person = self._user
        run = await open_run_directory(
            self.config, RUNS / "run", person.print_line, person.report_event, world=world
        )
        try:
            await supervise_run(world, self.config, MODEL_PATH, run, person, self._pipeline)
        finally:
            run.lock.close()

    def _is_over(self, outcome: Exception | str | None) -> bool:
        """Return whether the run is complete or has failed for good, so that the command
        is not repeated."""
        state = self.checker.state
        step_count = len(state.current_branch.steps) if state.branches else 0
        unfinished = self._user.resume_advised and outcome is None  # its last evaluation is missing
        if (
            step_count == self.config.steps
            and (outcome is None or isinstance(outcome, ConfigError))
            and not unfinished
        ):
            self._record_finished(step_count)
            return True
        if self._user.stop_requested and _was_stopped(outcome):
            self.simulation.see_event(FaultReported, "the person begins the run again")
            return False
        if (
            isinstance(outcome, NotTrained)
            and step_count == self.config.steps
            and not any(s.updates for s in state.current_branch.steps)
        ):
            self._record_finished(step_count)
            return True
        outcome_text = "it returned" if outcome is None else f"{type(outcome).__name__}: {outcome}"
        if isinstance(outcome, str):
            self.simulation.see_event(
                FaultReported, f"the driver ended ({outcome}); the person begins the run again"
            )
            return False
        if not isinstance(outcome, RunFailed | ConfigError | CheckpointError | OSError | None):
            raise outcome
        if _may_fail(outcome, self._faults_end, self.simulation.loop.now):
            self.gave_up.append(outcome_text)
            self.simulation.see_event(
                FaultReported, f"the command failed ({outcome_text}); the person gives it again"
            )
            return False
        self._record_finished(step_count, outcome_text)
        return True

    def _record_finished(self, step_count: int, failed: str = "") -> None:
        with self._open_files() as files:
            rows = read_json_objects(RUNS / "run" / EVALUATION_FILE, files=files)
        self.simulation.see_event(
            RunFinished, step_count, failed, tuple(row["step"] for row in rows)
        )


def _was_stopped(outcome: Exception | str | None) -> bool:
    """Return whether the outcome fits a stop by the user: in order, or because an actor was
    lost or did not end."""
    ended = outcome is None or isinstance(outcome, ProcessLost | StoppedBeforeStep)
    return ended or "stop_grace_seconds" in str(outcome)


_PASSING_ERRORS = (errno.EIO, errno.EMFILE, errno.ENOSPC)


def _may_fail(outcome: Exception | None, last: float, now: float) -> bool:
    """Return whether the user would repeat the command: a disk failed, or processes of the run are
    still writing. Both are over some time after the `last` fault."""
    outcome_text = str(outcome)
    disk = isinstance(outcome, OSError) or any(
        f"[Errno {n}]" in outcome_text for n in _PASSING_ERRORS
    )
    busy = isinstance(outcome, ConfigError) and (
        "in use by another" in outcome_text or "did not end within" in outcome_text
    )
    return (disk and now < last + DISK_SECONDS) or (busy and now < last + LOCK_WAIT_SECONDS)


def draw_case(seed: int, mutant: str = "") -> SimulationCase:
    """Return the case that is simulated for a seed."""
    workload = draw_workload(seed)
    return SimulationCase(workload, tuple(draw_faults(workload)), mutant)
