"""Stand-ins for generators, and the conductor's parts that know them."""

import asyncio
import contextlib

import numpy as np
import pytest

from r3async.actors.fleet import Fleet, LearnerAddress
from r3async.actors.generator_supervisor import GeneratorSupervisor
from r3async.actors.lease_dispatcher import LeaseDispatcher
from r3async.actors.version_delivery import VersionDelivery
from r3async.actors.version_publisher import Published
from r3async.config import ScheduleConfig, load_config
from r3async.rollout.engine import InstallReport
from r3async.schedule.run_ahead import AdmissionController
from r3async.weights.interfaces import TransferOffer
from r3async.weights.manifest import WeightManifest
from r3async.weights.probe import SampledProbe
from tests.helpers.world import Clock, Outside, StandIn

TOKENS = list(range(40))
SETTINGS = [
    "weights.probe_every=3",
    "generator.max_restarts=2",
    "supervise.silence_seconds=10",
    "supervise.restart_backoff=0.02",
]


class Events:
    def __init__(self):
        self.seen = []

    def info(self, event, **facts):
        self.seen.append((event, facts))

    warning = error = info

    def names(self):
        return [event for event, _ in self.seen]

    def facts(self, name):
        """Return the facts of each event of this name."""
        return [facts for event, facts in self.seen if event == name]


def scores(version: int) -> np.ndarray:
    return np.full(len(TOKENS) - 1, -1.0 - version, np.float32)


def sampled(reported: float) -> SampledProbe:
    """Return a probe sampled after the first token of the text; at temperature 1, `reported` is what the engine
    scores."""
    return SampledProbe(*(np.asarray([x]) for x in (1, 5)), np.asarray([reported]), np.asarray([-2.0]))


def published(version: int) -> Published:
    """Return a published version whose two texts score the same, at both temperatures."""
    return Published(TransferOffer(WeightManifest(version, "", {}, 0)), np.tile(scores(version), (2, 2, 1)))


class Generator(StandIn):
    """A stand-in for a generator actor.

    Attributes:
        wrong: by method, what it answers or raises instead, or a function of the method's arguments that returns that.
        lives: True if its process outlives losses.
    """

    def __init__(self) -> None:
        self.calls: list[tuple] = []
        self.version = -1
        self.may_install = asyncio.Event()
        self.may_install.set()
        self.wrong: dict = {}
        self.lives = False

    async def answer(self, name: str, *args):
        if name == "install_version":
            version = args[0].manifest.version
            self.calls.append((name, version))
            await self.may_install.wait()
            self.version = version
        else:
            self.calls.append((name,))
        answers = {
            "install_version": InstallReport(self.version, 0.2, 0.1, load_seconds=0.05, verify_seconds=0.02),
            "encode_probe": TOKENS,
            "count_stale_cached_tokens": 0,
            "score_tokens": scores(self.version),
            "sample_probe": sampled(-2.0),
            "start": {"pid": 7 if self.lives else 6 + len(self.asked("start")), "host": "here", "gpus": []},
            "connect_to_learner": None,
            "describe_process": None,
            "find_weight_differences": [],
            "run": None,
        }
        answer = self.wrong.get(name, answers[name])
        if callable(answer):
            answer = answer(*args)
        if isinstance(answer, BaseException):
            raise answer
        return answer

    def asked(self, name: str) -> list:
        return [call for call in self.calls if call[0] == name]


class Learner(StandIn):
    """A learner that scores the probe's text as long as it has not trained on: its newest version is `version`."""

    version = 0

    def __init__(self) -> None:
        self.kept: list[int] = []
        self.disk_is_full = False

    async def save_failed_version(self, manifest: WeightManifest) -> None:
        if self.disk_is_full:
            raise OSError("the disk is full")
        self.kept.append(manifest.version)

    async def score_probe(self, version: int) -> np.ndarray | None:
        return published(version).scores if version == self.version else None


def outside() -> Outside:
    """Return the world of a fleet, at second 100 of its clock."""
    clock = Clock()
    clock.now = 100.0
    return Outside(clock)


async def loaded(handles, first: Published | None = None, *overrides: str, world: Outside | None = None):
    """Return an installer whose generators have engines, but no weights; version 0 is `first`."""
    config, world = load_config("quickstart", [*SETTINGS, *overrides]), world or outside()
    fleet = Fleet(config, Events(), handles, world.clock.monotonic)
    await fleet.load_engines()
    tokens = await fleet.encode_probe_text()
    assert tokens == TOKENS
    way = LearnerAddress("tcp://learner", "shared_memory")
    return VersionDelivery(fleet, Learner(), way, tokens, first or published(0), world)


def supervisor(installer, world: Outside | None = None, stop_requested: asyncio.Event | None = None):
    """Return the supervisor of the installer's generators, which were leased nothing."""
    world, fleet, stop_requested = world or outside(), installer.fleet, stop_requested or asyncio.Event()
    admission = AdmissionController(ScheduleConfig(), choose_task=lambda group: 0)

    async def missing_episodes(groups):
        return {}

    dispatcher = LeaseDispatcher(admission, fleet, StandIn(missing_episodes=missing_episodes), stop_requested)
    made = GeneratorSupervisor(world, fleet.config, fleet.events, fleet, dispatcher, stop_requested)
    made.begin_supervision(installer, StandIn(), {}, set())
    return made


@contextlib.contextmanager
def playing_on(handle, begun: asyncio.Event):
    """Let a generator play for as long as the block takes. When it has begun, `begun` is set."""
    answer = handle.answer

    async def play(name: str, *args):
        if name == "run":
            begun.set()
            await asyncio.Event().wait()
        return await answer(name, *args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(handle, "answer", play)
        yield


async def revive(installer, generator):
    """Run the supervisor of all generators until the lost one plays again. Raises what the run ends with."""
    begun = asyncio.Event()
    with contextlib.ExitStack() as stack:
        for each in installer.fleet:
            stack.enter_context(playing_on(each.handle, begun if each is generator else asyncio.Event()))
        tasks = [asyncio.create_task(supervisor(installer).run()), asyncio.create_task(begun.wait())]
        try:
            ended, _ = await asyncio.wait(tasks, timeout=120, return_when=asyncio.FIRST_COMPLETED)
            assert ended, "it plays again, or the run ends"
            await ended.pop()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


async def restart(installer, generator):
    """Lose a generator, and have it restarted."""
    generator.health.mark_lost()
    await revive(installer, generator)


async def deliver(installer, version):
    installer.newest_published = published(version)
    return await installer.deliver_newest()
