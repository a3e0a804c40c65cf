"""Checkpoints of runs that are killed, and whose machines lose power, at any operation on the disk.

The production code from the directory of a run to its checkpoints; each start is a process of its own on a simulated disk.
"""

import asyncio
import errno
from collections.abc import Coroutine
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from dev.simulation.disk import SimulatedDisk, SimulatedFile, SimulatedFiles
from dev.simulation.loop import ProcessKilled
from dev.simulation.processes import HostProcess
from dev.simulation.world import Simulation
from r3async.actors.run_directory import open_run_directory
from r3async.checkpoint import CheckpointDirectory, CheckpointError, CheckpointWriter, find_checkpoint
from r3async.checkpoint.manifest import CheckpointUnreadable
from r3async.checkpoint.rank_files import TensorSlice, write_rank_file
from r3async.checkpoint.run_starts import begin_lineage, describe_origin
from r3async.checkpoint.state import RECORD_FILES
from r3async.config import Config, ConfigError, config_from_dict
from r3async.world import Files, World
from r3async.world.appending import AppendFile
from r3async.world.files import make_directory, read_file, replace_file
from tests.helpers.checkpoint import hold_nothing, tiny_state, training_state, write_checkpoint
from tests.helpers.disk import Process

RUN = Path("/runs/a")


@dataclass
class Known:
    """What the person outside knows of the run, whatever becomes of its machine."""

    lineages: list[int] = field(default_factory=list)
    """Of all starts that had one."""
    values: dict[tuple[int, int], float] = field(default_factory=dict)
    """By lineage and step: of the weights in the checkpoint that was begun then."""
    reported: int = 0
    """The step of the newest checkpoint that was reported as written, or that the run was told to go back to."""
    operations: list[int] = field(default_factory=list)
    """On the disk, by start."""


async def start(world: World, known: Known, count: int, back: bool) -> None:
    """One start of the run: it makes `count` steps, each with a checkpoint. `back`: from the oldest checkpoint that there is."""
    checkpoints = CheckpointDirectory(RUN / "checkpoints", keep_last=2, files=world.files)
    resume = "auto"
    if back and (steps := checkpoints.list_steps()):
        resume, known.reported = str(checkpoints.step_path(steps[0])), min(steps[0], known.reported)
    config = config_from_dict({"name": "a", "steps": 10_000, "resume": resume, "checkpoint": {"keep_last": 2}})
    run = await open_run_directory(config, RUN, lambda said: None, world=world)
    opened = run.resume_from
    at = 0
    if opened is None:
        assert known.reported == 0, f"step {known.reported} was written, and the run began anew"
    else:
        at, lineage = opened.state.steps, opened.state.lineage.number
        assert at >= known.reported, f"step {known.reported} was written, and the run resumed from step {at}"
        found = opened.open_learner_state().read_slice(TensorSlice.full_tensor("master/w", (8,)))
        assert found.tolist() == [known.values[lineage, at]] * 8
    origin = describe_origin(opened, RUN / "checkpoints") if opened else ""
    lineage_now = begin_lineage(RUN, opened, "model", origin, files=world.files)
    assert lineage_now.number not in known.lineages, "two starts are one lineage"
    known.lineages.append(lineage_now.number)
    await write(world, known, config, lineage_now, range(at + 1, at + 1 + count))
    run.lock.close()


async def write(world: World, known: Known, config: Config, lineage: Any, steps: range) -> None:
    writer = CheckpointWriter(config, "r", start_model(world.files), RUN, Events(), world=world)
    for step in steps:
        value = float(step + 1000 * lineage.number)
        known.values[lineage.number, step] = value

        def parts(directory: Path, value: float = value) -> Any:
            return [write_rank_file(directory, tiny_state(value), files=world.files)]

        def written(step: int = step) -> None:
            known.reported = step

        await writer.save_checkpoint(training_state(step, lineage=lineage), hold_nothing, parts, written)
    await writer.wait_until_written()


def start_model(files: Files) -> Path:
    """The directory of one of which nothing but the fingerprint is taken."""
    model = RUN / "model"
    make_directory(model, files=files)
    replace_file(model / "config.json", b"{}", files=files)
    return model


def live(simulation: Simulation, process: HostProcess, main: Coroutine[Any, Any, None]) -> BaseException | None:
    """Until `main` or its process ends. What `main` raised."""
    over = simulation.loop.create_future()
    task = simulation.loop.create_task(main, context=process.context.copy())

    def settle(*_: object) -> None:
        if not over.done():
            over.set_result(None)

    task.add_done_callback(settle)
    process.add_end_callback(settle)
    simulation.loop.run_until_complete(over)
    error = task.exception() if task.done() and not task.cancelled() else None
    return None if isinstance(error, ProcessKilled) else error


