"""The generator actor: an engine, many episodes at once, and a sender."""

from __future__ import annotations

import asyncio
import os
import random
import socket
import time
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from actors.delivery import receiver
from actors.process import begin
from r3async.config import config_from_dict
from r3async.engines.base import Engine, InstallReport
from r3async.engines.vllm import VllmEngine
from r3async.envs.base import environment_factory
from r3async.episodes.chat import ChatRenderer
from r3async.episodes.group import GroupPlayer
from r3async.observe.events import open_events
from r3async.observe.tracing import recording
from r3async.scheduling.admission import GroupLease
from r3async.transport.sender import Sender
from r3async.transport.sockets import TransportError
from r3async.weights.manifest import Difference, WeightManifest
from r3async.weights.transport import Publication, WeightReceiver

IDLE_SECONDS = 0.05


class GeneratorActor:
    """Serves the conductor, which alone calls it. One process, one event loop.

    After a restart by Ray the process is new: `start`, `connect`, `install` and `run` are called again, in that order.
    """

    def __init__(self, generator_id: str, run_id: str, config: dict[str, Any], model_path: str, run_dir: str):
        begin(Path(run_dir) / "logs" / f"{generator_id}.log")
        self.generator_id, self.run_id = generator_id, run_id
        self.config = config_from_dict(config)
        self.model_path, self.run_dir = model_path, Path(run_dir)
        self.events = open_events(self.run_dir, generator_id)
        self.engine: Engine | None = None
        self.sender: Sender | None = None
        self.weights: WeightReceiver | None = None
        self._manifest: WeightManifest | None = None
        """Of the weights that were installed last, as they are on this host."""
        self._stopping = asyncio.Event()
        self._rejection = ""

    def whereabouts(self) -> dict[str, Any]:
        return {"pid": os.getpid(), "host": socket.gethostname()}

    async def start(self) -> dict[str, Any]:
        """Load the engine. Returns what the conductor has to know."""
        settings = self.config.generator
        self.engine = VllmEngine(
            self.model_path,
            dtype=settings.dtype,
            concurrency=settings.concurrency,
            max_model_len=self.config.episode.max_total_tokens,
            threads=settings.threads,
            kv_cache_gib=settings.kv_cache_gib,
            on_update=settings.on_update,
            engine_args={"seed": self._engine_seed(), **settings.engine_args},
        )
        self.renderer = await asyncio.to_thread(
            ChatRenderer.from_model, self.model_path, self.config.episode.template_args
        )
        await self.engine.start()
        routing = self.engine.routing
        self.events.info("generator_started", **self.whereabouts(), engine=self.config.generator.engine)
        return {**self.whereabouts(), "routing": msgspec.structs.asdict(routing) if routing else None}

    def _engine_seed(self) -> int:
        """Of what the engine samples; different for every generator and every run."""
        return random.Random(f"{self.config.seed}/{self.generator_id}").getrandbits(31)

    async def connect(self, endpoint: str, backend: str) -> None:
        """Open the way to the learner, and the one by which its weights come; see `actors.delivery`."""
        self.weights = await asyncio.to_thread(receiver, self.config, backend)
        self.sender = Sender(endpoint, self.generator_id, self.run_id, self.config.transport, on_reject=self._rejected)
        await self.sender.start()

    def _rejected(self, trajectory_id: str, reason: str) -> None:
        """The learner will never take it, so its group can never be trained: the run has to stop and say why."""
        self.events.error("trajectory_rejected", trajectory_id=trajectory_id, reason=reason)
        self._rejection = f"the learner rejected trajectory {trajectory_id}: {reason}"

    async def install(self, publication: Publication) -> InstallReport:
        """Fetch and install published weights while episodes go on."""
        assert self.engine is not None
        assert self.weights is not None
        limit, before = self.config.weights.install_timeout, time.monotonic()
        self._manifest = await asyncio.to_thread(self.weights.fetch, publication.manifest, publication.parts, limit)
        fetched = time.monotonic() - before
        report = await self.engine.install(self._manifest, max(0.0, limit - fetched))
        return msgspec.structs.replace(report, fetch_seconds=fetched)

    async def cached_from_older(self, token_ids: list[int]) -> int:
        """See `Engine.cached_from_older`."""
        assert self.engine is not None
        return await self.engine.cached_from_older(np.asarray(token_ids, np.int32))

    async def differences(self) -> list[Difference]:
        """Which tensors of the version that was installed last the engine does not hold; see `Engine.differences`."""
        assert self.engine is not None
        assert self._manifest is not None
        return await self.engine.differences(self._manifest, self.config.weights.install_timeout)

    async def score(self, token_ids: list[int]) -> np.ndarray:
        assert self.engine is not None
        return await self.engine.score(np.asarray(token_ids, np.int32))

    def encode_probe(self, text: str) -> list[int]:
        return self.renderer.tokenizer.encode(text, add_special_tokens=False)

    async def run(self, conductor: Any) -> None:
        """Lease groups and play them until the conductor says there is nothing more to play.

        Raises what an episode failed with, after its retries. `TransportError` if the learner
        rejects a trajectory.
        """
        assert self.engine is not None
        assert self.sender is not None
        player = GroupPlayer(
            factory=environment_factory(self.config.env),
            engine=recording(self.engine, self.run_dir, self.generator_id, self.config, self.events.warning),
            renderer=self.renderer,
            settings=self.config.episode,
            generator_id=self.generator_id,
            deliver=self.sender.send,
            report=self.events.warning,
        )
        episodes = self.config.schedule.samples_per_group
        capacity = max(1, self.config.generator.concurrency // episodes)
        playing: set[asyncio.Task[None]] = set()
        more = True
        try:
            while (more or playing) and not self._stopping.is_set():
                room = capacity - len(playing) if more else 0
                answer = await conductor.lease.remote(self.generator_id, room, self.engine.stats())
                more = answer["more"]
                for lease in msgspec.msgpack.decode(answer["leases"], type=list[GroupLease]):
                    playing.add(asyncio.create_task(player.play(lease)))
                finished: set[asyncio.Task[None]] = set()
                if playing:
                    finished, playing = await asyncio.wait(
                        playing, timeout=IDLE_SECONDS, return_when=asyncio.FIRST_COMPLETED
                    )
                elif more:
                    await asyncio.sleep(IDLE_SECONDS)
                for task in finished:
                    task.result()
                if self._rejection:
                    raise TransportError(self._rejection)
        finally:
            for task in playing:
                task.cancel()
            await asyncio.gather(*playing, return_exceptions=True)
        await self.sender.flush(self.config.transport.ack_timeout)

    async def stop(self) -> None:
        """Cancel what is playing, close the sender, shut the engine down."""
        self._stopping.set()
        await asyncio.sleep(2 * IDLE_SECONDS)
        if self.sender is not None:
            await self.sender.close()
        if self.engine is not None:
            await self.engine.stop()
        if self.weights is not None:
            await asyncio.to_thread(self.weights.close)
