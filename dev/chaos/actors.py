"""The run's actors, with a faulty connection between generators and learner; and learners with a known fault, to be detected."""

from __future__ import annotations

import asyncio
import os
import random
import time
import zlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec

from dev.chaos.accounting import Acknowledged, Damaged, Passed, Sent
from dev.chaos.relay import Direction, Line, Noise, Relay
from r3async.actors.driver import RunHandle, RunLauncher
from r3async.actors.generator import GeneratorActor
from r3async.actors.learner import LearnerActor
from r3async.data.tokens import Trajectory
from r3async.data.wire import Ack, Deliver, WireError, decode_control, decode_trajectory, join_item_frames
from r3async.record.writer import checksum_tokens
from r3async.rollout.engine import InstallReport
from r3async.schedule.groups import GroupBuffer
from r3async.transport import TrajectoryLedger
from r3async.transport.sender import TrajectorySender
from r3async.weights.fetch import TcpSource
from r3async.weights.publish import TransferOffer
from r3async.world import World
from r3async.world.appending import AppendFile
from r3async.world.files import replace_file
from r3async.world.processes import HOST_NAME_VARIABLE
from r3async.world.sockets import ClientKeys

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
            for item, pieces in zip(message.items, message.split_by_item(frames[1:]), strict=True):
                self._write(self._sent(decode_trajectory(join_item_frames(item, pieces))))
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
            checksum_tokens(trajectory),
            trajectory.started_at,
        )

    def _write(self, message: Passed) -> None:
        self._file.append(msgspec.json.encode(message))


class Ports(msgspec.Struct, frozen=True):
    """Addresses at which the learner takes trajectories, and gives weights."""

    trajectories: str
    weights: str


def ports_file(run_dir: Path, generator_id: str) -> Path:
    """The `Ports` that a generator was told of."""
    return chaos_directory(run_dir) / f"{generator_id}.ports"


def blocked_line(run_dir: Path, generator_id: str) -> Path:
    """While this file is there, nothing passes between the generator and what the learner gives weights by."""
    return chaos_directory(run_dir) / f"{generator_id}.blocked"


def memory_of(directory: str, generator_id: str) -> Path:
    """Where a generator has its weights, if `weights.directory` is the learner's `directory`."""
    return Path(directory).with_name(generator_id)


class ChaosGenerator(GeneratorActor):
    """Reaches the learner through a `Relay` of its own process. With `weights.backend = "tcp"` it is on a host of its own, as far
    as weights know: they come over a `Line`, into a folder that no other has."""

    def __init__(self, world: World, generator_id: str, run_id: str, config: dict[str, Any], *args: Any):
        self._apart = config["weights"]["backend"] == "tcp"
        if self._apart:
            os.environ[HOST_NAME_VARIABLE] = generator_id
        super().__init__(world, generator_id, run_id, config, *args)
        weights = self.config.weights
        if self._apart and weights.directory:
            weights.directory = str(memory_of(weights.directory, generator_id))
        self._parts = replace(self._parts, make_sender=self._by_relay)
        self._endpoint = ""
        """Where the learner takes trajectories."""
        self._lines: list[Line] = []

    async def install_version(self, publication: TransferOffer) -> InstallReport:
        return await super().install_version(self._by_line(publication) if self._apart else publication)

    def _by_line(self, publication: TransferOffer) -> TransferOffer:
        source: TcpSource = publication.transport_data[0]
        if not self._lines:
            blocked = blocked_line(self.run_dir, self.generator_id)
            self._lines.append(Line(source.endpoint, blocked.exists))
            self._lines[0].start()
            ports = Ports(self._endpoint, source.endpoint)
            replace_file(ports_file(self.run_dir, self.generator_id), msgspec.json.encode(ports))
        source = msgspec.structs.replace(source, endpoint=self._lines[0].endpoint)
        return msgspec.structs.replace(publication, transport_data=[source])

    def _by_relay(self, endpoint: str, *args: Any, keys: ClientKeys, **options: Any) -> TrajectorySender:
        """What sends trajectories to the learner. Weights come with the keys that it was given."""
        directory = chaos_directory(self.run_dir)
        noise = msgspec.json.decode((directory / "noise.json").read_bytes(), type=Noise)
        seed = zlib.crc32(f"{noise.seed}/{self.generator_id}".encode())
        note = Recorder(directory / f"{self.generator_id}-{os.getpid()}.jsonl")
        self.relay = Relay(endpoint, noise, random.Random(seed), note, note.damage, keys=keys)
        self.relay.start()
        self._endpoint = endpoint
        return TrajectorySender(self.relay.endpoint, *args, keys=self.relay.sender_keys, **options)


