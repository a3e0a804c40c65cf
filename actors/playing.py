"""A generator at work: leases played, their trajectories sent, and weights installed meanwhile."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from r3async.actors.leasing import Leasing
from r3async.actors.process import NotLoaded
from r3async.config import Config, EnvConfig, to_dict
from r3async.data.records import Trajectory
from r3async.envs.base import EnvironmentFactory
from r3async.envs.factory import environment_factory
from r3async.record.timeline import LagMeter, Timeline, timed
from r3async.record.tracing import recording
from r3async.rollout.agents.agents import is_agent
from r3async.rollout.agents.runner import Play, agent_player
from r3async.rollout.agents.tasks import evaluated
from r3async.rollout.chat import ChatRenderer
from r3async.rollout.engines.base import Engine, InstallReport
from r3async.rollout.engines.build import build_engine
from r3async.rollout.episode import EpisodeTask, failed_trajectory
from r3async.rollout.evaluation import Evaluation, evaluate
from r3async.rollout.group import GroupPlayer
from r3async.schedule.admission import GroupLease
from r3async.schedule.failures import EpisodeEnd
from r3async.schedule.validation import InvalidTrajectory, validate_trajectory
from r3async.transport.intake import TOKEN_BYTES
from r3async.transport.sender import Sender
from r3async.transport.sockets import TransportError, off_loop
from r3async.weights.manifest import Difference, WeightManifest
from r3async.weights.publish import WeightError
from r3async.weights.transport import Publication, WeightReceiver
from r3async.world import ActorRef, World


@dataclass(frozen=True)
class GeneratorParts:
    """What a generator plays with, and how it is made from the configuration: `engine(config, model_path, seed, clock)`, not
    started; `renderer(model_path, template_args)`, in a thread; `environment(env)`."""

    engine: Callable[[Config, str, int, Callable[[], float]], Engine] = build_engine
    renderer: Callable[[str, Mapping[str, Any]], ChatRenderer] = ChatRenderer.from_model
    environment: Callable[[EnvConfig], EnvironmentFactory] = environment_factory


@dataclass(frozen=True)
class Context:
    """What every part of one generator knows. `lineage`: in which the versions of its weights are counted. `events`: a structlog
    logger."""

    world: World
    config: Config
    run_id: str
    run_dir: Path
    generator_id: str
    lineage: int
    events: Any
    timeline: Timeline
    lag: LagMeter


@dataclass
class Loaded:
    """Engine and tokenizer, and the environments that were played. `make_environment`: see `GeneratorParts`."""

    context: Context
    engine: Engine
    renderer: ChatRenderer
    make_environment: Callable[[EnvConfig], EnvironmentFactory] = environment_factory
    _factories: dict[bytes, EnvironmentFactory] = field(default_factory=dict, init=False)
    _evaluations: list[asyncio.Task[Evaluation]] = field(default_factory=list, init=False)

    def factory(self, env: EnvConfig) -> EnvironmentFactory | None:
        """One for each environment, however often it is played: it may own processes. None for an agent."""
        if is_agent(env):
            return None
        key = msgspec.json.encode(to_dict(env, reveal=True))
        if key not in self._factories:
            self._factories[key] = self.make_environment(env)
        return self._factories[key]

    async def evaluate(self) -> dict[str, Any]:
        """See `GeneratorActor.evaluate`."""
        context, config = self.context, self.context.config
        settings, env = config.evaluation, evaluated(config)
        playing = asyncio.create_task(
            evaluate(
                env,
                self.factory(env),
                self.engine,
                self.renderer,
                config.episode,
                config.serving,
                episodes=settings.episodes,
                seed=settings.seed,
                trained=config.env,
                concurrency=config.generator.concurrency,
                generator_id=context.generator_id,
                report=context.events.warning,
                world=context.world,
            )
        )
        self._evaluations.append(playing)
        try:
            return msgspec.to_builtins(await asyncio.wait_for(playing, settings.timeout))
        except TimeoutError as error:
            raise TimeoutError(f"it took longer than evaluation.timeout = {settings.timeout} s") from error
        finally:
            self._evaluations.remove(playing)

    def give_evaluations_up(self) -> None:
        for playing in self._evaluations:
            playing.cancel()

    def check(self, trajectory: Trajectory) -> None:
        """What the learner will ask of it, as far as that is known here. Raises `InvalidTrajectory`."""
        config = self.context.config
        validate_trajectory(
            trajectory,
            vocab_size=None,
            learner_version=self.engine.version,
            max_tokens=config.learner.max_tokens_per_micro_batch,
            routing=self.engine.routing,
            samples_per_group=config.schedule.samples_per_group,
        )


class Playing:
    """Plays what the conductor leases, and sends it to the learner. `make_sender(on_reject)`: makes the sender, not started.
    `weights`: by which versions come."""

    def __init__(
        self,
        loaded: Loaded,
        make_sender: Callable[[Callable[[Trajectory, str], None]], Sender],
        weights: WeightReceiver,
    ):
        self.loaded, self.weights, self.sender = loaded, weights, make_sender(self._rejected)
        self._context, self._config, self._world = loaded.context, loaded.context.config, loaded.context.world
        self._installed: WeightManifest | None = None
        """The weights that were installed last, as they are on this host."""
        self._ended: list[EpisodeEnd] = []
        """Episodes that are over, and of which the conductor was not told."""
        self._rejection = ""
        """Why the run can not go on."""
        self._stopping = False
        self._wake: Callable[[], object] = lambda: None
        """Tell whoever plays leases."""
        self._sending: dict[asyncio.Task[None], None] = {}

    # -- weights ---------------------------------------------------------------------------------------------------

    async def install(self, publication: Publication) -> InstallReport:
        """Fetch and install published weights while episodes go on."""
        context, clock = self._context, self._world.clock
        if (of := publication.manifest.lineage) != context.lineage:
            raise WeightError(
                f"version {publication.manifest.version} is of lineage {of}, and {context.generator_id} is of "
                f"{context.lineage}"
            )
        limit, before = self._config.weights.install_timeout, clock.monotonic()
        fetching = self._world.threads.run(self.weights.fetch, publication.manifest, publication.parts, limit)
        self._installed = manifest = await fetching
        fetched = clock.monotonic() - before
        report = await self.loaded.engine.install(manifest, max(0.0, limit - fetched))
        ended = clock.time()
        context.timeline.add("pause", ended - report.pause_seconds, ended, version=manifest.version)
        return msgspec.structs.replace(report, fetch_seconds=fetched)

    async def differences(self) -> list[Difference]:
        """Which tensors of the version that was installed last the engine does not hold; see `Engine.differences`."""
        if self._installed is None:
            raise NotLoaded(f"{self._context.generator_id} has no weights yet")
        return await self.loaded.engine.differences(self._installed, self._config.weights.install_timeout)

    # -- trajectories ----------------------------------------------------------------------------------------------

    async def deliver(self, trajectory: Trajectory) -> None:
        """Send it, or what stands for it if the learner would not take it."""
        trajectory = self._named(trajectory)
        try:
            await off_loop(self._world.threads, trajectory.tokens * TOKEN_BYTES, self.loaded.check, trajectory)
        except InvalidTrajectory as error:  # the learner would say the same
            self._rejected(trajectory, f"{self._context.generator_id} made it wrong: {error}")
        else:
            await self.sender.send(trajectory)

    def _named(self, trajectory: Trajectory) -> Trajectory:
        """With the lineage of its versions: the engine has no weights of another one."""
        return msgspec.structs.replace(trajectory, lineage=self._context.lineage)

    def _rejected(self, trajectory: Trajectory, reason: str) -> None:
        """The learner will never take it. Its group is trained without it, unless that happens too often (`Tasks`)."""
        name, context = trajectory.trajectory_id, self._context
        context.events.error("trajectory_rejected", trajectory_id=name, reason=reason)
        said = f"the learner rejected trajectory {name}: {reason}"
        if not trajectory.turns:  # what stands for a failed episode
            self._rejection = said
            self._wake()
            return
        task = EpisodeTask(trajectory.group_index, trajectory.episode_index, trajectory.task_seed)
        self._over(EpisodeEnd(task.group_index, task.episode_index, task.task_seed, "learner", said))
        routing, end_id, now = self.loaded.engine.routing, self.loaded.renderer.end_id, self._world.clock.time()
        instead = failed_trajectory(task, routing, end_id, generator_id=context.generator_id, at=now)
        sending = asyncio.create_task(self.sender.send(self._named(instead)))
        self._sending[sending] = None
        sending.add_done_callback(self._sending.pop)

    # -- leases ----------------------------------------------------------------------------------------------------

    async def run(self, conductor: ActorRef) -> None:
        """See `GeneratorActor.run`."""
        context, config, loaded = self._context, self._config, self.loaded
        engine = recording(loaded.engine, context.run_dir, context.generator_id, config, world=self._world)
        engine = timed(engine, context.timeline)
        async with agent_player(
            config.env,
            engine,
            loaded.renderer,
            config.episode,
            config.serving,
            generator_id=context.generator_id,
            report=context.events.warning,
            directory=context.run_dir,
            world=self._world,
        ) as play:
            await self._play_leases(conductor, engine, play)

    async def _play_leases(self, conductor: ActorRef, engine: Engine, play: Play | None) -> None:
        player = self._player(engine, play)

        leasing = Leasing(
            self._config,
            self._world.clock.monotonic,
            engine,
            player,
            generator_id=self._context.generator_id,
            conductor=conductor,
            play=lambda leased: self._play_lease(player, leased),
            ended=self._ended,
            load=lambda: self._load(player),
            check=self._raise_rejection,
        )
        self._wake = leasing.wake
        await leasing.run(lambda: self._stopping)
        await self.sender.flush(self._config.transport.ack_timeout)
        self._raise_rejection()
        await leasing.tell()

    def _player(self, engine: Engine, play: Play | None) -> GroupPlayer:
        return GroupPlayer(
            factory=self.loaded.factory(self._config.env),
            engine=engine,
            renderer=self.loaded.renderer,
            settings=self._config.episode,
            generator_id=self._context.generator_id,
            deliver=self.deliver,
            report=self._context.events.warning,
            play=play,
            over=self._over,
            clock=self._world.clock.time,
        )

    def _load(self, player: GroupPlayer) -> dict[str, float]:
        lags = {f"lag_{name}": value for name, value in self._context.lag.figures().items()}
        return {
            "playing": player.playing,
            "ended": player.ended,
            "unacknowledged": self.sender.unacknowledged,
            "acknowledged": self.sender.acked,
            **lags,
        }

    def _over(self, end: EpisodeEnd) -> None:
        self._ended.append(end)
        self._wake()

    def _play_lease(self, player: GroupPlayer, lease: GroupLease) -> Coroutine[Any, Any, None]:
        """What is played here still, or waits for its acknowledgement, is not played twice: this process was silent, its leases
        returned, and some came back to it."""
        new = []
        for index in lease.episode_indices:
            name = EpisodeTask(lease.group_index, index, lease.task_seed).trajectory_id
            if (lease.group_index, index) not in player.active and name not in self.sender:
                new.append(index)
        return self._timed(player.play(msgspec.structs.replace(lease, episode_indices=tuple(new))))

    async def _timed(self, playing: Coroutine[Any, Any, None]) -> None:
        with self._context.timeline.span("play"):
            await playing

    def _raise_rejection(self) -> None:
        if self._rejection:
            raise TransportError(self._rejection)

    def stop(self) -> None:
        """Give up what is played."""
        self._stopping = True
        self._wake()

    async def close(self) -> None:
        """Let go of the learner."""
        await self.sender.close()
        await self._world.threads.run(self.weights.close)
