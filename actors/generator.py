"""The generator actor: an engine, many episodes at once, and a sender."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import numpy as np

from r3async.actors.delivery import receiver
from r3async.actors.playing import Context, GeneratorParts, Loaded, Playing
from r3async.actors.process import NotLoaded, begin, whereabouts
from r3async.config import config_from_dict
from r3async.record.events import open_events
from r3async.record.timeline import LagMeter, Timeline
from r3async.rollout.agents.tasks import count_tasks
from r3async.rollout.engines.base import InstallReport
from r3async.rollout.engines.probing import sample_probe
from r3async.transport.keys import ClientKeys, generator_keys
from r3async.transport.sender import Sender
from r3async.weights.manifest import Difference
from r3async.weights.probe import SampledProbe
from r3async.weights.transport import Publication
from r3async.world import ActorRef, World

CLOSE_SECONDS = 5.0
STOP_SECONDS = 0.1
"""For what was played to see that it is given up."""
PARTS = GeneratorParts()

T = TypeVar("T")


class GeneratorActor:
    """Serves the conductor, which alone calls it. One process, one event loop.

    After a restart the process is new: `start`, `connect`, `install` and `run` are called again, in that order.
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
        parts: GeneratorParts = PARTS,
    ):
        """`lineage`: of this start of the run, in which the versions of weights are counted."""
        self.world, self._lock = world, begin(world, Path(run_dir), generator_id)
        self.generator_id, self.run_id = generator_id, run_id
        self.config, self.model_path, self.run_dir = config_from_dict(config), model_path, Path(run_dir)
        self._parts = parts
        self.context = Context(
            world,
            self.config,
            run_id,
            self.run_dir,
            generator_id,
            lineage,
            events=open_events(self.run_dir, generator_id, world=world),
            timeline=Timeline(self.run_dir, generator_id, enabled=self.config.observe.timeline, world=world),
            lag=LagMeter(world.processes),
        )
        self.loaded: Loaded | None = None
        self.playing: Playing | None = None

    def _ready(self, part: T | None) -> T:
        """A process is started anew without a word to its callers: what was asked of the one that died must not be answered."""
        if part is None:
            raise NotLoaded(
                f"{self.generator_id} died, and process {self.world.processes.pid} in its place has not begun yet"
            )
        return part

    def whereabouts(self) -> dict[str, Any]:
        return whereabouts(self.world)

    async def start(self) -> dict[str, Any]:
        """Load the engine. Returns what the conductor has to know; `tasks` is how many the environment says it has."""
        config, threads, clock = self.config, self.world.threads, self.world.clock.monotonic
        self.context.lag.start()
        engine = self._parts.engine(config, self.model_path, self._engine_seed(), clock)
        self.world.processes.show_figures(lambda: {f"engine/{name}": value for name, value in engine.stats().items()})
        renderer = await threads.run(self._parts.renderer, self.model_path, config.episode.template_args)
        self.loaded = loaded = Loaded(self.context, engine, renderer, self._parts.environment)
        await engine.start()
        self.context.events.info("generator_started", **self.whereabouts(), engine=config.generator.engine)
        factory = await threads.run(loaded.factory, config.env)
        return {
            **self.whereabouts(),
            "gpus": getattr(engine, "gpus", []),
            "routing": msgspec.structs.asdict(engine.routing) if engine.routing else None,
            "tasks": await count_tasks(factory),
        }

    def _engine_seed(self) -> int:
        """Of what the engine samples; different for every generator and every run."""
        return random.Random(f"{self.config.seed}/{self.generator_id}").getrandbits(31)

    async def connect(self, endpoint: str, backend: str, keys: ClientKeys | None) -> None:
        """Open the way to the learner, and the one by which its weights come; see `r3async.actors.delivery`. `keys`: see
        `generator_keys`."""
        loaded, world, transport = self._ready(self.loaded), self.world, self.config.transport
        weights = await world.threads.run(receiver, self.config, backend, self.generator_id, world)
        known = generator_keys(transport, keys, world.files)
        self.playing = Playing(
            loaded,
            lambda on_reject: Sender(
                endpoint, self.generator_id, self.run_id, transport, keys=known, on_reject=on_reject, world=world
            ),
            weights,
        )
        await self.playing.sender.start()

    async def install(self, publication: Publication) -> InstallReport:
        """Fetch and install published weights while episodes go on."""
        return await self._ready(self.playing).install(publication)

    async def cached_from_older(self, token_ids: list[int]) -> int:
        """See `Engine.cached_from_older`."""
        return await self._ready(self.loaded).engine.cached_from_older(np.asarray(token_ids, np.int32))

    async def differences(self) -> list[Difference]:
        """Which tensors of the version that was installed last the engine does not hold; see `Engine.differences`."""
        return await self._ready(self.playing).differences()

    async def score(self, token_ids: list[int]) -> np.ndarray:
        return await self._ready(self.loaded).engine.score(np.asarray(token_ids, np.int32))

    async def sample_probe(self, token_ids: list[int]) -> SampledProbe:
        """See `engines.probing.sample_probe`, at the run's temperature."""
        engine = self._ready(self.loaded).engine
        return await sample_probe(engine, np.asarray(token_ids, np.int32), self.config.episode.temperature)

    def encode_probe(self, text: str) -> list[int]:
        return self._ready(self.loaded).renderer.encode(text)

    async def run(self, conductor: ActorRef) -> None:
        """Lease episodes and play them until the conductor says there is nothing more to play.

        All turns of an episode, and its retries, are played by one engine, this one. Raises `TransportError` if the learner
        rejects what stands for a failed episode: its group could never be complete.
        """
        await self._ready(self.playing).run(conductor)

    async def dump_stacks(self, reason: str) -> str:
        """What this process is doing, to `stacks/GENERATOR.txt`."""
        return str(self.world.processes.dump_stacks(self.run_dir / "stacks" / f"{self.generator_id}.txt", reason))

    async def evaluate(self) -> dict[str, Any]:
        """Play the tasks of `[evaluation]` beside the leases; nothing of it goes to the learner. Returns an `Evaluation`.

        Raises what an episode failed with, after its retries, and `TimeoutError` after `evaluation.timeout`.
        """
        return await self._ready(self.loaded).evaluate()

    async def stop(self) -> None:
        """Cancel what is playing, close the sender, shut the engine down."""
        self.context.lag.stop()
        if self.loaded is not None:
            self.loaded.give_evaluations_up()
        if self.playing is not None:
            self.playing.stop()
        await asyncio.sleep(STOP_SECONDS)
        if self.playing is not None:
            await self.playing.close()
        if self.loaded is not None:
            await self.loaded.engine.stop()
        await self.world.keeper.finish(CLOSE_SECONDS)
