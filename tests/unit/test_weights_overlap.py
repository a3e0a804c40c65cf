"""A version is copied between two steps, written beside the next one, and delivered; one copy waits at most."""

from __future__ import annotations

import asyncio
import threading
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file

import r3async.actors.conductor
import r3async.actors.learner
from r3async.actors.conductor import Conductor
from r3async.actors.delivery import Published, Publishing
from r3async.actors.fleet import Way
from r3async.actors.installer import Installer
from r3async.actors.learner import Counts, LearnerActor, Model, Work
from r3async.actors.process import RunFailed
from r3async.actors.ranks import LocalLearner
from r3async.actors.reception import Ahead
from r3async.config import load_config, to_dict
from r3async.learner import LearnerError
from r3async.learner.batch.planner import Cost
from r3async.learner.trainer import Prepared, TrainedGroups, Trainer
from r3async.record.reading import read_objects
from r3async.record.timeline import Timeline
from r3async.schedule.groups import GroupBuffer
from r3async.weights.manifest import WeightManifest
from r3async.weights.publish import Publication
from r3async.world.real import REAL
from tests.helpers import models as hm
from tests.helpers.parity import batch, config
from tests.helpers.world import StandIn

LIMIT = 20.0


@pytest.mark.parametrize("backend", ["megatron", "torch"])
def test_a_copy_is_not_changed_by_the_steps_that_are_made_before_it_is_written(tmp_path, backend):
    settings = config()
    settings.learner.backend = backend
    learner = LocalLearner.load(settings, hm.make_hf_model(tmp_path / "model"))
    try:
        learner.publish_through("shared_memory")
        learner.snapshot(0)
        before = load_file(tmp_path / "model" / "model.safetensors")
        learner.train([[batch()]], version=0)
        with pytest.raises(LearnerError, match="version 0 has not been written: version 1 has to wait"):
            learner.snapshot(1)
        first = load_file(learner.write().manifest.path)
        with pytest.raises(LearnerError, match="no snapshot"):
            learner.write()
        learner.snapshot(1)
        second = load_file(learner.write().manifest.path)
    finally:
        learner.close()
    changed = 0
    for name, tensor in before.items():
        assert torch.equal(first[name], tensor.to(first[name].dtype)), name
        changed += not torch.equal(second[name], first[name])
    assert changed > len(before) // 2


def publication(version: int) -> Publication:
    return Publication(WeightManifest(version=version, path="", tensors={}, nbytes=0))


class Backend:
    """A learner whose `write` takes as long as the test wants; it says in which order things happened."""

    vocab_size, restarts = 8, 0

    def __init__(self) -> None:
        self.happened: list[str] = []
        self.may_write = threading.Semaphore(0)
        self.failure: Exception | None = None
        self._copied = -1

    def snapshot(self, version: int) -> None:
        self.happened.append(f"copied {version}")
        self._copied = version

    def write(self, reading=()) -> Publication:
        assert self.may_write.acquire(timeout=LIMIT)
        if self.failure is not None:
            raise self.failure
        self.happened.append(f"written {self._copied}")
        return publication(self._copied)

    def close(self) -> None:
        pass


class Nothing:
    """In place of what is received: one group, always the same, of which nothing is trained."""

    age_bound, routing = 0, None

    def __init__(self) -> None:
        group = [
            SimpleNamespace(trajectory_id="t", group_index=0, episode_index=0, task_seed=0, preview=None, turns=())
        ]
        self.buffer = SimpleNamespace(take=lambda indices: ([group], 0), episodes=lambda indices: [group])

    async def wait_for_groups(self, since, interrupted):
        return [0]

    async def set_aside(self, unsound, groups):
        pass

    def trained(self, indices):
        pass

    def figures(self):
        return {}


@pytest.fixture
def learner(tmp_path, monkeypatch):
    """A learner, in this process, whose steps train nothing and take no time."""
    settings, backend = load_config("quickstart"), Backend()
    monkeypatch.setattr(r3async.actors.learner, "begin", lambda *args: None)
    actor = LearnerActor(REAL, "run", to_dict(settings), "model", str(tmp_path))
    timeline, lanes = Timeline(tmp_path, "learner", enabled=False), (actor._torch, actor._writer)
    publishing = Publishing(REAL, actor.config, actor.lineage, timeline, backend, *lanes, None, LIMIT)
    monkeypatch.setattr(r3async.actors.learner, "check_ages", lambda *args: None)
    monkeypatch.setattr(r3async.actors.learner, "age_metrics", lambda *args: {})
    monkeypatch.setattr(Trainer, "prepared", lambda self, groups: Prepared(groups, [], [], [], {}, []))
    trained = {"optimizer/skipped": 0}
    monkeypatch.setattr(Trainer, "step", lambda self, n, version, ready: TrainedGroups(trained, ready.groups, [], []))
    monkeypatch.setattr(r3async.actors.learner, "episode_metrics", lambda trajectories: {})
    monkeypatch.setattr(r3async.actors.learner, "trained_step", lambda *args: {})
    trainer = Trainer(settings, Cost(), backend, None, actor.events, lambda t: t)
    actor._loaded = Model(backend, Cost(), Counts(), GroupBuffer(1))
    nothing = Nothing()
    actor._work = Work(nothing, trainer, Ahead(nothing, actor._packer, trainer.prepared), None, publishing)
    return actor


