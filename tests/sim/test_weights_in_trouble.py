"""Whole runs, simulated, in which weights do not get through in one place: that place waits, or is restarted, and the run trains
everything once."""

import asyncio
import errno
import math
from pathlib import Path

import pytest

from r3async.config.supervise import TimeLimits
from tests.sim.test_accounting import rehearse
from tests.sim.whole import Machine, Player

SEEDS = pytest.mark.parametrize("seed", range(2))
LIMIT = 5.0
STEPS = 16
MEMORY = Path("/memory")
SETTINGS = [
    f"steps={STEPS}",
    "generator.count=3",
    "generator.concurrency=4",
    "weights.backend=tcp",
    "supervise.silence_seconds=4",
    "supervise.stall_seconds=25",
]

SLOW = ["supervise.stall_seconds=200", "env.args={ turns = 2, seconds = 4.0, tail = 10, failing = 50 }"]
"""The run takes longer than the trouble."""


def limit_times(monkeypatch, **limits):
    """Limits that do not depend on bytes."""
    rates = {"full_bytes_per_second": math.inf, "delta_bytes_per_second": math.inf}
    monkeypatch.setattr("r3async.config.supervise.TIME_LIMITS", TimeLimits(base_install=LIMIT, **rates, **limits))


@pytest.fixture(autouse=True)
def short_installations(monkeypatch):
    limit_times(monkeypatch)


@pytest.fixture
def cluster(untrained, tmp_path, monkeypatch, seed):
    """Of three hosts: conductor, learner and one generator are on the first. Engines read the model on the real disk."""
    make_engine, make_renderer = Player.make_engine, Player.make_renderer
    monkeypatch.setattr(Player, "make_engine", lambda self, path, seed: make_engine(self, str(untrained), seed))
    monkeypatch.setattr(Player, "make_renderer", lambda self, path: make_renderer(self, str(untrained)))
    machine = Machine(tmp_path / "runs", untrained, seed, hosts=("host-0", "host-1", "host-2"))
    yield machine
    machine.close()


def elsewhere(machine):
    """A generator that is on another host than the learner, if there is one already."""
    processes = (p for p in machine.simulation.processes if p.name.startswith("generator"))
    return next((p for p in processes if p.host is not machine.host), None)


def train(machine, tmp_path, meddle, *overrides):
    """Every group was trained once."""
    report = rehearse(machine, tmp_path, [], *SETTINGS, *overrides, meddle=meddle)
    assert report.problems == []
    assert report.steps == STEPS
    assert len(machine.events("conductor_started")) == 1, "the run did not restart"


@pytest.mark.long
@SEEDS
def test_a_generator_whose_data_line_is_silent_longer_than_an_installation_may_take_is_restarted(
    cluster, tmp_path, seed
):
    names = []

    async def block(machine):
        await machine.step(2)
        names.append(elsewhere(machine).name)
        machine.simulation.network.stall_connections(names[0], "learner", 8 * LIMIT)
        await machine.event("install_failed")

    ahead = ["schedule.window=8", "schedule.max_staleness=4"]  # versions follow without what it plays
    train(cluster, tmp_path, block, *SLOW, *ahead)
    failed = cluster.events("install_failed")
    assert {event["generator"] for event in failed} == set(names)
    assert f"did not arrive within {LIMIT:g} s (supervise.patience)" in failed[0]["error"]
    assert {event["generator"] for event in cluster.events("generator_lost")} == set(names)


@pytest.mark.long
@SEEDS
@pytest.mark.parametrize("backend", ["shared_memory", "tcp"])
def test_a_learner_whose_disk_takes_no_weights_waits_and_nobody_is_blamed(
    machine, tmp_path, monkeypatch, backend, seed
):
    limit_times(monkeypatch, base_version_write=30.0, step=30.0)

    async def fill_up(machine):
        await machine.step(3)
        fleet = (await machine.process("conductor")).actor.instance.fleet
        await machine.until(lambda: all(g.health.version >= 3 for g in fleet))  # the next file is the learner's
        full = errno.ENOSPC if backend == "tcp" else errno.EMFILE
        machine.host.disk.refuse_operations(MEMORY, full, {"create", "append", "open"})
        await machine.event("stalled")
        await asyncio.sleep(30)
        machine.host.disk.allow_operations(MEMORY)
        await machine.event("weights_go_on")

    train(
        machine,
        tmp_path,
        fill_up,
        f"weights.backend={backend}",
    )
    stalled = {(event["stage"], event["action"]) for event in machine.events("stalled")}
    assert ("storing/weights", "warn") in stalled
    assert {action for _, action in stalled} == {"warn"}
    assert [e for e in machine.events("weights_stalled") if "directory" in e]


@pytest.mark.long
@SEEDS
def test_a_host_whose_disk_takes_no_weights_loses_its_generator_which_waits_for_it(cluster, tmp_path, seed):
    names = []

    async def fill_up(machine):
        await machine.step(2)
        process = elsewhere(machine)
        names.append(process.name)
        process.host.disk.refuse_operations(MEMORY, errno.ENOSPC)
        await machine.event("generator_lost")
        await asyncio.sleep(2 * LIMIT)
        process.host.disk.allow_operations(MEMORY)
        await machine.event("generator_restarted")

    train(cluster, tmp_path, fill_up, *SLOW)
    (name,) = names
    assert {event["generator"] for event in cluster.events("weights_stalled")} == {name}
    assert [event["generator"] for event in cluster.events("generator_lost")] == [name], "once, however long it takes"


@pytest.mark.long
@SEEDS
def test_a_host_that_is_full_when_its_generator_connects_first_holds_up_no_other(cluster, tmp_path, seed):
    names = []

    async def fill_up(machine):
        process = await machine.until(lambda: elsewhere(machine))
        names.append(process.name)
        process.host.disk.refuse_operations(MEMORY, errno.ENOSPC)
        await machine.step(2)
        process.host.disk.allow_operations(MEMORY)
        await machine.event("weights_go_on")

    train(cluster, tmp_path, fill_up, *SLOW)
    (name,) = names
    assert {event["generator"] for event in cluster.events("weights_stalled")} == {name}
    assert [event["generator"] for event in cluster.events("generator_lost")] == [name], "once, however long it takes"
