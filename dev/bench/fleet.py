"""The fleet around a real conductor in `bench conductor`: generators and a learner without
engines and training.

Generators call the conductor with the code of a run, but their episodes only take time; the learner
only counts. Many generators share a process.
"""

from __future__ import annotations

import asyncio
import math
import random
from collections import Counter
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

import msgspec

from r3async.actors.learner import LearnerStatus, TrainStepResult
from r3async.actors.lease_client import LeaseClient, VersionGate
from r3async.actors.process import describe_process
from r3async.actors.version_publisher import Published
from r3async.config import Config, config_from_dict
from r3async.data.consumed_groups import ConsumedGroups
from r3async.data.write_sizes import UNKNOWN_SIZES
from r3async.record.process_time import LagMeter
from r3async.rollout.engine import InstallReport
from r3async.rollout.scripted import SCRIPTED_ROUTING
from r3async.schedule.run_ahead import GroupLease
from r3async.schedule.task_failures import EpisodeEnd
from r3async.weights.interfaces import TransferOffer
from r3async.weights.manifest import TensorEntry, WeightManifest
from r3async.world import ActorRef, World

REPORT_SECONDS = 0.25
"""Minimum seconds between two messages of a generator process to the learner."""
PAUSE_SECONDS = 0.05


class ConductorLoad(msgspec.Struct, frozen=True):
    """The load on the conductor.

    Generators play episodes in groups. A version is made by a step of a quarter of the groups that
    the generators can play at once, so that a generator's places are rarely empty.

    Attributes:
        places: episodes that each generator plays at once.
        episode_seconds: mean duration of an episode (log-normal with `sigma`).
        tensors: number of tensors of a version.
        warm_up: seconds before the measurement.
        seconds: seconds of the measurement.
        processes: number of processes among which the generators are divided.
    """

    generators: int
    places: int = 64
    group_size: int = 8
    episode_seconds: float = 45.0
    sigma: float = 0.5
    tensors: int = 435
    warm_up: float = 20.0
    seconds: float = 60.0
    processes: int = 4

    @property
    def overrides(self) -> list[str]:
        """The overrides of the run's configuration."""
        groups = max(1, self.generators * self.places // self.group_size // 4)
        return [
            f"generator.count={self.generators}",
            f"generator.concurrency={self.places}",
            f"schedule.group_size={self.group_size}",
            f"schedule.prompts_per_step={groups}",
            f"schedule.window={2 * groups}",
            "schedule.max_staleness=12",
            "steps=1000000",
            "checkpoint.every_steps=0",
            "checkpoint.every_minutes=0",
            "weights.probe=false",
            "observe.timeline=false",
        ]


class CallCounts(msgspec.Struct):
    """Counters of one process of generators since its start.

    Attributes:
        leases: calls of generators to the conductor.
        asked: calls of the conductor to generators.
        busy: seconds, summed over the places that had an episode.
        ended: episodes that ended.
    """

    leases: int = 0
    asked: int = 0
    busy: float = 0.0
    ended: int = 0


class _WaitingEngine:
    """A generator's engine, reduced to its version and its statistics."""

    def __init__(self, player: _WaitingPlayer):
        self._player = player
        self.tokens = 0
        self.version = -1

    def collect_stats(self) -> dict[str, float]:
        running = self._player.playing_count
        return {
            "generated_tokens": self.tokens,
            "running": running,
            "waiting": 0,
            "preemptions": 0,
            "aborted": 0,
            "restarted": 0,
            "kv_cache_usage": 0.9 * running / self._player.load.places,
            "pause_seconds": 0.0,
        }


class _WaitingPlayer:
    """A player whose leases only wait.

    The first episodes count as partly played already, as if the run had begun long ago.
    """

    def __init__(
        self,
        load: ConductorLoad,
        rng: random.Random,
        clock: Callable[[], float],
        on_episode_end: Callable[[EpisodeEnd], None],
    ):
        self.load = load
        self._rng = rng
        self._clock = clock
        self._on_episode_end = on_episode_end
        self._mu = math.log(load.episode_seconds) - load.sigma**2 / 2
        self._begun_before = load.places
        self._at = clock()
        self.playing_count = self.attempt_count = 0
        self.busy = 0.0

    def play_lease(self, lease: GroupLease) -> Coroutine[Any, Any, None]:
        self.count_playing(len(lease.episode_indices))
        return self._play_episodes(lease)

    def count_playing(self, more: int = 0) -> None:
        """Play `more` additional episodes from now on, and update the busy time."""
        now = self._clock()
        self.busy += self.playing_count * (now - self._at)
        self._at = now
        self.playing_count += more

    async def _play_episodes(self, lease: GroupLease) -> None:
        began = self._clock()
        for seconds, index in sorted(
            (self._draw_seconds(), index) for index in lease.episode_indices
        ):
            await asyncio.sleep(max(0.0, began + seconds - self._clock()))
            self.count_playing(-1)
            self.attempt_count += 1
            self._on_episode_end(EpisodeEnd(lease.group_index, index, lease.task_seed))

    def _draw_seconds(self) -> float:
        seconds = self._rng.lognormvariate(self._mu, self.load.sigma)
        if self._begun_before > 0:
            self._begun_before -= 1
            seconds *= self._rng.random()
        return seconds


class _CountingRef:
    """A handle on the conductor that counts the calls to it."""

    def __init__(self, conductor: ActorRef, counts: CallCounts):
        self.name = conductor.name
        self._conductor = conductor
        self._counts = counts

    async def call(
        self, method: str, *args: Any, timeout: float | None = None, **kwargs: Any
    ) -> Any:
        self._counts.leases += 1
        return await self._conductor.call(method, *args, timeout=timeout, **kwargs)


class _FakeGenerator:
    """A generator in the place of `GeneratorActor`. It calls `report(group)` whenever an episode
    of the group ends."""

    def __init__(
        self,
        world: World,
        config: Config,
        load: ConductorLoad,
        name: str,
        report: Callable[[int], None],
        counts: CallCounts,
    ):
        self._world = world
        self._config = config
        self._name = name
        self._report = report
        self._counts = counts
        clock = world.clock.monotonic
        self.player = _WaitingPlayer(load, random.Random(name), clock, self._end_episode)
        self._engine = _WaitingEngine(self.player)
        self._ended = list[EpisodeEnd]()
        self._woken = asyncio.Event()

    def start(self) -> dict[str, Any]:
        return {
            **describe_process(self._world),
            "gpus": [],
            "routing": msgspec.structs.asdict(SCRIPTED_ROUTING),
            "tasks": (None,),
        }

    def connect_to_learner(self, *args: Any) -> None:
        pass

    async def install_version(self, publication: TransferOffer) -> InstallReport:
        await asyncio.sleep(PAUSE_SECONDS)
        self._engine.version = publication.manifest.version
        self._woken.set()
        return InstallReport(publication.manifest.version, PAUSE_SECONDS, 0.0)

    def stop(self) -> None:
        pass

    def _end_episode(self, end: EpisodeEnd) -> None:
        self._engine.tokens += 1000
        self._ended.append(end)
        self._report(end.group_index)
        self._woken.set()

    def _sender_load(self) -> dict[str, float]:
        lags = dict.fromkeys((f"lag_{name}" for name in LagMeter.METRIC_NAMES), 0.0)
        counters = {"unacknowledged": 0, "acknowledged": self.player.attempt_count}
        return {"ended": self.player.attempt_count, **counters, **lags}

    async def run(self, conductor: ActorRef) -> None:
        gate = VersionGate(self._engine, self._woken)  # type: ignore[arg-type]
        leasing = LeaseClient(
            self._config,
            self._world.clock.monotonic,
            gate,
            generator_id=self._name,
            process=(self._world.processes.pid, self._world.processes.host),
            conductor=_CountingRef(conductor, self._counts),
            woken=self._woken,
        )
        playing = set[asyncio.Task[None]]()
        while leasing.has_more or playing:
            leasing.playing_count = self.player.playing_count
            if leasing.is_call_due:
                ended = self._ended
                self._ended = []
                leasing.begin_call(self._sender_load(), ended, [])
            await leasing.wait_for_change()
            gate.release_ready()
            for lease in leasing.take_leases():
                task = asyncio.create_task(self.player.play_lease(lease))
                playing.add(task)
                task.add_done_callback(playing.discard)


class GeneratorHost:
    """An actor that hosts the generators of one process. It reports episodes to the learner, as
    their trajectories would."""

    def __init__(
        self,
        world: World,
        config: dict[str, Any],
        load: ConductorLoad,
        names: Sequence[str],
        learner: ActorRef,
    ):
        self._learner = learner
        self._counts = CallCounts()
        self._ended: Counter[int] = Counter()
        made = config_from_dict(config)
        self._generators = {
            name: _FakeGenerator(world, made, load, name, self._episode_over, self._counts)
            for name in names
        }
        self._reporting: asyncio.Task[None] | None = None

    async def call_generator(self, name: str, method: str, *args: Any) -> Any:
        """Call a method of a generator."""
        self._counts.asked += 1
        answer = getattr(self._generators[name], method)(*args)
        return await answer if asyncio.iscoroutine(answer) else answer

    def collect_counts(self) -> CallCounts:
        players = [g.player for g in self._generators.values()]
        for player in players:
            player.count_playing()
        self._counts.busy = sum(p.busy for p in players)
        self._counts.ended = sum(p.attempt_count for p in players)
        return self._counts

    def _episode_over(self, group: int) -> None:
        self._ended[group] += 1
        if self._reporting is None or self._reporting.done():
            self._reporting = asyncio.create_task(self._report_episodes())

    async def _report_episodes(self) -> None:
        while self._ended:
            await asyncio.sleep(REPORT_SECONDS)
            ended = self._ended
            self._ended = Counter()
            await self._learner.call("add_episodes", dict(ended))


class HostedRef:
    """A handle on one of a host's generators."""

    def __init__(self, name: str, host: ActorRef):
        self.name = name
        self._host = host

    async def call(
        self, method: str, *args: Any, timeout: float | None = None, **kwargs: Any
    ) -> Any:
        return await self._host.call(
            "call_generator", self.name, method, *args, timeout=timeout, **kwargs
        )


class CountingLearner:
    """An actor in the place of `LearnerActor`: a group is complete when its episodes have ended,
    and steps take no time."""

    def __init__(self, world: World, config: dict[str, Any], load: ConductorLoad):
        self._world = world
        self._config = config_from_dict(config)
        self._load = load
        self._consumed = ConsumedGroups(self._config.schedule.window)
        self._arrived = Counter[int]()
        self._changed = asyncio.Event()
        self._steps = self._received = self.asked = 0

    def collect_counts(self) -> tuple[int, int, int]:
        """Return the number of calls from the conductor, of ended episodes and of steps."""
        return self.asked, self._received, self._steps

    def add_episodes(self, episodes: dict[int, int]) -> None:
        """Add the number of ended `episodes` of each group."""
        for group, count in episodes.items():
            self._arrived[group] += count
            self._received += count
        self._changed.set()

    def _is_complete(self, group: int) -> bool:
        return self._arrived[group] == self._load.group_size

    # -- called by the conductor -------------------------------------------------------------------

    def start(self) -> dict[str, Any]:
        self.asked += 1
        return {
            **describe_process(self._world),
            "gpus": [],
            "rank_hosts": [],
            "written": UNKNOWN_SIZES,
        }

    def start_listening(self, *args: Any) -> dict[str, Any]:
        self.asked += 1
        return {"endpoint": "", "keys": None, "newest_group": -1}

    def publish_version(self) -> Published:
        return self.write_version()

    def write_version(self, versions_in_use: Sequence[int] = ()) -> Published:
        """Return a version with tensor names and checksums, but without contents."""
        self.asked += 1
        entry = TensorEntry("BF16", (2048, 768), 2**62)
        tensors = {
            f"model.layers.{i}.mlp.experts.down_proj.weight": entry
            for i in range(self._load.tensors)
        }
        return Published(TransferOffer(WeightManifest(self._steps, "", tensors, nbytes=0)))

    async def run_step(self, is_last: bool, with_probe_scores: bool) -> TrainStepResult:
        self.asked += 1
        clock = self._world.clock.monotonic
        groups = self._config.schedule.prompts_per_step
        began = clock()
        chosen: list[int] = []
        while len(chosen) < groups:
            group = next(filter(self._is_complete, self._consumed.groups_in_window()), None)
            if group is None:
                self._changed.clear()
                await self._changed.wait()
            else:
                self._consumed.add(group)
                chosen.append(group)
        for group in chosen:
            del self._arrived[group]
        self._steps += 1
        waited = clock() - began
        metrics = {
            "transport/received": self._received,
            "timing/wait_seconds": waited,
            "batch/trained_tokens": 0,
        }
        return TrainStepResult(metrics, self._steps, has_new_weights=True, groups=chosen)

    def missing_episodes(self, groups: list[int]) -> dict[int, list[int]]:
        self.asked += 1
        return {group: [] for group in groups}

    def get_status(self) -> LearnerStatus:
        self.asked += 1
        process = describe_process(self._world)
        return LearnerStatus(**process, doing="waiting", steps=self._steps, received=self._received)

    def interrupt_wait(self) -> None:
        self.asked += 1

    def stop(self) -> None:
        self.asked += 1