async def test_the_next_step_runs_while_a_version_is_written_and_the_one_after_it_waits(learner):
    backend = learner.model.backend
    assert (await learner.train_step())["new_weights"]
    first = asyncio.create_task(learner.write())
    second_step = asyncio.create_task(learner.train_step())
    while learner.model.counts.steps < 2:  # noqa: ASYNC110 - it offers nothing to wait on
        await asyncio.sleep(0.01)
    await asyncio.sleep(0.1)
    assert backend.happened == ["copied 1"]
    assert not second_step.done()
    backend.may_write.release(2)
    written = await asyncio.wait_for(first, LIMIT)
    result = await asyncio.wait_for(second_step, LIMIT)
    assert written.version == 1
    assert written.seconds > 0.1
    assert result["version"] == 2
    assert result["metrics"]["weights/snapshot_seconds"] > 0.05
    await asyncio.wait_for(learner.write(), LIMIT)
    assert backend.happened == ["copied 1", "written 1", "copied 2", "written 2"]


async def test_a_version_that_cannot_be_written_raises_and_holds_nothing_up(learner):
    learner.model.backend.failure = ValueError("no such tensor")  # what a disk lacks is waited for
    await learner.train_step()
    learner.model.backend.may_write.release()
    with pytest.raises(ValueError, match="no such tensor"):
        await asyncio.wait_for(learner.write(), LIMIT)
    assert (await asyncio.wait_for(learner.train_step(), LIMIT))["version"] == 2


async def test_a_version_that_is_not_written_in_time_is_named_with_the_setting(learner):
    learner.work.publishing.write_seconds = 0.1
    await learner.train_step()
    with pytest.raises(
        TimeoutError, match=r"version 2 has to wait for version 1, .* 0\.1 s \(weights\.write_timeout\)"
    ):
        await asyncio.wait_for(learner.train_step(), LIMIT)


class RemoteLearner(StandIn):
    """Makes steps as fast as it is asked. Writing takes longer than a step, and `fails` at that version."""

    def __init__(self, fails: int = -1):
        self.fails = fails
        self.steps = 0
        self.written: list[int] = []

    async def train_step(self, last=False, scored=False):
        while len(self.written) < self.steps - 1:  # noqa: ASYNC110 - one copy waits
            await asyncio.sleep(0.005)
        self.steps += 1
        metrics = {"batch/trained_tokens": 1, "weights/write_seconds": 0.0}
        metrics |= {"transport/received": self.steps, "learner/wait_seconds": 0.0}
        groups = [self.steps - 1]
        return {
            "version": self.steps,
            "metrics": metrics,
            "previews": [],
            "new_weights": True,
            "groups": groups,
            "scores": [],
        }

    async def write(self, reading):
        version = len(self.written) + 1
        await asyncio.sleep(0.03)
        if version == self.fails:
            raise OSError(f"version {version} could not be written")
        self.written.append(version)
        return Published(publication(version), seconds=float(version))


@pytest.fixture
def conductor(tmp_path, monkeypatch):
    monkeypatch.setattr(r3async.actors.conductor, "begin", lambda *args: None)
    settings = load_config("quickstart", ["steps=5"])
    return Conductor(REAL, "run", to_dict(settings), str(tmp_path), StandIn(), {})


@pytest.fixture
def installer(conductor, monkeypatch):
    """Delivers what is published, in a while, to nobody."""
    fleet = conductor.fleet
    made = Installer(conductor.config, conductor.events, fleet, StandIn(), Way("", ""), None, Published(publication(0)))
    installed = []

    async def deliver():
        version = made.published.version
        await asyncio.sleep(0.02)
        installed.append(version)
        return {"weights/update_seconds": 0.02}

    monkeypatch.setattr(made, "deliver", deliver)
    conductor.trained, conductor.freed = [], []
    monkeypatch.setattr(conductor.admission, "trained", lambda *pair: conductor.trained.append(pair))
    monkeypatch.setattr(conductor.admission, "published", conductor.freed.append)
    conductor.versions = installed
    return made


async def train(conductor, installer, learner):
    conductor.learner = learner
    delivering = asyncio.create_task(conductor._deliver_forever(installer))
    try:
        await asyncio.wait_for(conductor._train(installer, [delivering]), LIMIT)
        await asyncio.wait_for(conductor._settle(delivering), LIMIT)
    finally:
        delivering.cancel()
    return conductor.made


async def test_the_last_weights_are_delivered_and_every_step_has_its_row(conductor, installer, tmp_path):
    assert await train(conductor, installer, RemoteLearner()) == 5
    assert conductor.versions[-1] == 5
    assert conductor.trained == [(version, [version - 1]) for version in range(1, 6)]
    assert conductor.freed == sorted(conductor.freed)
    assert conductor.freed[-1] == 5
    rows = read_objects(tmp_path / "metrics.jsonl")
    assert [r["step"] for r in rows] == [1, 2, 3, 4, 5]
    assert [r["weights/write_seconds"] for r in rows] == [1, 2, 3, 4, 5]


@pytest.mark.parametrize("version", [2, 5])
async def test_what_could_not_be_written_stops_the_training_with_its_reason(conductor, installer, version):
    with pytest.raises(OSError, match=f"version {version} could not be written"):
        await train(conductor, installer, RemoteLearner(fails=version))


async def test_a_delivery_that_fails_after_the_last_step_is_not_passed_over(conductor, installer):
    async def deliver():
        if installer.published.version == 5:
            raise RunFailed("tensor 'x' is corrupt")
        return {}

    installer.deliver = deliver
    with pytest.raises(RunFailed, match="tensor 'x' is corrupt"):
        await train(conductor, installer, RemoteLearner())