FAULTS = st.sampled_from(("none", "killed", "power lost", "disk full", "disk fails", "disk fails once"))
STARTS = st.lists(
    st.tuples(FAULTS, st.integers(1, 160), st.integers(0, 4), st.booleans(), st.booleans()), min_size=1, max_size=5
)


def run(seed: int, starts: list[tuple[str, int, int, bool, bool]]) -> Known:
    """Start a run again and again; in each start a fault comes at an operation, and power may fail when it is over."""
    simulation = Simulation(seed)
    (host,) = simulation.hosts.values()
    known = Known()
    for fault, at, count, back, power in [*starts, ("none", 0, 1, False, True), ("none", 0, 0, False, False)]:
        process = simulation.begin_process("driver", host)
        left = at

        def tick(_: Any, operation: str, path: Path, fault: str = fault, process: HostProcess = process) -> None:
            nonlocal left
            left -= 1
            if left == -3 and fault == "disk fails once":
                host.disk.allow_operations(RUN)
            if left != 0:
                return
            if fault == "killed":
                simulation.end_process(process, "a test")
            elif fault == "power lost":
                simulation.lose_host(host)
            elif fault.startswith("disk"):
                host.disk.refuse_operations(RUN, errno.ENOSPC if fault == "disk full" else errno.EIO)

        host.disk.on_operation = tick
        error = live(simulation, process, start(process.world, known, count, back))
        if isinstance(error, AssertionError) or not (error is None or fault.startswith("disk")):
            raise error
        host.disk.on_operation = lambda *_: None
        known.operations.append(at - left)
        host.disk.allow_operations(RUN)
        simulation.end_process(process, "the start is over")
        if power:
            simulation.lose_host(host)
        simulation.restore_host(host)
    simulation.close()
    return known


@settings(max_examples=40)
@example(seed=0, starts=[("killed", 6, 0, False, False)])  # between making the run's directory and syncing its name
@example(seed=0, starts=[("disk fails once", 77, 2, False, True)])  # the same with the directory of checkpoints
@given(seed=st.integers(0, 2**32), starts=STARTS)
@pytest.mark.long
def test_a_run_resumes_from_a_whole_checkpoint_that_is_no_older_than_the_last_that_was_reported(seed, starts):
    run(seed, starts)


@pytest.mark.long
def test_power_may_fail_at_each_operation_of_a_start():
    """Which resumes, makes three checkpoints, and removes older ones."""
    before, after = ("none", 0, 2, False, True), ("none", 0, 3, False, False)
    operations = run(0, [before, after]).operations[1]
    assert operations > 100
    reported = [run(at, [before, ("power lost", at, 3, False, False)]).reported for at in range(1, operations + 1)]
    assert min(reported) == 3  # of the start that follows
    assert max(reported) == 6
    for at in range(1, 60):
        run(at, [("power lost", at, 1, False, False)])  # in a start that finds nothing


@pytest.mark.long
@pytest.mark.parametrize(
    ("operation", "name"),
    [
        ("fsync", "learner-"),
        ("fsync", "run.json"),
        ("fsync", "manifest.json"),
        ("fsync", ".lineages.json"),
        ("fsync_directory", "step-"),
        ("fsync_directory", "checkpoints"),
        ("fsync_directory", "a"),
    ],
)
def test_each_sync_is_needed(monkeypatch, operation, name):
    """Without it the same search finds what is lost."""
    kind = SimulatedFiles if operation == "fsync_directory" else SimulatedFile
    real = getattr(kind, operation)

    def forgets(self: Any, *path: Path) -> None:
        if not (path[0] if path else self._path).name.startswith(name):
            real(self, *path)

    def finds(seed: int) -> bool:
        try:
            run(seed, [("none", 0, seed % 3, False, True)] * 3)
        except (AssertionError, CheckpointError, ConfigError):
            return True
        return False

    assert not any(finds(seed) for seed in range(6))
    monkeypatch.setattr(kind, operation, forgets)
    assert any(finds(seed) for seed in range(60))


class Events:
    """Takes what a structlog logger takes."""

    def info(self, event: str, **facts: object) -> None:
        pass

    error = info


