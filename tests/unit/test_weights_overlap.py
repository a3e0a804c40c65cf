"""A version is copied between two steps, written beside the next one, and delivered; one copy waits at most."""

import asyncio
import contextlib
import threading
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file

import r3async.actors.conductor
import r3async.actors.learner
from r3async.actors.conductor import Conductor
from r3async.actors.fleet import LearnerAddress
from r3async.actors.learner import (
    LearnerActor,
    LearnerStatus,
    TrainStepResult,
)
from r3async.actors.process import RunFailed
from r3async.actors.rank_actor import LocalRank
from r3async.actors.run_setup import RunSetup
from r3async.actors.version_delivery import VersionDelivery
from r3async.actors.version_publisher import Published
from r3async.config import LoraConfig, config_to_dict, load_config
from r3async.data.write_sizes import UNKNOWN_SIZES
from r3async.learner import LearnerError
from r3async.learner.prepare import PreparedStep
from r3async.learner.trainer import StepOutcome, Trainer
from r3async.record.reading import read_json_objects
from r3async.weights.interfaces import TransferOffer
from r3async.weights.manifest import BASE_VERSION, AdapterFormat, WeightManifest
from r3async.world.real import REAL_WORLD, RealWorld
from tests.helpers import models as hm
from tests.helpers.parity import batch, config
from tests.helpers.world import StandIn

LIMIT = 20.0


@pytest.mark.parametrize("backend", ["megatron", "torch"])
def test_a_copy_is_not_changed_by_the_steps_that_are_made_before_it_is_written(tmp_path, backend):
    settings = config()
    settings.learner.backend = backend
    with contextlib.closing(LocalRank.load(settings, hm.make_hf_model(tmp_path / "model"))) as learner:
        learner.set_weight_transport("shared_memory")
        learner.snapshot_weights(0)
        before = load_file(tmp_path / "model" / "model.safetensors")
        learner.run_minibatches([[batch()]], version=0)
        with pytest.raises(LearnerError, match="version 0 has not been written: version 1 has to wait"):
            learner.snapshot_weights(1)
        first = load_file(learner.write_version().manifest.path)
        with pytest.raises(LearnerError, match="no snapshot"):
            learner.write_version()
        learner.snapshot_weights(1)
        second = load_file(learner.write_version().manifest.path)
    changed = 0
    for name, tensor in before.items():
        assert torch.equal(first[name], tensor.to(first[name].dtype)), name
        changed += not torch.equal(second[name], first[name])
    assert changed > len(before) // 2


def publication(version: int) -> TransferOffer:
    return TransferOffer(WeightManifest(version=version, path="", tensors={}, nbytes=0))


class Backend:
    """A learner whose `write_version` takes as long as the test wants; it says in which order things happened."""

    vocab_size, restarts, processes = 8, 0, ()

    def __init__(self) -> None:
        self.happened: list[str] = []
        self.may_write = threading.Semaphore(0)
        self.failure: Exception | None = None
        self._copied = -1

    def snapshot_weights(self, version: int) -> None:
        self.happened.append(f"copied {version}")
        self._copied = version

    def write_version(self, versions_in_use=()) -> TransferOffer:
        assert self.may_write.acquire(timeout=LIMIT)
        if self.failure is not None:
            raise self.failure
        self.happened.append(f"written {self._copied}")
        return publication(self._copied)

    def set_weight_transport(self, transport, sender_keys) -> None:
        pass

    def list_gpus(self) -> list[str]:
        return []

    def list_carried_tensors(self) -> tuple[str, ...]:
        return ("mtp.fc.weight",)

    def close(self) -> None:
        pass


def always(answer):
    async def call(*args):
        return answer

    return call


def nothing() -> SimpleNamespace:
    """In place of what is received: one group, always the same, of which nothing is trained."""
    group = [SimpleNamespace(trajectory_id="t", group_index=0, episode_index=0, task_seed=0, preview=None, turns=())]
    return SimpleNamespace(
        staleness_bound=0,
        routing=None,
        keys=None,
        keys_for_generators=None,
        start=always(""),
        close=always(None),
        wake_waiters=lambda: None,
        make_stand_in=lambda t: t,
        buffer=SimpleNamespace(
            take_groups=lambda indices: [group], episodes_of=lambda indices: [group], newest_group=-1
        ),
        wait_for_groups=always([0]),
        quarantine_rejected=always(None),
        release_trained=lambda indices: None,
        collect_metrics=dict,
    )


class OverlappedLearner(LearnerActor):
    """A learner that receives `nothing`."""

    @staticmethod
    def inbox_class(*args, **parts):
        return nothing()


