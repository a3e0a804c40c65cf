"""The generator actor: it plays many episodes at once on one engine, sends their trajectories to
the learner, and installs new weights meanwhile.

`GeneratorActor.run` is the loop. It gets episodes to play from a `LeaseClient` (lease_client.py),
has each played by a `RetryingPlayer` (rollout/lease_player.py) on an `Engine` (rollout/engine.py)
behind a `VersionGate` (lease_client.py), and gives trajectories to a `TrajectorySender`
(transport/sender.py). A `WeightReceiver` (weights/interfaces.py) fetches versions.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import msgspec
import numpy as np

from r3async.actors.lease_client import LeaseClient, VersionGate
from r3async.actors.remote_generators import (
    RemoteModelFiles,
    fetch_model_files,
    shares_run_directory,
)
from r3async.actors.run_setup import RunSetup
from r3async.actors.weight_transport import build_weight_receiver
from r3async.config import EnvConfig, config_from_dict, config_to_dict, resolve_envs
from r3async.data.tokens import Trajectory
from r3async.envs import EnvironmentFactory
from r3async.envs.factory import build_environment_factory
from r3async.record.engine_calls import time_engine_calls
from r3async.record.events import open_event_log
from r3async.record.process_time import LagMeter, StageTimer
from r3async.record.routes import record_engine_routes
from r3async.record.timeline import Timeline
from r3async.rollout import build_engine
from r3async.rollout.agent_player import open_agent_player
from r3async.rollout.agents import is_agent
from r3async.rollout.engine import (
    CorruptWeightsError,
    Engine,
    EngineLostError,
    InstallReport,
    sample_probe,
)
from r3async.rollout.episode import EpisodeTask, build_failed_trajectory
from r3async.rollout.evaluation import EvaluationPlayer, count_tasks_by_part, drop_long_prompts
from r3async.rollout.evaluation_results import Evaluation
from r3async.rollout.lease_player import RetryingPlayer, find_cause
from r3async.rollout.play_context import PlayContext
from r3async.rollout.renderer import ChatRenderer
from r3async.schedule.run_ahead import GroupLease
from r3async.schedule.task_failures import EpisodeEnd
from r3async.schedule.validation import find_invalid, validate_trajectories
from r3async.transport.sender import TrajectorySender
from r3async.weights.interfaces import TransferOffer, WeightReceiver
from r3async.weights.manifest import TensorMismatch, WeightError, WeightManifest
from r3async.weights.probe import SampledProbe
from r3async.world import ActorRef, World
from r3async.world.curve_keys import ClientKeys, TransportError, resolve_generator_keys
from r3async.world.stages import create_stage_task, stage

from .process import (
    ActorNotLoaded,
    describe_process,
    gather_or_cancel,
    latest_call_only,
    prepare_process,
    run_once,
)

GENERATOR_CLOSE_SECONDS = 5.0
PLAY_END_SECONDS = 0.1
"""Seconds that the playing tasks get to notice that they have to end."""

T = TypeVar("T")


class EngineAndRenderer(NamedTuple):
    """The parts that `GeneratorActor.start` loads."""

    engine: Engine
    renderer: ChatRenderer


class LearnerConnection(NamedTuple):
    """The connections that `connect_to_learner` opens: to the learner, and to the
    transport of its weights."""

    sender: TrajectorySender
    weight_receiver: WeightReceiver


class GeneratorActor:
    """The actor that plays episodes on one engine. Only the conductor calls it. It has one process
    and one event loop.

    After a restart the process is new: `start`, `connect_to_learner`, `install_version` and `run`
    are called again, in that order. The same calls are made if only the connection broke and the
    process lives: then what it has loaded stays, and a `run` that is still going on ends.
    """

    def __init__(
        self,
        world: World,
        setup: RunSetup,
        generator_id: str,
        model_path: str | RemoteModelFiles,
        make_environment: Callable[[EnvConfig], EnvironmentFactory] = build_environment_factory,
    ):
        """Prepare the process; `start` loads the engine.

        Args:
            make_environment: Makes environments that the configuration alone does not describe.
        """
        self.world = world
        self.run_dir = Path(setup.run_dir)
        self._lock = prepare_process(world, self.run_dir, generator_id)
        self.generator_id = generator_id
        self.run_id = setup.run_id
        self.config = config_from_dict(setup.config)
        self.model_path = model_path
        self.lineage = setup.lineage.number
        self._make_environment = make_environment
        away = not shares_run_directory(self.run_dir, self.lineage, world.files)
        self._unsent_events = list[bytes]()
        self._events = open_event_log(
            self.run_dir,
            generator_id,
            world=world,
            unsent=self._unsent_events if away else None,
        )
        self._timeline = Timeline(
            self.run_dir, generator_id, enabled=self.config.observe.timeline, world=world
        )
        self._lag_meter = LagMeter(world.processes)
        self._stage_seconds = StageTimer("generator", world.processes)
        self._loaded: EngineAndRenderer | None = None
        self._connection: LearnerConnection | None = None
        self._installed_manifest: WeightManifest | None = None
        """Manifest of the weights that were installed last, as they are on this host."""
        self._env_factories: dict[bytes, EnvironmentFactory] = {}
        self._evaluation_tasks: list[asyncio.Task[Evaluation]] = []
        self._ended_episodes: list[EpisodeEnd] = []
        """Ends of episodes that are not reported to the conductor yet."""
        self._failure_reason = ""
        """Reason why the run cannot continue; empty while it can."""
        self._stopping = False
        self._woken = asyncio.Event()
        """Event that wakes the loop of `run`: an episode is over, the engine has new weights, or
        the run cannot go on."""
        self._open_episodes: Counter[int] = Counter()
        """Number of episodes by group that were leased to this generator and have not ended."""
        self._undelivered_episodes: set[tuple[int, int]] = set()
        """Group index and episode index of each episode that has begun and is not sent yet."""
        self._send_tasks: dict[asyncio.Task[None], None] = {}

    def _require_ready(self, part: T | None) -> T:
        """Return `part`, or raise `ActorNotLoaded` if it is None. A restarted process is not
        announced, and must not answer calls that were meant for the process before it."""
        if part is None:
            raise ActorNotLoaded(
                f"{self.generator_id} was lost, and process {self.world.processes.pid} in its "
                "place is not set up yet"
            )
        return part

    @property
    def _engine(self) -> Engine:
        return self._require_ready(self._loaded).engine

    @property
    def _renderer(self) -> ChatRenderer:
        return self._require_ready(self._loaded).renderer

    @property
    def _sender(self) -> TrajectorySender:
        return self._require_ready(self._connection).sender

    # -- parts that a subclass may replace -----------------------------------------------------------

    def make_engine(self, model_path: str, seed: int) -> Engine:
        """Return the engine, which is not started."""
        return build_engine(self.config, model_path, seed, self.world)

    def make_renderer(self, model_path: str) -> ChatRenderer:
        """Return the chat renderer. Called in a thread."""
        return ChatRenderer.from_model(model_path, self.config.episode.template_args)

    def make_sender(self, endpoint: str, keys: ClientKeys) -> TrajectorySender:
        """Return the sender to the learner at `endpoint`, which is not started."""
        return TrajectorySender(
            endpoint,
            self.generator_id,
            self.run_id,
            self.config.transport,
            keys=keys,
            validate=self._find_invalid,
            on_reject=self._replace_rejected,
            world=self.world,
        )

    # -- start and stop ----------------------------------------------------------------------------

    def describe_process(self) -> dict[str, Any]:
        return describe_process(self.world)

    @run_once
    async def start(self) -> dict[str, Any]:
        """Load the engine and the tokenizer at the same time. Returns what the conductor has to
        know; `tasks` are the numbers of tasks of the environment, if known."""
        config = self.config
        threads = self.world.threads
        self._lag_meter.start()
        # Unique to this generator and run.
        seed = random.Random(f"{config.seed}/{self.generator_id}").getrandbits(31)
        path = await threads.run(fetch_model_files, self.world, self.model_path, self.run_dir)
        engine = self.make_engine(path, seed)
        self.world.processes.add_metrics_source(
            lambda: {f"engine/{name}": value for name, value in engine.collect_stats().items()}
        )
        rendering = threads.run(self.make_renderer, path)
        self._loaded = EngineAndRenderer(
            engine, (await gather_or_cancel(engine.start(), rendering))[1]
        )
        self._events.info(
            "generator_started", **self.describe_process(), engine=config.generator.engine
        )
        return {
            **self.describe_process(),
            "gpus": getattr(engine, "gpu_uuids", []),
            "routing": msgspec.structs.asdict(engine.routing) if engine.routing else None,
            "tasks": await count_tasks_by_part(
                await threads.run(self._get_env_factory, config.env)
            ),
        }

    @run_once
    async def connect_to_learner(
        self, endpoint: str, backend: str, keys: ClientKeys | None
    ) -> None:
        """Connect to the learner, and to the transport of its weights.

        Args:
            endpoint: Address at which the learner receives trajectories.
            backend: Transport of the weights; see `weight_transport.build_weight_receiver`.
            keys: See `resolve_generator_keys`.
        """
        self._require_ready(self._loaded)
        world = self.world
        transport = self.config.transport
        client_keys = resolve_generator_keys(transport, keys, world.files)
        share = f"{self.run_id}-{self.lineage}-{world.processes.host}"
        weight_receiver = await world.threads.run(
            build_weight_receiver,
            self.config,
            backend,
            self.generator_id,
            share,
            client_keys,
            world,
        )
        sender = self.make_sender(endpoint, client_keys)
        self._connection = LearnerConnection(sender, weight_receiver)
        await sender.start()

    async def stop(self) -> None:
        """Cancel the episodes that are being played, close the sender and shut the engine down."""
        self._lag_meter.stop()
        for evaluation in self._evaluation_tasks:
            evaluation.cancel()
        self._stopping = True
        self._woken.set()
        await asyncio.sleep(PLAY_END_SECONDS)
        if self._connection is not None:
            await self._connection.sender.close()
            await self._connection.weight_receiver.close()
        if self._loaded is not None:
            await self._loaded.engine.stop()
        await self.world.record_flusher.finish_writes(GENERATOR_CLOSE_SECONDS)

    async def dump_stacks(self, reason: str) -> str:
        """Write the stacks of this process to `stacks/GENERATOR.txt` and return the path."""
        return str(
            self.world.processes.dump_stacks(
                self.run_dir / "stacks" / f"{self.generator_id}.txt", reason
            )
        )

    # -- weights -----------------------------------------------------------------------------------

    async def install_version(self, publication: TransferOffer) -> InstallReport:
        """Fetch and install published weights while episodes continue. A file that differs from
        what was published is fetched again, once."""
        weights = self._require_ready(self._connection).weight_receiver
        clock = self.world.clock
        of = publication.manifest.lineage
        if of != self.lineage:
            raise WeightError(
                f"version {publication.manifest.version} is of lineage {of}, and "
                f"{self.generator_id} is of {self.lineage}"
            )
        before = clock.monotonic()
        first = self._engine.version < 0
        deadline = before + self.config.supervise.limits.install(
            publication.manifest.nbytes, first=first
        )
        left = lambda: max(0.0, deadline - clock.monotonic())  # noqa: E731
        with stage("install"):
            for last in (False, True):
                manifest = await weights.fetch_version(
                    publication.manifest, publication.transport_data, left()
                )
                self._installed_manifest = manifest
                fetched = clock.monotonic() - before
                try:
                    report = await self._engine.install_version(manifest, left())
                    break
                except CorruptWeightsError as error:
                    await weights.discard_version(manifest)
                    if last:
                        raise
                    self._events.warning(
                        "weights_fetched_again", version=manifest.version, error=str(error)
                    )
        ended = clock.time()
        self._timeline.add_span(
            "pause", ended - report.pause_seconds, ended, version=manifest.version
        )
        self._woken.set()
        return msgspec.structs.replace(report, fetch_seconds=fetched)

    async def find_weight_differences(self) -> list[TensorMismatch]:
        """Return the tensors of the version installed last that the engine does not hold; see
        `Engine.find_weight_differences`."""
        manifest = self._require_ready(self._installed_manifest)
        return await self._engine.find_weight_differences(
            manifest, self.config.supervise.limits.install(manifest.nbytes, first=True)
        )

    async def count_stale_cached_tokens(self, token_ids: list[int]) -> int:
        """Call `Engine.count_stale_cached_tokens`."""
        return await self._engine.count_stale_cached_tokens(np.asarray(token_ids, np.int32))

    async def score_tokens(self, token_ids: list[int]) -> np.ndarray:
        return await self._engine.score_tokens(np.asarray(token_ids, np.int32))

    async def sample_probe(self, token_ids: list[int]) -> SampledProbe:
        """Sample the probe at the run's temperature; see `sample_probe`."""
        return await sample_probe(
            self._engine, np.asarray(token_ids, np.int32), self.config.episode.temperature
        )

    def encode_probe(self, text: str) -> list[int]:
        return self._renderer.encode_plain(text)[: len(text)]

    # -- leases ------------------------------------------------------------------------------------

    @latest_call_only
    async def run(self, conductor: ActorRef) -> None:
        """Lease episodes and play them until the conductor answers that nothing is left to play.

        All turns of an episode, and its retries, are played by this engine. Raises
        `EngineLostError` if it is lost: another engine plays these episodes. Raises
        `TransportError` if the learner rejects the trajectory that stands for a failed episode: its
        group could never be complete.
        """
        config = self.config
        world = self.world
        # An earlier call may have left counts, and its episodes end with it.
        self._open_episodes.clear()
        self._undelivered_episodes.clear()
        # Record the routes of traced trajectories as the engine returns them.
        recorded = record_engine_routes(
            self._engine, self.run_dir, self.generator_id, config, world=world
        )
        # Let episodes begin at once, and their first answers wait for the weights that
        # their lease names.
        engine = VersionGate(time_engine_calls(recorded, self._timeline), self._woken)
        context = self._build_play_context(engine)
        # Keep the endpoint for agents up, where there is one, for as long as episodes are played.
        async with open_agent_player(
            config.env,
            config.episode,
            config.serving,
            context,
            directory=self.run_dir,
            world=world,
        ) as play:
            player = RetryingPlayer(
                context,
                config.episode,
                self._get_env_factory(config.env),
                play_episode=play,
                task_settings=[env.episode for env in resolve_envs(config)],
                raise_failures=False,
            )
            leasing = LeaseClient(
                config,
                world.clock.monotonic,
                engine,
                generator_id=self.generator_id,
                process=(world.processes.pid, world.processes.host),
                conductor=conductor,
                woken=self._woken,
            )
            playing: list[asyncio.Task[None]] = []
            try:
                with stage("lease"):
                    while (
                        leasing.has_more or playing or leasing.open_calls
                    ) and not self._stopping:
                        # Call the conductor when a group fits, and otherwise as a heartbeat.
                        if leasing.is_call_due:
                            leasing.begin_call(self._collect_load(player), *self._take_reports())
                        # Sleep until an answer, the end of an episode or new weights have come,
                        # or a look is due.
                        await leasing.wait_for_change()
                        # The engine may have new weights, for which first answers wait.
                        engine.release_ready()
                        # A lost engine ends the loop, and no episode fails by it: others play what
                        # was leased here.
                        engine.raise_if_lost()
                        # Begin to play what was leased.
                        for lease in leasing.take_leases():
                            engine.require_version(lease)
                            playing.append(self._start_lease(leasing, player, lease))
                        # Raise what a lease failed with.
                        for ended in [task for task in playing if task.done()]:
                            playing.remove(ended)
                            ended.result()
                        # A rejected stand-in ends the loop: its group could never be complete.
                        self._raise_failure()
            finally:
                # What is left has no loop that would handle its end.
                for left in (*playing, *leasing.open_calls):
                    left.cancel()
                await asyncio.gather(*playing, *leasing.open_calls, return_exceptions=True)
            # The last trajectories are still on their way: only what is acknowledged is
            # safe at the learner.
            await self._sender.flush(config.transport.ack_timeout)
            # A rejection may have come while the sender was flushed.
            self._raise_failure()
            # Report the last ends of episodes and events: nobody calls the conductor after this.
            if self._ended_episodes or self._unsent_events:
                await leasing.send_last_report(self._collect_load(player), *self._take_reports())

    def _take_reports(self) -> tuple[list[EpisodeEnd], list[bytes]]:
        """Return the ends of episodes and the events to report, which from now on are reported."""
        ended = list(self._ended_episodes)
        self._ended_episodes[:] = []
        events = list(self._unsent_events)
        self._unsent_events[:] = []
        return ended, events

    def _collect_load(self, player: RetryingPlayer) -> dict[str, float]:
        processes = self.world.processes
        with stage("metrics"):
            return {
                "ended": player.attempt_count,
                "unacknowledged": self._sender.unacknowledged,
                "acknowledged": self._sender.acked,
                **{
                    f"lag_{name}": value
                    for name, value in self._lag_meter.collect_metrics().items()
                },
                "cpu_seconds": (mine := processes.cpu_seconds()),
                "engine_cpu_seconds": processes.cpu_seconds(
                    getattr(self._engine, "process_ids", ())
                )
                - mine,
                **self._stage_seconds.total_seconds(),
            }

    def _start_lease(
        self, leasing: LeaseClient, player: RetryingPlayer, lease: GroupLease
    ) -> asyncio.Task[None]:
        """Start the episodes of a lease, except those that are still played here or wait for their
        acknowledgement.

        Such episodes come back if this process was silent: its leases returned, and some were
        leased to it again.
        """
        tasks = []
        for index in lease.episode_indices:
            task = EpisodeTask(lease.group_index, index, lease.task_seed)
            if (
                task.group_index,
                index,
            ) not in self._undelivered_episodes and task.trajectory_id not in self._sender:
                tasks.append(task)
        # They count from now on, so that the next call requests nothing in their place.
        leasing.playing_count += len(tasks)
        self._open_episodes[lease.group_index] += len(tasks)
        self._undelivered_episodes.update((task.group_index, task.episode_index) for task in tasks)
        playing = create_stage_task("play", self._play_lease(leasing, player, tasks))
        playing.add_done_callback(lambda _: self._woken.set())
        return playing

    async def _play_lease(
        self, leasing: LeaseClient, player: RetryingPlayer, tasks: Sequence[EpisodeTask]
    ) -> None:
        with self._timeline.measure_span("play"):
            async with asyncio.TaskGroup() as group:
                for task in tasks:
                    group.create_task(self._play_and_send(leasing, player, task))

    async def _play_and_send(
        self, leasing: LeaseClient, player: RetryingPlayer, task: EpisodeTask
    ) -> None:
        try:
            played = await player.play(task)
            leasing.playing_count -= 1
            self._add_episode_end(played.end)
            await self._send_trajectory(played.trajectory)
        finally:
            self._undelivered_episodes.discard((task.group_index, task.episode_index))

    def _add_episode_end(self, end: EpisodeEnd) -> None:
        self._ended_episodes.append(end)
        self._woken.set()

    def _raise_failure(self) -> None:
        if self._failure_reason:
            raise TransportError(self._failure_reason)

    # -- trajectories ------------------------------------------------------------------------------

    async def _send_trajectory(self, trajectory: Trajectory) -> None:
        """Send a trajectory, or the one that stands for it if the learner would not take it."""
        # Its versions are of this lineage: the engine has no others.
        trajectory = msgspec.structs.replace(trajectory, lineage=self.lineage)
        group = trajectory.group_index
        self._open_episodes[group] -= 1
        more = self._open_episodes[group] > 0
        if not more:
            del self._open_episodes[group]
        await self._sender.send(trajectory, more_follow=more)

    def _find_invalid(self, trajectories: Sequence[Trajectory]) -> dict[int, str]:
        """Return the reasons, by index, why the learner would not take trajectories, as far as its
        checks can be made here."""
        check = partial(
            validate_trajectories,
            vocab_size=None,
            learner_version=self._engine.version,
            max_tokens=self.config.learner.max_tokens_per_micro_batch,
            routing=self._engine.routing,
            group_size=self.config.schedule.group_size,
        )
        return {
            at: f"{self.generator_id} made it wrong: {error}"
            for at, error in find_invalid(trajectories, check).items()
        }

    def _replace_rejected(self, trajectory: Trajectory, reason: str) -> None:
        """Send a stand-in for a trajectory that the learner will never take. Its group is trained
        without it, unless that happens too often (`TaskSource`)."""
        name = trajectory.trajectory_id
        self._events.error("trajectory_rejected", trajectory_id=name, reason=reason)
        failure = f"the learner rejected trajectory {name}: {reason}"
        if not trajectory.turns:  # it stands for a failed episode already
            self._failure_reason = failure
            self._woken.set()
            return
        task = EpisodeTask(trajectory.group_index, trajectory.episode_index, trajectory.task_seed)
        self._add_episode_end(
            EpisodeEnd(task.group_index, task.episode_index, task.task_seed, "learner", failure)
        )
        routing = self._engine.routing
        end_id = self._renderer.eos_token_id
        now = self.world.clock.time()
        instead = build_failed_trajectory(
            task, routing, end_id, generator_id=self.generator_id, at=now
        )
        sending = asyncio.create_task(
            self._sender.send(msgspec.structs.replace(instead, lineage=self.lineage))
        )
        self._send_tasks[sending] = None
        sending.add_done_callback(self._send_tasks.pop)

    # -- environments ------------------------------------------------------------------------------

    def _get_env_factory(self, env: EnvConfig) -> EnvironmentFactory | None:
        """Return the factory of an environment; None for an agent. Each environment has one
        factory, however often it is played, because it may own processes."""
        if is_agent(env):
            return None
        key = msgspec.json.encode(config_to_dict(env, reveal=True))
        if key not in self._env_factories:
            self._env_factories[key] = factory = self._make_environment(env)
            drop_long_prompts(factory, self._renderer, self.config.episode)
        return self._env_factories[key]

    def _build_play_context(self, engine: Engine) -> PlayContext:
        return PlayContext(
            engine,
            self._renderer,
            self.generator_id,
            self._events.warning,
            self.world.clock.time,
        )

    async def evaluate(self) -> dict[str, Any]:
        """Play the tasks of `[evaluation]` beside the leases; nothing of it is sent to the learner.

        Returns an `Evaluation`. Raises what an episode failed with after its retries,
        `EngineLostError` if the engine is lost, and `TimeoutError` after `TimeLimits.evaluation`.
        """
        player = EvaluationPlayer(
            self.config,
            self._build_play_context(self._engine),
            make_factory=lambda env: self.world.threads.run(self._get_env_factory, env),
            trained_env=self.config.env,
            world=self.world,
        )
        playing = create_stage_task("evaluation", player.play_sets())
        self._evaluation_tasks.append(playing)
        limit = self.config.supervise.limits.evaluation
        try:
            return msgspec.to_builtins(await asyncio.wait_for(playing, limit))
        except TimeoutError as error:
            raise TimeoutError(f"it took longer than {limit:g} s (supervise.patience)") from error
        except Exception as error:
            loss = find_cause(error, EngineLostError)
            if loss is not None:
                raise loss from None
            raise
        finally:
            self._evaluation_tasks.remove(playing)