async def save(world: World, rows: int) -> None:
    """One start of a run, which records so many steps and makes a checkpoint of the last one."""
    config = config_from_dict({"name": "a", "steps": 10_000})
    run = await open_run_directory(config, RUN, lambda said: None, world=world)
    for name in RECORD_FILES:
        record = AppendFile(run.path / name, world=world)
        for step in range(rows):
            record.append(b"%d" % step)
    writer = CheckpointWriter(config, "r", start_model(world.files), run.path, Events(), world=world)
    state = await training_state(rows).with_record_positions(run.path, RECORD_FILES, keeper=world.record_flusher)
    await writer.save_checkpoint(
        state, hold_nothing, lambda path: [write_rank_file(path, tiny_state(rows), files=world.files)]
    )
    await writer.wait_until_written()
    run.lock.close()


@pytest.mark.parametrize("seed", range(10))
def test_every_row_that_a_checkpoint_counts_is_there_when_power_has_failed(seed):
    simulation = Simulation(seed)
    (host,) = simulation.hosts.values()
    process = simulation.begin_process("driver", host)
    assert live(simulation, process, save(process.world, 5)) is None
    simulation.lose_host(host)
    simulation.restore_host(host)
    files = simulation.begin_process("reader", host).world.files
    state = find_checkpoint(RUN, files=files).state
    assert state.record_bytes == dict.fromkeys(RECORD_FILES, 10)
    assert {name: read_file(RUN / name, files=files) for name in RECORD_FILES} == dict.fromkeys(
        RECORD_FILES, b"0\n1\n2\n3\n4\n"
    )
    simulation.close()


def written(count: int) -> tuple[SimulatedDisk, CheckpointDirectory, list[str]]:
    """A disk with so many checkpoints, and what is reported of them."""
    disk, reported = SimulatedDisk(Random(0)), []
    files = disk.files_for(Process())
    files.create_directory(RUN.parent)
    checkpoints = CheckpointDirectory(RUN, report_event=lambda event, /, **_: reported.append(event), files=files)
    for step in range(1, count + 1):
        write_checkpoint(checkpoints, step)
    return disk, checkpoints, reported


@pytest.mark.parametrize("name", ["manifest.json", "run.json", "learner-00000-of-00001.safetensors"])
@pytest.mark.parametrize("operation", ["open", "read"])
def test_a_checkpoint_that_the_disk_does_not_give_is_asked_for_again_and_never_set_aside(name, operation):
    disk, checkpoints, reported = written(2)
    path, asked = checkpoints.step_path(2) / name, []

    def recovers(_: Any, what: str, where: Path) -> None:
        if (what, where) == (operation, path):
            asked.append(what)
            if len(asked) == 2:
                disk.allow_operations(path)

    disk.on_operation = recovers
    disk.refuse_operations(path, errno.EIO, {operation})
    newest = checkpoints.recover_newest()
    assert newest is not None
    assert newest.state.steps == 2
    assert len(asked) >= 2
    disk.on_operation = lambda *_: None
    disk.refuse_operations(path, errno.EIO, {operation})
    for find in (checkpoints.recover_newest, lambda: find_checkpoint(RUN, files=checkpoints.files)):
        with pytest.raises(
            CheckpointUnreadable, match=rf"step-00000002 cannot be read now \({name}: .*older checkpoint"
        ):
            find()
    assert checkpoints.list_steps() == [1, 2]
    assert reported == []
    disk.allow_operations(path)
    checkpoints.files.remove(path)  # that is damage
    older = checkpoints.recover_newest()
    assert older is not None
    assert (older.state.steps, reported) == (1, ["checkpoint_bad"])


def test_nothing_is_removed_while_the_disk_does_not_give_the_newest_checkpoint():
    disk, checkpoints, reported = written(5)
    disk.refuse_operations(checkpoints.step_path(5) / "run.json", errno.EIO, {"read"})
    with pytest.raises(CheckpointUnreadable):
        checkpoints.prune_old()
    assert checkpoints.list_steps() == [1, 2, 3, 4, 5]
    disk.allow_operations(checkpoints.step_path(5) / "run.json")
    assert checkpoints.prune_old() == [1, 2]
    assert reported == []


@pytest.mark.parametrize("who", ["conductor", "learner"])
def test_a_checkpoint_that_cannot_be_begun_for_want_of_descriptors_is_made_when_it_can_be(machine, who):
    async def fill(machine):
        await machine.step(1)
        process = await machine.process(who)
        process.out_of_descriptors = True
        await asyncio.sleep(60.0)
        process.out_of_descriptors = False

    slow = "generator.engine_args={ token_seconds = 0.2 }"
    machine.train("steps=3", "checkpoint.every_steps=1", slow, meddle=fill)
    failed = machine.events("checkpoint_failed")
    assert failed
    assert all("Too many open files" in event["error"] for event in failed)
    assert machine.events("checkpoint_written")[-1]["step"] == 3
    assert [row["step"] for row in machine.rows()] == [1, 2, 3]
    assert len(machine.events("conductor_started")) == 1