@pytest.fixture
async def learner(tmp_path, monkeypatch, tiny_model):
    """A learner, in this process, whose steps train nothing and take no time."""
    settings = config_to_dict(load_config("quickstart", ["weights.probe=false"]))
    monkeypatch.setattr(r3async.actors.learner, "prepare_process", lambda *args: None)
    monkeypatch.setattr(r3async.actors.learner, "load_learner", lambda *args: Backend())
    monkeypatch.setattr(r3async.actors.learner, "check_staleness", lambda *args: None)
    monkeypatch.setattr(r3async.actors.learner, "compute_staleness_metrics", lambda *args: {})
    monkeypatch.setattr(Trainer, "prepare_step", lambda self, groups: PreparedStep(groups, [], [], [], {}, []))
    trained = {"optimizer/skipped": 0}
    monkeypatch.setattr(
        Trainer, "update_weights", lambda self, n, version, ready: StepOutcome(trained, ready.groups, [], [])
    )
    monkeypatch.setattr(r3async.actors.learner, "compute_episode_metrics", lambda trajectories: {})
    monkeypatch.setattr(r3async.actors.learner, "make_trained_step", lambda *args: {})
    actor = OverlappedLearner(REAL_WORLD, RunSetup("run", settings, str(tmp_path)), str(tiny_model))
    await actor.start()
    await actor.start_listening(None, "shared_memory")
    actor.components.version_publisher.write_seconds = LIMIT
    yield actor
    for _ in range(9):  # whatever is still written, it may be
        actor.model.ranks.may_write.release()
    await actor.stop()


async def test_the_first_version_of_adapters_alone_comes_with_the_start_model(learner):
    backend = learner.model.ranks
    learner.config.learner.lora = LoraConfig(rank=8, deliver="adapter")
    backend.may_write.release(3)
    first = await asyncio.wait_for(learner.publish_version(), LIMIT)
    assert backend.happened == ["copied -1", "written -1", "copied 0", "written 0"]
    base = first.base.manifest
    assert (base.version, base.adapter, first.version) == (BASE_VERSION, None, 0)
    await learner.run_step()
    later = await asyncio.wait_for(learner.write_version(), LIMIT)
    assert later.base is None
    for each in (first, later):
        assert each.publication.manifest.adapter == AdapterFormat(8, base.digest)


async def test_the_next_step_runs_while_a_version_is_written_and_the_one_after_it_waits(learner):
    backend = learner.model.ranks
    assert (await learner.run_step()).has_new_weights
    first = asyncio.create_task(learner.write_version())
    second_step = asyncio.create_task(learner.run_step())
    while learner.model.counts.steps < 2:  # noqa: ASYNC110 - it offers nothing to wait on
        await asyncio.sleep(0.01)
    await asyncio.sleep(0.1)
    assert backend.happened == ["copied 1"]
    assert not second_step.done()
    backend.may_write.release(2)
    written = await asyncio.wait_for(first, LIMIT)
    assert written.publication.manifest.carried == ("mtp.fc.weight",)
    result = await asyncio.wait_for(second_step, LIMIT)
    assert written.version == 1
    assert written.seconds > 0.1
    assert result.version == 2
    assert result.metrics["timing/snapshot_seconds"] > 0.05
    await asyncio.wait_for(learner.write_version(), LIMIT)
    assert backend.happened == ["copied 1", "written 1", "copied 2", "written 2"]


async def test_a_version_that_cannot_be_written_raises_and_holds_nothing_up(learner):
    learner.model.ranks.failure = ValueError("no such tensor")  # what a disk lacks is waited for
    await learner.run_step()
    learner.model.ranks.may_write.release()
    with pytest.raises(ValueError, match="no such tensor"):
        await asyncio.wait_for(learner.write_version(), LIMIT)
    assert (await asyncio.wait_for(learner.run_step(), LIMIT)).version == 2


async def test_a_version_that_is_not_written_in_time_is_named_with_the_setting(learner):
    learner.components.version_publisher.write_seconds = 0.1
    await learner.run_step()
    with pytest.raises(TimeoutError, match=r"version 2 has to wait for version 1, .* 0\.1 s \(supervise\.patience\)"):
        await asyncio.wait_for(learner.run_step(), LIMIT)


