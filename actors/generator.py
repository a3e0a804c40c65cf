"""The generator actor: an engine, many episodes at once, and a sender."""

from __future__ import annotations

import asyncio
import random
import time
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from actors.delivery import receiver
from actors.process import NotLoaded, begin, whereabouts
from r3async.appending import KEEPER
from r3async.buffer.validation import InvalidTrajectory, validate_trajectory
from r3async.config import EnvConfig, config_from_dict, to_dict
from r3async.engines.base import Engine, InstallReport
from r3async.engines.build import build_engine
from r3async.engines.probing import sample_probe
from r3async.envs.base import EnvironmentFactory, environment_factory
from r3async.episodes.chat import ChatRenderer
from r3async.episodes.group import GroupPlayer
from r3async.episodes.loop import EpisodeTask, failed_trajectory
from r3async.observe.events import open_events
from r3async.observe.lag import LagMeter
from r3async.observe.stacks import dump_stacks
from r3async.observe.timeline import Timeline
from r3async.observe.tracing import recording
from r3async.records import Trajectory
from r3async.scheduling.admission import GroupLease
from r3async.scheduling.concurrency import Concurrency
from r3async.scheduling.failures import EpisodeEnd
from r3async.scheduling.pace import useful_places
from r3async.serving.agents import is_agent
from r3async.serving.evaluation import evaluate
from r3async.serving.runner import Play, agent_player
from r3async.serving.tasks import count_tasks, evaluated
from r3async.transport.intake import TOKEN_BYTES
from r3async.transport.keys import ClientKeys, generator_keys
from r3async.transport.sender import Sender
from r3async.transport.sockets import TransportError, off_loop
from r3async.weights.manifest import Difference, WeightManifest
from r3async.weights.probe import SampledProbe
from r3async.weights.publish import WeightError
from r3async.weights.transport import Publication, WeightReceiver
from r3async.world import ActorRef, World

IDLE_SECONDS = 0.05
CLOSE_SECONDS = 5.0


class IdleCounter:
    """Since it was made: places for episodes times seconds, all and those that stood empty because no slot was free; and
    seconds, all and those in which the engine had no request."""

    def __init__(self) -> None:
        self._all = self._empty = self._seconds = self._engine_idle = 0.0
        self._at = time.monotonic()

    def passed(self, places: float, empty: float, requests: float) -> None:
        """Since the last call there were so many."""
        now = time.monotonic()
        seconds, self._at = now - self._at, now
        self._all += places * seconds
        self._empty += empty * seconds
        self._seconds += seconds
        self._engine_idle += 0.0 if requests else seconds

    def counters(self) -> dict[str, float]:
        return {
            "places_all": self._all,
            "places_empty": self._empty,
            "engine_all": self._seconds,
            "engine_idle": self._engine_idle,
        }


