"""The generator actor: an engine, many episodes at once, a sender, and weights that are installed meanwhile."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import msgspec
import numpy as np

from r3async.actors.away import ModelAt, bring_model, sees_run
from r3async.actors.delivery import receiver
from r3async.actors.leasing import Gate, Leasing
from r3async.actors.process import NotLoaded, begin, newest, once, together, whereabouts
from r3async.config import Config, EnvConfig, config_from_dict, environments, to_dict
from r3async.data.mixed import parted
from r3async.data.records import Trajectory
from r3async.envs import EnvironmentFactory
from r3async.envs.factory import environment_factory
from r3async.record.events import open_events
from r3async.record.routes import recording
from r3async.record.timeline import LagMeter, StageSeconds, Timeline, timed
from r3async.rollout.agents.agents import agent_player, is_agent
from r3async.rollout.chat import ChatRenderer
from r3async.rollout.engines import CorruptWeights, Engine, InstallReport, build_engine, sample_probe
from r3async.rollout.episode import EpisodeTask, failed_trajectory
from r3async.rollout.evaluation import drop_long_prompts, evaluate_all, task_counts
from r3async.rollout.group import GroupPlayer
from r3async.rollout.outcomes import Evaluation
from r3async.schedule.admission import GroupLease
from r3async.schedule.tasks import EpisodeEnd
from r3async.schedule.validation import refused, validate_trajectories
from r3async.transport.sender import Sender
from r3async.weights.manifest import Difference, WeightError, WeightManifest
from r3async.weights.probe import SampledProbe
from r3async.weights.publish import Publication, WeightReceiver
from r3async.world import ActorRef, World
from r3async.world.keys import ClientKeys, TransportError, generator_keys
from r3async.world.stages import begin_task, booked, stage

CLOSE_SECONDS = 5.0
STOP_SECONDS = 0.1
"""In which the tasks that play see that they are to end."""

T = TypeVar("T")


@dataclass(frozen=True)
class GeneratorParts:
    """What a generator plays with, and how it is made from the configuration: `engine(config, model_path, seed, world)`, not
    started; `renderer(model_path, template_args)`, in a thread; `environment(env)`; `sender`: see `Sender`, not started."""

    engine: Callable[[Config, str, int, World], Engine] = build_engine
    renderer: Callable[[str, Mapping[str, Any]], ChatRenderer] = ChatRenderer.from_model
    environment: Callable[[EnvConfig], EnvironmentFactory] = environment_factory
    sender: Callable[..., Sender] = Sender


class Loaded(NamedTuple):
    """What `start` loads."""

    engine: Engine
    renderer: ChatRenderer


class Connected(NamedTuple):
    """Where `connect` connects to: the learner, and the transport of its weights."""

    sender: Sender
    weights: WeightReceiver


class GeneratorActor:
    """Serves the conductor, which alone calls it. One process, one event loop.

    After a restart the process is new: `start`, `connect`, `install` and `run` are called again, in that order. So they are where
    a connection broke and the process lives: what it has loaded stays, and a `run` that goes on ends.
    """

    def __init__(
        self,
        world: World,
        generator_id: str,
        run_id: str,
        config: dict[str, Any],
        model_path: str | ModelAt,
        run_dir: str,
        lineage: int = 1,
        parts: GeneratorParts = GeneratorParts(),
    ):
        """`lineage`: of this start of the run, in which the versions of weights are counted."""
        self.world, self._lock = world, begin(world, Path(run_dir), generator_id)
        self.generator_id, self.run_id = generator_id, run_id
        self.config, self.model_path, self.run_dir = config_from_dict(config), model_path, Path(run_dir)
        self.lineage, self._parts = lineage, parts
        away, self._told = not sees_run(self.run_dir, lineage, world.files), list[bytes]()
        self._events = open_events(self.run_dir, generator_id, world=world, also=self._told.append if away else None)
        self._timeline = Timeline(self.run_dir, generator_id, enabled=self.config.observe.timeline, world=world)
        self._lag, self._stages = LagMeter(world.processes), StageSeconds("generator", world.processes)
        self._loaded: Loaded | None = None
        self._connected: Connected | None = None
        self._installed: WeightManifest | None = None
        """The weights that were installed last, as they are on this host."""
        self._factories: dict[bytes, EnvironmentFactory] = {}
        self._evaluations: list[asyncio.Task[Evaluation]] = []
        self._ended: list[EpisodeEnd] = []
        """Episodes that are over, and not reported to the conductor."""
        self._rejection = ""
        """Why the run cannot continue."""
        self._stopping = False
        self._wake: Callable[[], object] = lambda: None
        """Of the leasing that runs."""
        self._left: Counter[int] = Counter()
        """By group: episodes that were leased here and have not ended."""
        self._sending: dict[asyncio.Task[None], None] = {}

    def _ready(self, part: T | None) -> T:
        """A restarted process is not announced: what was asked of the one before it must not be answered."""
        if part is None:
            raise NotLoaded(
                f"{self.generator_id} was lost, and process {self.world.processes.pid} in its place is not set up yet"
            )
        return part

    @property
    def _engine(self) -> Engine:
        return self._ready(self._loaded).engine

    @property
    def _renderer(self) -> ChatRenderer:
        return self._ready(self._loaded).renderer

    @property
    def _sender(self) -> Sender:
        return self._ready(self._connected).sender

    # -- start and stop --------------------------------------------------------------------------------------------

    def whereabouts(self) -> dict[str, Any]:
        return whereabouts(self.world)

    @once
    async def start(self) -> dict[str, Any]:
        """Load engine and tokenizer at once. Returns what the conductor has to know; `tasks`: of the environment, if known."""
        config, threads = self.config, self.world.threads
        self._lag.start()
        seed = random.Random(f"{config.seed}/{self.generator_id}").getrandbits(31)  # of this generator and run alone
        path = await threads.run(bring_model, self.world, self.model_path, self.run_dir)
        engine = self._parts.engine(config, path, seed, self.world)
        self.world.processes.show_figures(lambda: {f"engine/{name}": value for name, value in engine.stats().items()})
        rendering = threads.run(self._parts.renderer, path, config.episode.template_args)
        self._loaded = Loaded(engine, (await together(engine.start(), rendering))[1])
        self._events.info("generator_started", **self.whereabouts(), engine=config.generator.engine)
        return {
            **self.whereabouts(),
            "gpus": getattr(engine, "gpus", []),
            "routing": msgspec.structs.asdict(engine.routing) if engine.routing else None,
            "tasks": await task_counts(await threads.run(self._factory, config.env)),
        }

    @once
    async def connect(self, endpoint: str, backend: str, keys: ClientKeys | None) -> None:
        """Connect to the learner, and to the transport of its weights (`delivery.receiver`). `keys`: see `generator_keys`."""
        self._ready(self._loaded)
        world, transport = self.world, self.config.transport
        known = generator_keys(transport, keys, world.files)
        share = f"{self.run_id}-{self.lineage}-{world.processes.host}"
        weights = await world.threads.run(receiver, self.config, backend, self.generator_id, share, known, world)
        make = partial(self._parts.sender, endpoint, self.generator_id, self.run_id, transport, keys=known)
        sender = make(validate=self._validate, on_reject=self._rejected, world=world)
        self._connected = Connected(sender, weights)
        await sender.start()

    async def stop(self) -> None:
        """Cancel what is playing, close the sender, shut the engine down."""
        self._lag.stop()
        for evaluation in self._evaluations:
            evaluation.cancel()
        self._stopping = True
        self._wake()
        await asyncio.sleep(STOP_SECONDS)
        if self._connected is not None:
            await self._connected.sender.close()
            await self._connected.weights.close()
        if self._loaded is not None:
            await self._loaded.engine.stop()
        await self.world.keeper.finish(CLOSE_SECONDS)

    async def dump_stacks(self, reason: str) -> str:
        """What this process is doing, to `stacks/GENERATOR.txt`."""
        return str(self.world.processes.dump_stacks(self.run_dir / "stacks" / f"{self.generator_id}.txt", reason))

    # -- weights ---------------------------------------------------------------------------------------------------

    async def install(self, publication: Publication) -> InstallReport:
        """Fetch and install published weights while episodes continue. A file that is not what was published is fetched again,
        once."""
        weights, clock = self._ready(self._connected).weights, self.world.clock
        if (of := publication.manifest.lineage) != self.lineage:
            raise WeightError(
                f"version {publication.manifest.version} is of lineage {of}, and {self.generator_id} is of {self.lineage}"
            )
        before, first = clock.monotonic(), self._engine.version < 0
        deadline = before + self.config.weights.install_seconds(publication.manifest.nbytes, first)
        left = lambda: max(0.0, deadline - clock.monotonic())  # noqa: E731
        with stage("install"):
            for last in (False, True):
                manifest = await weights.fetch(publication.manifest, publication.parts, left())
                self._installed = manifest
                fetched = clock.monotonic() - before
                try:
                    report = await self._engine.install(manifest, left())
                    break
                except CorruptWeights as error:
                    await weights.discard(manifest)
                    if last:
                        raise
                    self._events.warning("weights_fetched_again", version=manifest.version, error=str(error))
        ended = clock.time()
        self._timeline.add("pause", ended - report.pause_seconds, ended, version=manifest.version)
        self._wake()
        return msgspec.structs.replace(report, fetch_seconds=fetched)

    async def differences(self) -> list[Difference]:
        """Which tensors of the version that was installed last the engine does not hold; see `Engine.differences`."""
        manifest = self._ready(self._installed)
        return await self._engine.differences(
            manifest, self.config.weights.install_seconds(manifest.nbytes, first=True)
        )

    async def cached_from_older(self, token_ids: list[int]) -> int:
        """See `Engine.cached_from_older`."""
        return await self._engine.cached_from_older(np.asarray(token_ids, np.int32))

    async def score(self, token_ids: list[int]) -> np.ndarray:
        return await self._engine.score(np.asarray(token_ids, np.int32))

    async def sample_probe(self, token_ids: list[int]) -> SampledProbe:
        """See `engines.probing.sample_probe`, at the run's temperature."""
        return await sample_probe(self._engine, np.asarray(token_ids, np.int32), self.config.episode.temperature)

    def encode_probe(self, text: str) -> list[int]:
        return self._renderer.encode(text)

    # -- leases ----------------------------------------------------------------------------------------------------

    @newest
    async def run(self, conductor: ActorRef) -> None:
        """Lease episodes and play them until the conductor answers that nothing is left to play.

        All turns of an episode, and its retries, are played by one engine, this one. Raises `TransportError` if the learner
        rejects what stands for a failed episode: its group could never be complete.
        """
        config, posed = self.config, environments(self.config)
        self._left.clear()  # of a call before this one
        recorded = recording(self._engine, self.run_dir, self.generator_id, config, world=self.world)
        engine = Gate(timed(recorded, self._timeline))
        async with agent_player(
            config.env,
            engine,
            self._renderer,
            config.episode,
            config.serving,
            generator_id=self.generator_id,
            report=self._events.warning,
            directory=self.run_dir,
            world=self.world,
        ) as play:
            player = GroupPlayer(
                factory=self._factory(self.config.env),
                engine=engine,
                renderer=self._renderer,
                settings=self.config.episode,
                generator_id=self.generator_id,
                deliver=self._deliver,
                report=self._events.warning,
                play=play,
                over=self._over,
                clock=self.world.clock.time,
                limits=lambda seed: posed[parted(seed, len(posed))[0]].episode,
            )
            leasing = Leasing(
                config,
                self.world.clock.monotonic,
                engine,
                player,
                generator_id=self.generator_id,
                process=(self.world.processes.pid, self.world.processes.host),
                conductor=conductor,
                play=lambda lease: self._play(player, lease),
                ended=self._ended,
                told=self._told,
                load=lambda: self._load(player),
                check=self._raise_rejection,
            )
            self._wake = leasing.wake
            with stage("lease"):
                await leasing.run(lambda: self._stopping)
            await self._sender.flush(config.transport.ack_timeout)
            self._raise_rejection()
            await leasing.report()

    def _load(self, player: GroupPlayer) -> dict[str, float]:
        processes = self.world.processes
        return {
            "playing": player.playing,
            "ended": player.ended,
            "unacknowledged": self._sender.unacknowledged,
            "acknowledged": self._sender.acked,
            **{f"lag_{name}": value for name, value in self._lag.figures().items()},
            "cpu_seconds": (mine := processes.cpu_seconds()),
            "engine_cpu_seconds": processes.cpu_seconds(getattr(self._engine, "pids", ())) - mine,
            **self._stages.totals(),
        }

    def _over(self, end: EpisodeEnd) -> None:
        self._ended.append(end)
        self._wake()

    def _play(self, player: GroupPlayer, lease: GroupLease) -> Coroutine[Any, Any, None]:
        """What is still played here, or waits for its acknowledgement, is not played twice: this process was silent, its leases
        returned, and some came back to it."""
        new = []
        for index in lease.episode_indices:
            name = EpisodeTask(lease.group_index, index, lease.task_seed).trajectory_id
            if (lease.group_index, index) not in player.active and name not in self._sender:
                new.append(index)
        self._left[lease.group_index] += len(new)
        return booked("play", self._timed(player.play(msgspec.structs.replace(lease, episode_indices=tuple(new)))))

    async def _timed(self, playing: Coroutine[Any, Any, None]) -> None:
        with self._timeline.span("play"):
            await playing

    def _raise_rejection(self) -> None:
        if self._rejection:
            raise TransportError(self._rejection)

    # -- trajectories ----------------------------------------------------------------------------------------------

    async def _deliver(self, trajectory: Trajectory) -> None:
        """Send it, or what stands for it if the learner would not take it."""
        # The lineage of its versions: the engine has no others.
        trajectory = msgspec.structs.replace(trajectory, lineage=self.lineage)
        group = trajectory.group_index
        self._left[group] -= 1
        more = self._left[group] > 0
        if not more:
            del self._left[group]
        await self._sender.send(trajectory, more=more)

    def _validate(self, trajectories: Sequence[Trajectory]) -> dict[int, str]:
        """What the learner will ask of them, as far as that is known here."""
        engine, config = self._engine, self.config
        most, size = config.learner.max_tokens_per_micro_batch, config.schedule.samples_per_group
        known: dict[str, Any] = {"learner_version": engine.version, "max_tokens": most, "samples_per_group": size}
        check = partial(validate_trajectories, vocab_size=None, routing=engine.routing, **known)
        return {at: f"{self.generator_id} made it wrong: {error}" for at, error in refused(trajectories, check).items()}

    def _rejected(self, trajectory: Trajectory, reason: str) -> None:
        """The learner will never take it. Its group is trained without it, unless that happens too often (`Tasks`)."""
        name = trajectory.trajectory_id
        self._events.error("trajectory_rejected", trajectory_id=name, reason=reason)
        failure = f"the learner rejected trajectory {name}: {reason}"
        if not trajectory.turns:  # what stands for a failed episode
            self._rejection = failure
            self._wake()
            return
        task = EpisodeTask(trajectory.group_index, trajectory.episode_index, trajectory.task_seed)
        self._over(EpisodeEnd(task.group_index, task.episode_index, task.task_seed, "learner", failure))
        routing, end_id, now = self._engine.routing, self._renderer.end_id, self.world.clock.time()
        instead = failed_trajectory(task, routing, end_id, generator_id=self.generator_id, at=now)
        sending = asyncio.create_task(self._sender.send(msgspec.structs.replace(instead, lineage=self.lineage)))
        self._sending[sending] = None
        sending.add_done_callback(self._sending.pop)

    # -- environments ----------------------------------------------------------------------------------------------

    def _factory(self, env: EnvConfig) -> EnvironmentFactory | None:
        """One for each environment, however often it is played: it may own processes. None for an agent."""
        if is_agent(env):
            return None
        key = msgspec.json.encode(to_dict(env, reveal=True))
        if key not in self._factories:
            self._factories[key] = factory = self._parts.environment(env)
            drop_long_prompts(factory, self._renderer, self.config.episode)
        return self._factories[key]

    async def evaluate(self) -> dict[str, Any]:
        """Play the tasks of `[evaluation]` beside the leases; nothing of it is sent to the learner. Returns an `Evaluation`.

        Raises what an episode failed with, after its retries, and `TimeoutError` after `evaluation.timeout`.
        """
        threads, telling = self.world.threads, self._events.warning
        known: dict[str, Any] = {"generator_id": self.generator_id, "report": telling, "world": self.world}
        given = self.config, lambda env: threads.run(self._factory, env), self._engine, self._renderer
        evaluating = evaluate_all(*given, trained=self.config.env, **known)
        playing = begin_task("evaluation", evaluating)
        self._evaluations.append(playing)
        try:
            return msgspec.to_builtins(await asyncio.wait_for(playing, self.config.evaluation.timeout))
        except TimeoutError as error:
            limit = self.config.evaluation.timeout
            raise TimeoutError(f"it took longer than evaluation.timeout = {limit} s") from error
        finally:
            self._evaluations.remove(playing)