class RemoteLearner(StandIn):
    """Makes steps as fast as it is asked. Writing takes longer than a step, and `fails` at that version."""

    begin_checkpoint, finish_checkpoint, stop = always(0.0), always(None), always(None)
    get_status, publish_version = always(LearnerStatus()), always(Published(publication(0)))
    start = always({"pid": 5, "host": "here", "gpus": [], "rank_hosts": [], "sees_run": True, "written": UNKNOWN_SIZES})
    start_listening = always({"endpoint": "", "keys": None, "newest_group": -1})

    def __init__(self, fails: int = -1):
        self.fails = fails
        self.steps = 0
        self.written: list[int] = []

    async def run_step(self, is_last=False, with_probe_scores=False):
        while len(self.written) < self.steps - 1:  # noqa: ASYNC110 - one copy waits
            await asyncio.sleep(0.005)
        self.steps += 1
        metrics = {"batch/trained_tokens": 1, "transport/received": self.steps, "timing/wait_seconds": 0.0}
        return TrainStepResult(metrics, self.steps, has_new_weights=True, groups=[self.steps - 1])

    async def save_model(self, directory):
        return self.steps

    async def write_version(self, versions_in_use):
        version = len(self.written) + 1
        await asyncio.sleep(0.03)
        if version == self.fails:
            raise OSError(f"version {version} could not be written")
        self.written.append(version)
        return Published(publication(version), seconds=float(version))


class Player(StandIn):
    """A generator that plays until the run is over."""

    start = always({"pid": 6, "host": "here", "gpus": [], "tasks": (None,), "routing": None})
    stop = always(None)

    async def run(self, conductor):
        await asyncio.Event().wait()


class NoCluster(RealWorld):
    """A world whose actors are objects of this process."""

    def __init__(self):
        self.actors = SimpleNamespace(current_actor=StandIn, kill_actor=lambda actor: None)


@pytest.fixture
def conductor(tmp_path, monkeypatch):
    monkeypatch.setattr(r3async.actors.conductor, "prepare_process", lambda *args: None)
    settings = config_to_dict(load_config("quickstart", ["steps=5", "weights.probe=false", "routing.replay=off"]))
    return Conductor(NoCluster(), RunSetup("run", settings, str(tmp_path)), StandIn(), {"generator-0": Player()})


@pytest.fixture
def installer(conductor, monkeypatch):
    """Delivers what is published, in a while, to nobody."""
    fleet = conductor.fleet
    made = VersionDelivery(fleet, StandIn(), LearnerAddress("", ""), None, Published(publication(0)))
    installed = []

    async def deliver():
        version = made.newest_published.version
        await asyncio.sleep(0.02)
        installed.append(version)
        return {"timing/weight_update_seconds": 0.02}

    monkeypatch.setattr(made, "install_first_version", always(None))
    monkeypatch.setattr(made, "deliver_newest", deliver)
    monkeypatch.setattr(r3async.actors.conductor, "VersionDelivery", lambda *args, **parts: made)
    conductor.trained, conductor.freed = [], []
    monkeypatch.setattr(conductor.admission, "step_trained", lambda *pair: conductor.trained.append(pair))
    monkeypatch.setattr(conductor.admission, "version_published", conductor.freed.append)
    conductor.versions = installed
    return made


async def train(conductor, learner):
    conductor.learner = learner
    return (await asyncio.wait_for(conductor.run(), LIMIT))["steps"]


async def test_the_last_weights_are_delivered_and_every_step_has_its_row(conductor, installer, tmp_path):
    assert await train(conductor, RemoteLearner()) == 5
    assert conductor.versions[-1] == 5
    assert conductor.trained == [(version, [version - 1]) for version in range(1, 6)]
    assert conductor.freed == sorted(conductor.freed)
    assert conductor.freed[-1] == 5
    rows = read_json_objects(tmp_path / "metrics.jsonl")
    assert [r["step"] for r in rows] == [1, 2, 3, 4, 5]
    # What writing a version took is in the row of the step that ended next.
    written = [seconds for row in rows if (seconds := row.get("timing/weight_write_seconds")) is not None]
    assert written == sorted(set(written))
    assert set(written) <= {1, 2, 3, 4}


@pytest.mark.parametrize("version", [2, 5])
async def test_what_could_not_be_written_stops_the_training_with_its_reason(conductor, installer, version):
    with pytest.raises(RunFailed, match=f"OSError: version {version} could not be written"):
        await train(conductor, RemoteLearner(fails=version))


async def test_a_delivery_that_fails_after_the_last_step_is_not_passed_over(conductor, installer):
    async def deliver():
        if installer.newest_published.version == 5:
            raise RunFailed("tensor 'x' is corrupt")
        return {}

    installer.deliver_newest = deliver
    with pytest.raises(RunFailed, match="tensor 'x' is corrupt"):
        await train(conductor, RemoteLearner())