class GeneratorActor:
    """Serves the conductor, which alone calls it. One process, one event loop.

    After a restart by Ray the process is new: `start`, `connect`, `install` and `run` are called again, in that order.
    """

    def __init__(
        self,
        world: World,
        generator_id: str,
        run_id: str,
        config: dict[str, Any],
        model_path: str,
        run_dir: str,
        lineage: int = 1,
    ):
        """`lineage`: of this start of the run, in which the versions of weights are counted."""
        self.world, self._lock = world, begin(world, Path(run_dir), generator_id)
        self.generator_id, self.run_id, self.lineage = generator_id, run_id, lineage
        self.config = config_from_dict(config)
        self.model_path, self.run_dir = model_path, Path(run_dir)
        self.events = open_events(self.run_dir, generator_id)
        self.timeline = Timeline(self.run_dir, generator_id, enabled=self.config.observe.timeline)
        self.engine: Engine | None = None
        self.sender: Sender | None = None
        self.weights: WeightReceiver | None = None
        self._manifest: WeightManifest | None = None
        """Of the weights that were installed last, as they are on this host."""
        self.lag = LagMeter()
        self._stopping = asyncio.Event()
        self._ended: list[EpisodeEnd] = []
        """Episodes that are over, and of which the conductor was not told."""
        self._rejection = ""
        """Why the run can not go on."""
        self._factories: dict[bytes, EnvironmentFactory] = {}
        self._evaluations: set[asyncio.Task[Any]] = set()
        self._sending: set[asyncio.Task[None]] = set()

    def _loaded(self) -> Engine:
        """Ray starts a process anew without a word to its callers: what was asked of the one that died must not be answered."""
        if self.engine is None:
            raise NotLoaded(
                f"{self.generator_id} died, and process {self.world.processes.pid} in its place has no engine yet"
            )
        return self.engine

    def whereabouts(self) -> dict[str, Any]:
        return whereabouts(self.world)

    async def start(self) -> dict[str, Any]:
        """Load the engine. Returns what the conductor has to know; `tasks` is how many the environment says it has."""
        self.lag.start()
        self.engine = engine = build_engine(self.config, self.model_path, self._engine_seed())
        self.world.processes.show_figures(lambda: {f"engine/{name}": value for name, value in engine.stats().items()})
        self.renderer = await asyncio.to_thread(
            ChatRenderer.from_model, self.model_path, self.config.episode.template_args
        )
        await self.engine.start()
        routing = self.engine.routing
        self.events.info("generator_started", **self.whereabouts(), engine=self.config.generator.engine)
        factory = await asyncio.to_thread(self._factory, self.config.env)
        return {
            **self.whereabouts(),
            "gpus": getattr(engine, "gpus", []),
            "routing": msgspec.structs.asdict(routing) if routing else None,
            "tasks": await count_tasks(factory),
        }

    def _engine_seed(self) -> int:
        """Of what the engine samples; different for every generator and every run."""
        return random.Random(f"{self.config.seed}/{self.generator_id}").getrandbits(31)

    async def connect(self, endpoint: str, backend: str, keys: ClientKeys | None) -> None:
        """Open the way to the learner, and the one by which its weights come; see `actors.delivery`. `keys`: see
        `generator_keys`."""
        self.weights = await asyncio.to_thread(receiver, self.config, backend, self.generator_id)
        transport = self.config.transport
        self.sender = Sender(
            endpoint,
            self.generator_id,
            self.run_id,
            transport,
            keys=generator_keys(transport, keys, self.world.files),
            on_reject=self._rejected,
            world=self.world,
        )
        await self.sender.start()

    def _rejected(self, trajectory: Trajectory, reason: str) -> None:
        """The learner will never take it. Its group is trained without it, unless that happens too often (`Tasks`)."""
        name = trajectory.trajectory_id
        self.events.error("trajectory_rejected", trajectory_id=name, reason=reason)
        said = f"the learner rejected trajectory {name}: {reason}"
        if not trajectory.turns:  # what stands for a failed episode
            self._rejection = said
            return
        self._ended.append(
            EpisodeEnd(trajectory.group_index, trajectory.episode_index, trajectory.task_seed, "learner", said)
        )
        assert self.engine is not None
        assert self.sender is not None
        task = EpisodeTask(trajectory.group_index, trajectory.episode_index, trajectory.task_seed)
        instead = failed_trajectory(
            task, self.engine.routing, self.renderer.end_id, generator_id=self.generator_id, at=time.time()
        )
        sending = asyncio.create_task(self.sender.send(self._named(instead)))
        self._sending.add(sending)
        sending.add_done_callback(self._sending.discard)

    async def _deliver(self, trajectory: Trajectory) -> None:
        assert self.sender is not None
        trajectory = self._named(trajectory)
        try:
            await off_loop(self.world.threads, trajectory.tokens * TOKEN_BYTES, self._check, trajectory)
        except InvalidTrajectory as error:  # the learner would say the same
            self._rejected(trajectory, f"{self.generator_id} made it wrong: {error}")
        else:
            await self.sender.send(trajectory)

    def _named(self, trajectory: Trajectory) -> Trajectory:
        """With the lineage of its versions: the engine has no weights of another one."""
        return msgspec.structs.replace(trajectory, lineage=self.lineage)

    def _check(self, trajectory: Trajectory) -> None:
        """What the learner will ask of it, as far as that is known here."""
        engine = self._loaded()
        validate_trajectory(
            trajectory,
            vocab_size=None,
            learner_version=engine.version,
            max_tokens=self.config.learner.max_tokens_per_micro_batch,
            routing=engine.routing,
            samples_per_group=self.config.schedule.samples_per_group,
        )

    async def _play_lease(self, player: GroupPlayer, lease: GroupLease) -> None:
        """What is played here still, or waits for its acknowledgement, is not played twice: this process was silent, its leases
        returned, and some came back to it."""
        assert self.sender is not None
        new = []
        for index in lease.episode_indices:
            name = EpisodeTask(lease.group_index, index, lease.task_seed).trajectory_id
            if (lease.group_index, index) not in player.active and name not in self.sender:
                new.append(index)
        with self.timeline.span("play"):
            await player.play(msgspec.structs.replace(lease, episode_indices=tuple(new)))

    async def install(self, publication: Publication) -> InstallReport:
        """Fetch and install published weights while episodes go on."""
        engine = self._loaded()
        assert self.weights is not None
        if (of := publication.manifest.lineage) != self.lineage:
            raise WeightError(
                f"version {publication.manifest.version} is of lineage {of}, and {self.generator_id} is of {self.lineage}"
            )
        limit, before = self.config.weights.install_timeout, time.monotonic()
        self._manifest = await asyncio.to_thread(self.weights.fetch, publication.manifest, publication.parts, limit)
        fetched = time.monotonic() - before
        report = await engine.install(self._manifest, max(0.0, limit - fetched))
        ended = time.time()
        self.timeline.add("pause", ended - report.pause_seconds, ended, version=self._manifest.version)
        return msgspec.structs.replace(report, fetch_seconds=fetched)

    async def cached_from_older(self, token_ids: list[int]) -> int:
        """See `Engine.cached_from_older`."""
        return await self._loaded().cached_from_older(np.asarray(token_ids, np.int32))

    async def differences(self) -> list[Difference]:
        """Which tensors of the version that was installed last the engine does not hold; see `Engine.differences`."""
        engine = self._loaded()
        assert self._manifest is not None
        return await engine.differences(self._manifest, self.config.weights.install_timeout)

    async def score(self, token_ids: list[int]) -> np.ndarray:
        return await self._loaded().score(np.asarray(token_ids, np.int32))

    async def sample_probe(self, token_ids: list[int]) -> SampledProbe:
        """See `engines.probing.sample_probe`, at the run's temperature."""
        return await sample_probe(self._loaded(), np.asarray(token_ids, np.int32), self.config.episode.temperature)

    def encode_probe(self, text: str) -> list[int]:
        self._loaded()
        return self.renderer.tokenizer.encode(text, add_special_tokens=False)

    async def run(self, conductor: ActorRef) -> None:
        """Lease episodes and play them until the conductor says there is nothing more to play.

        All turns of an episode, and its retries, are played by one engine, this one. Raises `TransportError` if the learner
        rejects what stands for a failed episode: its group could never be complete.
        """
        engine = recording(self._loaded(), self.run_dir, self.generator_id, self.config)
        async with agent_player(
            self.config.env,
            engine,
            self.renderer,
            self.config.episode,
            self.config.serving,
            generator_id=self.generator_id,
            report=self.events.warning,
            directory=self.run_dir,
        ) as play:
            await self._play_leases(conductor, engine, play)

    async def _play_leases(self, conductor: ActorRef, engine: Engine, play: Play | None) -> None:
        assert self.sender is not None
        player = GroupPlayer(
            factory=self._factory(self.config.env),
            engine=engine,
            renderer=self.renderer,
            settings=self.config.episode,
            generator_id=self.generator_id,
            deliver=self._deliver,
            report=self.events.warning,
            play=play,
            over=self._ended.append,
        )
        settings = self.config.generator
        concurrency = Concurrency(settings.concurrency_min, settings.concurrency, time.monotonic)
        idle = IdleCounter()
        useful = useful_places(self.config.schedule, settings.count)
        playing: set[asyncio.Task[None]] = set()
        more = True
        try:
            while (more or playing) and not self._stopping.is_set():
                stats = engine.stats()
                limit = concurrency.observe(stats, player.playing)
                load = {
                    "limit": limit,
                    "playing": player.playing,
                    "ended": player.ended,
                    "unacknowledged": self.sender.unacknowledged,
                    "acknowledged": self.sender.acked,
                    **idle.counters(),
                    **self._lags(),
                }
                room = max(0, limit - player.playing) if more else 0
                answer = await self._lease(conductor, room, {**stats, **load})
                more = answer["more"]
                for lease in msgspec.msgpack.decode(answer["leases"], type=list[GroupLease]):
                    playing.add(asyncio.create_task(self._play_lease(player, lease)))
                finished: set[asyncio.Task[None]] = set()
                if playing:
                    finished, playing = await asyncio.wait(
                        playing, timeout=IDLE_SECONDS, return_when=asyncio.FIRST_COMPLETED
                    )
                elif more:
                    await asyncio.sleep(IDLE_SECONDS)
                places = min(limit, useful)
                empty = max(0, places - player.playing) if answer["blocked"] else 0
                idle.passed(places, empty, engine.stats()["running"])
                for task in finished:
                    task.result()
                if self._rejection:
                    raise TransportError(self._rejection)
        finally:
            for task in playing:
                task.cancel()
            await asyncio.gather(*playing, return_exceptions=True)
        await self.sender.flush(self.config.transport.ack_timeout)
        if self._rejection:
            raise TransportError(self._rejection)
        if self._ended:
            await self._lease(conductor, 0, {**stats, **load})

    async def _lease(self, conductor: ActorRef, room: int, load: dict[str, float]) -> dict[str, Any]:
        """See `Conductor.lease`."""
        ended, self._ended[:] = msgspec.msgpack.encode(self._ended), []
        return await conductor.call("lease", self.generator_id, room, load, ended)

    async def dump_stacks(self, reason: str) -> str:
        """What this process is doing, to `stacks/GENERATOR.txt`."""
        return str(dump_stacks(self.run_dir / "stacks" / f"{self.generator_id}.txt", reason))

    def _lags(self) -> dict[str, float]:
        return {f"lag_{name}": value for name, value in self.lag.figures().items()}

    def _factory(self, env: EnvConfig) -> EnvironmentFactory | None:
        """One for each environment, however often it is played: it may own processes. None for an agent."""
        if is_agent(env):
            return None
        key = msgspec.json.encode(to_dict(env, reveal=True))
        if key not in self._factories:
            self._factories[key] = environment_factory(env)
        return self._factories[key]

    async def evaluate(self) -> dict[str, Any]:
        """Play the tasks of `[evaluation]` beside the leases; nothing of it goes to the learner. Returns an `Evaluation`.

        Raises what an episode failed with, after its retries, and `TimeoutError` after `evaluation.timeout`.
        """
        engine = self._loaded()
        settings = self.config.evaluation
        env = evaluated(self.config)
        playing = asyncio.create_task(
            evaluate(
                env,
                self._factory(env),
                engine,
                self.renderer,
                self.config.episode,
                self.config.serving,
                episodes=settings.episodes,
                seed=settings.seed,
                trained=self.config.env,
                concurrency=self.config.generator.concurrency,
                generator_id=self.generator_id,
                report=self.events.warning,
            )
        )
        self._evaluations.add(playing)
        try:
            return msgspec.to_builtins(await asyncio.wait_for(playing, settings.timeout))
        except TimeoutError as error:
            raise TimeoutError(f"it took longer than evaluation.timeout = {settings.timeout} s") from error
        finally:
            self._evaluations.discard(playing)

    async def stop(self) -> None:
        """Cancel what is playing, close the sender, shut the engine down."""
        self._stopping.set()
        self.lag.stop()
        for playing in self._evaluations:
            playing.cancel()
        await asyncio.sleep(2 * IDLE_SECONDS)
        if self.sender is not None:
            await self.sender.close()
        if self.engine is not None:
            await self.engine.stop()
        if self.weights is not None:
            await asyncio.to_thread(self.weights.close)
        await asyncio.to_thread(KEEPER.drain, CLOSE_SECONDS)
