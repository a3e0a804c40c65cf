"""The run's actors, with a faulty connection between generators and learner; and learners with a known fault, to be detected."""

from __future__ import annotations

import asyncio
import os
import random
import time
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from r3async.actors.generator import GeneratorActor
from r3async.actors.learner import LearnerActor
from r3async.actors.supervise import Pipeline, Running
from r3async.data.records import Trajectory
from r3async.record.steps import checksum
from r3async.schedule.groups import GroupBuffer
from r3async.tools.chaos.accounting import Acknowledged, Damaged, Passed, Sent
from r3async.tools.chaos.relay import Direction, Noise, Relay
from r3async.transport import Ledger
from r3async.transport.wire import Ack, Deliver, WireError, decode_control, decode_trajectory, frames_of
from r3async.world.appending import AppendFile
from r3async.world.keys import ClientKeys, generator_keys

LATE_SECONDS = 2.0
"""By which the learner that acknowledges too early writes too late."""


def chaos_directory(run_dir: Path) -> Path:
    """Beside the run's own, which belongs to the run."""
    return run_dir.with_name(f"{run_dir.name}.chaos")


class Recorder:
    """Records what passes one relay, before it passes."""

    def __init__(self, path: Path):
        self._file = AppendFile(path)

    def __call__(self, direction: Direction, frames: Sequence[bytes]) -> None:
        try:
            message = decode_control(frames[0])
        except WireError:
            return
        if isinstance(message, Deliver):
            for item, pieces in zip(message.items, message.pieces(frames[1:]), strict=True):
                self._write(self._sent(decode_trajectory(frames_of(item, pieces))))
        elif isinstance(message, Ack):
            self._write(Acknowledged(time.time(), list(message.ids)))

    def damage(self, direction: Direction) -> None:
        self._write(Damaged(time.time()))

    @staticmethod
    def _sent(trajectory: Trajectory) -> Sent:
        versions = [int(s.table["policy_version"].max(initial=-1)) for s in trajectory.samples]
        return Sent(
            time.time(),
            trajectory.trajectory_id,
            trajectory.group_index,
            f"{trajectory.generator_id} {trajectory.started_at!r}",
            max(versions, default=-1),
            checksum(trajectory),
            trajectory.started_at,
        )

    def _write(self, message: Passed) -> None:
        self._file.append(msgspec.json.encode(message))


class ChaosGenerator(GeneratorActor):
    """Reaches the learner through a `Relay` of its own process."""

    async def connect(self, endpoint: str, backend: str, keys: ClientKeys | None) -> None:
        directory = chaos_directory(self.run_dir)
        noise = msgspec.json.decode((directory / "noise.json").read_bytes(), type=Noise)
        seed = zlib.crc32(f"{noise.seed}/{self.generator_id}".encode())
        note = Recorder(directory / f"{self.generator_id}-{os.getpid()}.jsonl")
        keys = generator_keys(self.config.transport, keys)
        self.relay = Relay(endpoint, noise, random.Random(seed), note, note.damage, keys=keys)
        self.relay.start()
        await super().connect(self.relay.endpoint, backend, self.relay.sender_keys)


class AckBeforeSpool(LearnerActor):
    """Acknowledges what is not on disk yet."""

    async def listen(self, *args: Any) -> dict[str, Any]:
        answer = await super().listen(*args)
        spool = self.work.reception.spool
        assert spool is not None, "buffer.durability = disk"
        put, tasks = spool.put, set()

        async def late(*arguments: Any, **options: Any) -> None:
            await asyncio.sleep(LATE_SECONDS)
            await put(*arguments, **options)

        async def put_later(*arguments: Any, **options: Any) -> None:
            tasks.add(asyncio.create_task(late(*arguments, **options)))

        spool.put = put_later  # type: ignore[method-assign]
        return answer


class UnlinkBeforeCommit(LearnerActor):
    """Forgets what it trained before a checkpoint has it."""

    async def train_step(self, last: bool = False, scored: bool = False) -> dict[str, Any] | None:
        result = await super().train_step(last, scored)
        if result is not None:
            spool = self.work.reception.spool
            assert spool is not None, "buffer.durability = disk"
            await spool.commit(result["groups"])
        return result


class NoMemory(Ledger):
    def __contains__(self, key: tuple[int, str]) -> bool:
        return False


class KeepsAll(GroupBuffer):
    """Also the second of two that are the same episode."""

    def wants(self, trajectory: Trajectory) -> bool:
        return True

    def add(self, trajectory: Trajectory, nbytes: int) -> bool:
        if not super().wants(trajectory):
            group = self._groups.get(trajectory.group_index)
            if group is None:
                return False
            group[self.samples_per_group + len(group)] = (trajectory, nbytes)
            return True
        return super().add(trajectory, nbytes)

    def complete(self, group_index: int) -> bool:
        return not self.missing(group_index)

    def episodes(self, groups: Sequence[int]) -> list[list[Trajectory]]:
        return [[t for t, _ in self._groups[group].values()] for group in groups]


class NoDedupe(LearnerActor):
    """Takes whatever comes, however often."""

    async def listen(self, *args: Any) -> dict[str, Any]:
        model, schedule = self.model, self.config.schedule
        taken = model.buffer.taken
        model.buffer = KeepsAll(
            schedule.samples_per_group, schedule.window, head=taken.head, beyond=sorted(taken.beyond)
        )
        answer = await super().listen(*args)
        receiver = self.work.reception.receiver
        receiver.ledger = receiver._intake._ledger = NoMemory()
        return answer


FAULTS: dict[str, type[LearnerActor]] = {
    "ack-before-spool": AckBeforeSpool,
    "no-dedupe": NoDedupe,
    "unlink-before-commit": UnlinkBeforeCommit,
}
"""Learners that are wrong, each in its way; the accounting has to show it."""


def chaos_pipeline(fault: str, begun: Callable[[], object]) -> type[Pipeline]:
    """`fault`: one of `FAULTS`, or "" for the learner as it is. `begun()` is called whenever the actors of a run exist."""

    class ChaosPipeline(Pipeline):
        learner = FAULTS[fault] if fault else LearnerActor
        generator = ChaosGenerator

        def start(self) -> Running:
            running = super().start()
            begun()
            return running

    return ChaosPipeline