class AckBeforeSpool(LearnerActor):
    """Acknowledges what is not on disk yet."""

    async def start_listening(self, *args: Any) -> dict[str, Any]:
        answer = await super().start_listening(*args)
        spool = self.components.inbox.spool
        assert spool is not None, "buffer.durability = disk"
        put, tasks = spool.put_trajectory, set()

        async def late(*arguments: Any, **options: Any) -> None:
            await asyncio.sleep(LATE_SECONDS)
            await put(*arguments, **options)

        async def put_later(*arguments: Any, **options: Any) -> None:
            tasks.add(asyncio.create_task(late(*arguments, **options)))

        spool.put_trajectory = put_later  # type: ignore[method-assign]
        return answer


class UnlinkBeforeCommit(LearnerActor):
    """Forgets what it trained before a checkpoint has it."""

    async def train_step(self, is_last: bool = False, with_probe_scores: bool = False) -> dict[str, Any] | None:
        result = await super().train_step(is_last, with_probe_scores)
        if result is not None:
            spool = self.components.inbox.spool
            assert spool is not None, "buffer.durability = disk"
            await spool.delete_trained(result["groups"])
        return result


class NoMemory(TrajectoryLedger):
    def __contains__(self, key: tuple[int, str]) -> bool:
        return False


class KeepsAll(GroupBuffer):
    """Also the second of two that are the same episode."""

    def needs_trajectory(self, trajectory: Trajectory) -> bool:
        return True

    def add(self, trajectory: Trajectory, nbytes: int) -> bool:
        if not super().needs_trajectory(trajectory):
            group = self._groups.get(trajectory.group_index)
            if group is None:
                return False
            group[self.samples_per_group + len(group)] = (trajectory, nbytes)
            return True
        return super().add(trajectory, nbytes)

    def is_complete(self, group_index: int) -> bool:
        return not self.missing_in_group(group_index)

    def episodes_of(self, groups: Sequence[int]) -> list[list[Trajectory]]:
        return [[t for t, _ in self._groups[group].values()] for group in groups]


class NoDedupe(LearnerActor):
    """Takes whatever comes, however often."""

    async def start_listening(self, *args: Any) -> dict[str, Any]:
        model, schedule = self.model, self.config.schedule
        taken = model.buffer.consumed
        model.buffer = KeepsAll(
            schedule.samples_per_group, schedule.window, head=taken.head, beyond=sorted(taken.beyond_head)
        )
        answer = await super().start_listening(*args)
        receiver = self.components.inbox.receiver
        receiver.ledger = receiver._intake._ledger = NoMemory()
        return answer


FAULTS: dict[str, type[LearnerActor]] = {
    "ack-before-spool": AckBeforeSpool,
    "no-dedupe": NoDedupe,
    "unlink-before-commit": UnlinkBeforeCommit,
}
"""Learners that are wrong, each in its way; the accounting has to show it."""


def chaos_pipeline(fault: str, begun: Callable[[], object]) -> type[RunLauncher]:
    """`fault`: one of `FAULTS`, or "" for the learner as it is. `begun()` is called whenever the actors of a run exist."""

    class ChaosPipeline(RunLauncher):
        learner_class = FAULTS[fault] if fault else LearnerActor
        generator_class = ChaosGenerator

        def start(self) -> RunHandle:
            running = super().start()
            begun()
            return running

    return ChaosPipeline
