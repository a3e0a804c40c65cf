"""The learner actor: receives trajectories, trains on complete groups in lease order or within a window, publishes weights."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from actors.delivery import Published
from actors.process import begin
from actors.ranks import LocalLearner, RankedLearner
from r3async.batching.cost import Cost, cost_model
from r3async.batching.packing import pack_for_ranks
from r3async.buffer.groups import GroupBuffer
from r3async.buffer.validation import validate_trajectory
from r3async.config import config_from_dict
from r3async.engines.base import RoutingShape
from r3async.episodes.loop import ENDINGS
from r3async.learners.prepare import prepare
from r3async.learners.step import MEASURED_DRIFT, combined
from r3async.observe.events import open_events
from r3async.observe.lag import LagMeter
from r3async.observe.stacks import dump_stacks
from r3async.observe.timeline import Timeline
from r3async.observe.tracing import StepTracer
from r3async.records import Trajectory
from r3async.scheduling.admission import age_bound, most_groups, slots_of
from r3async.scheduling.age import age_metrics, check_ages
from r3async.transport.receiver import Receiver, Refuse

CLOSE_SECONDS = 5.0


class LearnerActor:
    """Serves the conductor. The event loop receives; all torch work runs in one thread of its own.

    One thread and always the same one: Megatron keeps state per process, and torch keeps grad mode and function modes
    per thread. New weights are only copied there; another thread writes the copy while the next step runs.
    """

    def __init__(self, run_id: str, config: dict[str, Any], model_path: str, run_dir: str, gpus_per_rank: float = 0.0):
        begin(Path(run_dir) / "logs" / "learner.log")
        self.config = config_from_dict(config)
        self.run_id, self.model_path, self.run_dir = run_id, model_path, Path(run_dir)
        self.events = open_events(self.run_dir, "learner")
        self.timeline = Timeline(self.run_dir, "learner", enabled=self.config.observe.timeline)
        self.tracer = StepTracer(self.run_dir, self.config, self.events.warning)
        schedule = self.config.schedule
        self.buffer = GroupBuffer(schedule.samples_per_group, schedule.window)
        self.age_bound = age_bound(schedule)
        self.lag = LagMeter()
        self.routing: RoutingShape | None = None
        self.backend: LocalLearner | RankedLearner | None = None
        self._gpus_per_rank = gpus_per_rank
        self.version = 0
        """Versions published. A step without an update (nothing to train, a gradient that is not finite) counts too: slots
        are freed by it, and generators see time pass."""
        self.steps = 0
        self._since = [0, 0]
        """Steps made, and groups consumed, since the last version was published."""
        self._vocab_size = 0
        self._cost = Cost()
        self._torch = ThreadPoolExecutor(1, thread_name_prefix="torch")
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="writer")
        self._nothing_to_write = asyncio.Event()
        self._nothing_to_write.set()
        self._watched: np.ndarray | None = None
        self._scores: np.ndarray | None = None
        self._arrived = asyncio.Event()
        self._interrupted = False
        self._doing = "between steps"

    async def _in_torch(self, call: Any, *args: Any) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._torch, call, *args)

    async def start(self) -> dict[str, Any]:
        """Load the model and bind the socket. Returns the endpoint and whereabouts."""
        self.lag.start()
        await self._in_torch(self._load)
        self.receiver = Receiver(self.run_id, self.config.transport, self._arrive)
        endpoint = await self.receiver.start()
        self.events.info("learner_started", endpoint=endpoint, pid=os.getpid(), backend=self.config.learner.backend)
        assert self.backend is not None
        gpus = await self._in_torch(self.backend.gpus)
        return {"endpoint": endpoint, "pid": os.getpid(), "host": socket.gethostname(), "gpus": gpus}

    def _load(self) -> None:
        path = Path(self.model_path)
        self._cost = cost_model(json.loads((path / "config.json").read_text()))
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

    async def publish_through(self, backend: str, watched: list[int] | None) -> None:
        """By which transport versions go out, and which text is scored with each of them; see `actors.delivery`."""
        assert self.backend is not None
        self._watched = None if watched is None else np.asarray(watched, np.int32)
        await self._in_torch(self.backend.publish_through, backend)

    async def publish(self) -> Published:
        """Copy and write the current weights; see `write`."""
        await self._snapshot()
        return await self.write()

    async def _snapshot(self) -> None:
        """Copy the current weights, for `write`, as soon as the version before them is written: one copy waits at most."""
        assert self.backend is not None
        limit = self.config.weights.write_timeout
        try:
            await asyncio.wait_for(self._nothing_to_write.wait(), limit)
        except TimeoutError as error:
            raise TimeoutError(
                f"version {self.version} has to wait for version {self.version - 1}, which was not written within "
                f"{limit:g} s (weights.write_timeout)"
            ) from error
        await self._in_torch(self.backend.snapshot, self.version)
        self._nothing_to_write.clear()
        if self._watched is not None:
            self._scores = await self._in_torch(self.backend.score, self._watched)

    async def write(self, reading: Sequence[int] = ()) -> Published:
        """Write the weights that were copied last where engines find them, beside whatever else the learner does.

        Versions that engines are `reading` stay.
        """
        assert self.backend is not None
        began, scores = time.monotonic(), self._scores
        try:
            with self.timeline.span("write", version=self.version):
                writing = asyncio.get_running_loop().run_in_executor(self._writer, self.backend.write, reading)
                publication = await asyncio.wait_for(writing, self.config.weights.write_timeout)
        finally:
            self._nothing_to_write.set()  # whatever became of it, no step waits for it any more
        return Published(publication, scores, time.monotonic() - began)

    async def score(self, token_ids: list[int]) -> np.ndarray:
        assert self.backend is not None
        return await self._in_torch(self.backend.score, np.asarray(token_ids, np.int32))

    def status(self) -> dict[str, Any]:
        """For who watches whether anything moves; cheap. `writing`: a version that engines are to have is not written yet."""
        schedule = self.config.schedule
        return {
            "pid": os.getpid(),
            "host": socket.gethostname(),
            "doing": self._doing,
            "steps": self.steps,
            "received": self.receiver.received,
            "ready_groups": self.buffer.ready_groups(),
            "lacking": self.buffer.lacking(max(schedule.groups_per_step, schedule.window)),
            "writing": not self._nothing_to_write.is_set(),
        }

    async def dump_stacks(self, reason: str) -> str:
        """What this process is doing, to `stacks/learner.txt`."""
        return str(dump_stacks(self.run_dir / "stacks" / "learner.txt", reason))

    def missing(self, group_indices: list[int]) -> dict[int, list[int]]:
        """Episodes of these groups that have not arrived."""
        return {g: self.buffer.missing(g) for g in group_indices}

    async def train_step(self, last: bool = False) -> dict[str, Any] | None:
        """Wait for the next groups, train one step on them; copy the new weights when it is time, or if it is the `last`.

        Returns metrics, whether there are new weights (then `write` has to be called), the groups consumed, and episode
        previews; None if interrupted while waiting, which has no end of its own (`actors.watch`). Raises `AgeError`, without
        training, if a token is older than the schedule allows.
        """
        self._doing = "waiting"
        try:
            return await self._train_step(last)
        finally:
            self._doing = "between steps"

    async def _train_step(self, last: bool) -> dict[str, Any] | None:
        waited_from = time.monotonic()
        with self.timeline.span("wait", step=self.steps + 1):
            indices = await self._wait_for_groups()
        if not indices:
            return None
        waited, self._doing = time.monotonic() - waited_from, "training"
        groups, _ = self.buffer.take(indices)
        trajectories = [t for g in groups for t in g]
        version = self.version
        check_ages(groups, version, self.age_bound)
        ages = age_metrics(groups, version, self.age_bound, time.time(), self.config.schedule.max_token_age)
        step_from = time.monotonic()
        with self.timeline.span("train", step=self.steps + 1):
            metrics = await self._in_torch(self._train, groups)
        trained = time.monotonic()
        self.steps += 1
        self._since = [self._since[0] + 1, self._since[1] + len(indices)]
        if metrics["optimizer/skipped"]:
            self.events.warning("step_skipped", step=self.steps, grad_norm=metrics["grad_norm"])
        for index in indices:
            self.receiver.forget(index)
        due = last or self._since[0] == self.config.schedule.steps_per_publication
        if due:
            self.version += 1
            self._since = [0, 0]
            with self.timeline.span("snapshot", step=self.steps, version=self.version):
                await self._snapshot()
        metrics |= self._episode_metrics(trajectories) | ages
        metrics |= {f"lag/learner_{name}": value for name, value in self.lag.figures().items()}
        metrics |= {
            "transport/received": self.receiver.received,
            "transport/duplicates": self.receiver.duplicates,
            "transport/rejected": self.receiver.rejected,
            "learner/wait_seconds": waited,
            "learner/step_seconds": trained - step_from,
            "weights/snapshot_seconds": time.monotonic() - trained,
            "weights/write_seconds": 0.0,
            "buffer/ready_groups": self.buffer.ready_groups(),
            "batch/groups": len(indices),
        }
        previews = [
            {"group": t.group_index, "reward": t.reward, "messages": t.preview, "rewards": [x.reward for x in t.turns]}
            for t in trajectories
            if t.preview
        ]
        return {
            "metrics": metrics,
            "new_weights": due,
            "version": version + 1,
            "groups": indices,
            "previews": previews[:2],
        }

    async def _wait_for_groups(self) -> list[int]:
        """The groups that the next step takes; none if interrupted."""
        schedule = self.config.schedule
        at_least = at_most = schedule.groups_per_step
        if schedule.tokens_per_step:
            steps, consumed = self._since
            at_most = most_groups(
                slots=slots_of(schedule.max_staleness, at_least, schedule.steps_per_publication),
                groups_per_step=at_least,
                steps_left=schedule.steps_per_publication - steps,
                consumed_since=consumed,
            )
        while not (indices := self.buffer.batch(at_least, at_most, schedule.tokens_per_step)):
            if self._interrupted:
                return []
            self._arrived.clear()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._arrived.wait(), 1.0)
        return [] if self._interrupted else indices

    def _train(self, groups: list[list[Trajectory]]) -> dict[str, float]:
        assert self.backend is not None
        minibatches, metrics = prepare(groups, self.config)
        samples = [s for part in minibatches for s in part]
        learner = self.config.learner
        packed = [
            pack_for_ranks(part, learner.max_tokens_per_micro_batch, ranks=learner.parallel.dp, cost=self._cost)
            for part in minibatches
        ]
        results = self.backend.train(packed, version=self.version, trace=self.tracer.wants(samples))
        for result in results:
            if result.metrics["optimizer/broken"]:
                self.events.error(
                    "trust_region_broke",
                    step=self.steps + 1,
                    measured=result.metrics[MEASURED_DRIFT],
                    allowed=self.config.algorithm.rollout_kl.max,
                    hint="algorithm.rollout_kl.max: no update was made; look at staleness, lr and routing/agreement",
                )
        result = combined(results)
        self.tracer.write(self.steps + 1, samples, result)
        return result.metrics | metrics

    @staticmethod
    def _episode_metrics(trajectories: list[Trajectory]) -> dict[str, float]:
        played = [t for t in trajectories if t.turns]
        rewards = [t.reward for t in played] or [0.0]
        endings = Counter(t.stop_reason for t in trajectories)
        return {
            "reward/mean": float(np.mean(rewards)),
            "reward/max": float(np.max(rewards)),
            "episode/turns_mean": float(np.mean([len(t.turns) for t in played] or [0])),
            "episode/rows_mean": float(np.mean([len(t.samples) for t in played] or [0])),
            **{f"episode/ended_{reason}": float(endings[reason]) for reason in ENDINGS},
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
        self.lag.stop()
        if hasattr(self, "receiver"):
            await self.receiver.close()
        if self.backend is not None:
            # Published files that a running step keeps from being removed now go when the next run starts.
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._in_torch(self.backend.close), CLOSE_SECONDS)
        self._torch.shutdown(wait=False, cancel_futures=True)
        self._writer.shutdown(wait=False, cancel_futures=True)
