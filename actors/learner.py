"""The learner actor: receives trajectories, trains on complete groups in lease order, publishes weights."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from actors.process import redirect_output
from actors.ranks import LocalLearner, RankedLearner
from r3async.algorithms.advantages import group_advantages
from r3async.batching.packing import pack
from r3async.buffer.groups import GroupBuffer
from r3async.buffer.validation import validate_trajectory
from r3async.config import config_from_dict
from r3async.engines.base import RoutingShape
from r3async.observe.events import open_events
from r3async.observe.tracing import StepTracer
from r3async.records import Trajectory
from r3async.transport.receiver import Receiver, Refuse

CLOSE_SECONDS = 5.0


class LearnerActor:
    """Serves the conductor. The event loop receives; all torch work runs in one thread of its own.

    One thread and always the same one: Megatron keeps state per process, and torch keeps grad mode and function modes
    per thread.
    """

    def __init__(self, run_id: str, config: dict[str, Any], model_path: str, run_dir: str, gpus_per_rank: float = 0.0):
        redirect_output(Path(run_dir) / "logs" / "learner.log")
        self.config = config_from_dict(config)
        self.run_id, self.model_path, self.run_dir = run_id, model_path, Path(run_dir)
        self.events = open_events(self.run_dir, "learner")
        self.tracer = StepTracer(self.run_dir, self.config, self.events.warning)
        self.buffer = GroupBuffer(self.config.schedule.samples_per_group)
        self.routing: RoutingShape | None = None
        self.backend: LocalLearner | RankedLearner | None = None
        self._gpus_per_rank = gpus_per_rank
        self.version = 0
        """Steps consumed. A step without an update (nothing to train, a gradient that is not finite) counts too: slots
        are freed by it, and generators see time pass."""
        self._vocab_size = 0
        self._torch = ThreadPoolExecutor(1, thread_name_prefix="torch")
        self._arrived = asyncio.Event()
        self._interrupted = False

    async def _in_torch(self, call: Any, *args: Any) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._torch, call, *args)

    async def start(self) -> dict[str, Any]:
        """Load the model and bind the socket. Returns the endpoint and whereabouts."""
        await self._in_torch(self._load)
        self.receiver = Receiver(self.run_id, self.config.transport, self._arrive)
        endpoint = await self.receiver.start()
        self.events.info("learner_started", endpoint=endpoint, pid=os.getpid(), backend=self.config.learner.backend)
        return {"endpoint": endpoint, "pid": os.getpid(), "host": socket.gethostname()}

    def _load(self) -> None:
        path = Path(self.model_path)
        if self.config.learner.parallel.world == 1:
            self.backend = LocalLearner(self.config, path)
        else:
            self.backend = RankedLearner(self.config, path, self.run_dir, self._gpus_per_rank)
        self._vocab_size = self.backend.vocab_size

    def expect_routes(self, routing: dict[str, int] | None) -> None:
        """The routes that engines record; checked on arrival."""
        self.routing = RoutingShape(**routing) if routing else None

    def _arrive(self, trajectory: Trajectory, nbytes: int) -> None:
        try:
            validate_trajectory(
                trajectory,
                vocab_size=self._vocab_size,
                learner_version=self.version,
                max_tokens=self.config.learner.max_tokens_per_micro_batch,
                routing=self.routing,
            )
            fresh = self.buffer.add(trajectory, nbytes)
        except ValueError as error:
            self.events.error("trajectory_refused", trajectory_id=trajectory.trajectory_id, reason=str(error))
            raise Refuse(str(error)) from error
        if not fresh:
            self.receiver.release(trajectory.trajectory_id)
        self._arrived.set()

    async def publish(self) -> bytes:
        """Write the current weights to shared memory; returns the manifest (msgpack)."""
        assert self.backend is not None
        manifest = await self._in_torch(self.backend.publish, self.version)
        return msgspec.msgpack.encode(manifest)

    async def score(self, token_ids: list[int]) -> np.ndarray:
        assert self.backend is not None
        return await self._in_torch(self.backend.score, np.asarray(token_ids, np.int32))

    def missing(self, group_indices: list[int]) -> dict[int, list[int]]:
        """Episodes of these groups that have not arrived."""
        return {g: self.buffer.missing(g) for g in group_indices}

    async def train_step(self) -> dict[str, Any] | None:
        """Wait for the next groups, train one optimizer step on them, publish the new weights.

        Returns metrics, manifest and episode previews; None if interrupted while waiting. Raises `TimeoutError` with
        what is missing if nothing arrives for `supervise.stall_seconds`.
        """
        waited_from = time.monotonic()
        if not await self._wait_for_groups():
            return None
        waited = time.monotonic() - waited_from
        groups, _ = self.buffer.take(self.config.schedule.groups_per_step)
        trajectories = [t for g in groups for t in g]
        version = self.version
        step_from = time.monotonic()
        metrics = await self._in_torch(self._train, groups)
        trained = time.monotonic()
        self.version += 1
        if metrics["optimizer/skipped"]:
            self.events.warning("step_skipped", version=self.version, grad_norm=metrics["grad_norm"])
        for group in groups:
            self.receiver.forget(group[0].group_index)
        manifest = await self.publish()
        metrics |= self._episode_metrics(trajectories, version)
        metrics |= {
            "transport/received": self.receiver.received,
            "transport/duplicates": self.receiver.duplicates,
            "transport/rejected": self.receiver.rejected,
            "learner/wait_seconds": waited,
            "learner/step_seconds": trained - step_from,
            "weights/publish_seconds": time.monotonic() - trained,
            "buffer/ready_groups": self.buffer.ready_groups(),
        }
        previews = [
            {"group": t.group_index, "reward": t.reward, "messages": t.preview, "rewards": [x.reward for x in t.turns]}
            for t in trajectories
            if t.preview
        ]
        return {"metrics": metrics, "manifest": manifest, "version": self.version, "previews": previews[:2]}

    async def _wait_for_groups(self) -> bool:
        count, stall = self.config.schedule.groups_per_step, self.config.supervise.stall_seconds
        last, held = time.monotonic(), -1
        while not self.buffer.ready(count):
            if self._interrupted:
                return False
            self._arrived.clear()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._arrived.wait(), 1.0)
            if self.receiver.received != held:
                last, held = time.monotonic(), self.receiver.received
            elif time.monotonic() - last > stall:
                first = self.buffer.next_group
                lacking = {g: self.buffer.missing(g) for g in range(first, first + count) if self.buffer.missing(g)}
                raise TimeoutError(
                    f"no trajectory arrived for {stall:.0f} s (supervise.stall_seconds); missing by group: {lacking}"
                )
        return not self._interrupted

    def _train(self, groups: list[list[Trajectory]]) -> dict[str, float]:
        settings = self.config.algorithm
        samples = [s for g in groups for s in group_advantages(g, settings.credit, settings.normalize_std)]
        micro_batches = pack(samples, self.config.learner.max_tokens_per_micro_batch)
        assert self.backend is not None
        result = self.backend.train_step(micro_batches, trace=self.tracer.wants(samples))
        self.tracer.write(self.version + 1, samples, result)
        return result.metrics

    @staticmethod
    def _episode_metrics(trajectories: list[Trajectory], version: int) -> dict[str, float]:
        rewards = [t.reward for t in trajectories]
        ages = np.concatenate(
            [version - s.table["policy_version"][s.table["loss_mask"]] for t in trajectories for s in t.samples]
        )
        return {
            "reward/mean": float(np.mean(rewards)),
            "reward/max": float(np.max(rewards)),
            "episode/turns_mean": float(np.mean([len(t.turns) for t in trajectories])),
            "staleness/mean": float(ages.mean()) if len(ages) else 0.0,
            "staleness/max": float(ages.max()) if len(ages) else 0.0,
        }

    async def save(self, directory: str) -> str:
        """Export the current weights as a Hugging Face model directory."""
        assert self.backend is not None
        await self._in_torch(self.backend.save, Path(directory))
        return directory

    def interrupt(self) -> None:
        """A `train_step` that waits for groups returns None."""
        self._interrupted = True
        self._arrived.set()

    async def stop(self) -> None:
        self.interrupt()
        if hasattr(self, "receiver"):
            await self.receiver.close()
        if self.backend is not None:
            # Published files that a running step keeps from being removed now go when the next run starts.
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._in_torch(self.backend.close), CLOSE_SECONDS)
        self._torch.shutdown(wait=False, cancel_futures=True)
