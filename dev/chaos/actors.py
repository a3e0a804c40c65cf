"""Actors with faulty connections between generators and learner, and learners with a known
fault to be detected."""

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

from dev.chaos.accounting import AcknowledgedRecord, DamageRecord, RelayRecord, SentRecord
from dev.chaos.relay import Direction, MessageRelay, NoiseRates, TcpProxy
from r3async.actors.driver import RunHandle, RunLauncher
from r3async.actors.generator import GeneratorActor
from r3async.actors.learner import LearnerActor, TrainStepResult
from r3async.actors.run_setup import RunSetup
from r3async.data.control_messages import Ack, Deliver, decode_control, join_item_frames
from r3async.data.tokens import Trajectory
from r3async.data.wire import decode_trajectory
from r3async.data.wire_frames import WireError
from r3async.record.trained_trajectories import checksum_tokens
from r3async.rollout.engine import InstallReport
from r3async.schedule.groups import GroupBuffer
from r3async.transport import TrajectoryLedger
from r3async.transport.sender import TrajectorySender
from r3async.weights.interfaces import TransferOffer
from r3async.weights.tcp import TcpSource
from r3async.world import World
from r3async.world.appending import AppendFile
from r3async.world.curve_keys import ClientKeys
from r3async.world.files import replace_file
from r3async.world.processes import HOST_NAME_VARIABLE
from r3async.world.real import REAL_WORLD

LATE_SECONDS = 2.0
"""Seconds by which `AckBeforeSpool` delays its writes to the spool."""


def chaos_directory(run_dir: Path) -> Path:
    """Return the directory for files of chaos, beside the run's own directory, which
    belongs to the run."""
    return run_dir.with_name(f"{run_dir.name}.chaos")


class RelayRecorder:
    """Recorder of the messages that pass one relay. Each is recorded before it is passed on."""

    def __init__(self, path: Path):
        self._file = AppendFile(path, world=REAL_WORLD)

    def __call__(self, direction: Direction, frames: Sequence[bytes]) -> None:
        try:
            message = decode_control(frames[0])
        except WireError:
            return
        if isinstance(message, Deliver):
            for item, pieces in zip(message.items, message.split_by_item(frames[1:]), strict=True):
                self._append_record(
                    self.make_sent_record(decode_trajectory(join_item_frames(item, pieces)))
                )
        elif isinstance(message, Ack):
            self._append_record(AcknowledgedRecord(time.time(), list(message.ids)))

    def record_damage(self, direction: Direction) -> None:
        self._append_record(DamageRecord(time.time()))

    @staticmethod
    def make_sent_record(trajectory: Trajectory) -> SentRecord:
        versions = [int(s.table["policy_version"].max(initial=-1)) for s in trajectory.samples]
        return SentRecord(
            time.time(),
            trajectory.trajectory_id,
            trajectory.group_index,
            f"{trajectory.generator_id} {trajectory.started_at!r}",
            max(versions, default=-1),
            checksum_tokens(trajectory),
            trajectory.started_at,
        )

    def _append_record(self, message: RelayRecord) -> None:
        self._file.append(msgspec.json.encode(message))


class LearnerAddresses(msgspec.Struct, frozen=True):
    """Addresses at which the learner receives trajectories and serves weights."""

    trajectories: str
    weights: str


def addresses_file(run_dir: Path, generator_id: str) -> Path:
    """Return the file with the `LearnerAddresses` that a generator was given."""
    return chaos_directory(run_dir) / f"{generator_id}.ports"


def blocking_file(run_dir: Path, generator_id: str) -> Path:
    """Return the file that, while it exists, blocks the connection from which the generator
    fetches weights."""
    return chaos_directory(run_dir) / f"{generator_id}.blocked"


def generator_memory(directory: str, generator_id: str) -> Path:
    """Return the directory of a generator's weights, if `weights.directory` is the
    learner's `directory`."""
    return Path(directory).with_name(generator_id)


class ChaosGenerator(GeneratorActor):
    """A generator that reaches the learner through a `MessageRelay` in its own process.

    With `weights.backend = "tcp"`, the transfer of weights treats it as on a separate host: weights
    come over a `TcpProxy`, into a folder that no other generator uses.
    """

    def __init__(self, world: World, setup: RunSetup, generator_id: str, *args: Any):
        self._is_separate_host = setup.config["weights"]["backend"] == "tcp"
        if self._is_separate_host:
            os.environ[HOST_NAME_VARIABLE] = generator_id
        super().__init__(world, setup, generator_id, *args)
        weights = self.config.weights
        if self._is_separate_host and weights.directory:
            weights.directory = str(generator_memory(weights.directory, generator_id))
        self._endpoint = ""
        """Address at which the learner receives trajectories."""
        self._proxies: list[TcpProxy] = []

    async def install_version(self, publication: TransferOffer) -> InstallReport:
        return await super().install_version(
            self._fetch_by_proxy(publication) if self._is_separate_host else publication
        )

    def _fetch_by_proxy(self, publication: TransferOffer) -> TransferOffer:
        source: TcpSource = publication.transport_data[0]
        if not self._proxies:
            blocked = blocking_file(self.run_dir, self.generator_id)
            self._proxies.append(TcpProxy(source.endpoint, blocked.exists))
            self._proxies[0].start()
            ports = LearnerAddresses(self._endpoint, source.endpoint)
            replace_file(
                addresses_file(self.run_dir, self.generator_id), msgspec.json.encode(ports)
            )
        source = msgspec.structs.replace(source, endpoint=self._proxies[0].endpoint)
        return msgspec.structs.replace(publication, transport_data=[source])

    def make_sender(self, endpoint: str, keys: ClientKeys) -> TrajectorySender:
        """Start a relay, and return a sender that reaches the learner through it. Weights use
        the original keys."""
        directory = chaos_directory(self.run_dir)
        noise = msgspec.json.decode((directory / "noise.json").read_bytes(), type=NoiseRates)
        seed = zlib.crc32(f"{noise.seed}/{self.generator_id}".encode())
        note = RelayRecorder(directory / f"{self.generator_id}-{os.getpid()}.jsonl")
        self.relay = MessageRelay(
            endpoint, noise, random.Random(seed), note, note.record_damage, keys=keys
        )
        self.relay.start()
        self._endpoint = endpoint
        return super().make_sender(self.relay.endpoint, self.relay.sender_keys)


class AckBeforeSpool(LearnerActor):
    """A faulty learner that acknowledges trajectories before they are on disk."""

    async def start_listening(self, *args: Any) -> dict[str, Any]:
        answer = await super().start_listening(*args)
        spool = self.components.inbox.spool
        assert spool is not None, "buffer.durability = disk"
        put = spool.put_trajectory
        tasks = set()

        async def put_after_delay(*arguments: Any, **options: Any) -> None:
            await asyncio.sleep(LATE_SECONDS)
            await put(*arguments, **options)

        async def put_later(*arguments: Any, **options: Any) -> None:
            tasks.add(asyncio.create_task(put_after_delay(*arguments, **options)))

        spool.put_trajectory = put_later  # type: ignore[method-assign]
        return answer


class UnlinkBeforeCommit(LearnerActor):
    """A faulty learner that deletes trained groups from the spool before a checkpoint has them."""

    async def run_step(
        self, is_last: bool = False, with_probe_scores: bool = False
    ) -> TrainStepResult | None:
        result = await super().run_step(is_last, with_probe_scores)
        if result is not None:
            spool = self.components.inbox.spool
            assert spool is not None, "buffer.durability = disk"
            await spool.delete_trained(result.groups)
        return result


class NoMemory(TrajectoryLedger):
    def __contains__(self, key: tuple[int, str]) -> bool:
        return False


class KeepsAll(GroupBuffer):
    """A group buffer that also keeps a second trajectory of the same episode."""

    def needs_trajectory(self, trajectory: Trajectory) -> bool:
        return True

    def add(self, trajectory: Trajectory, nbytes: int) -> bool:
        if not super().needs_trajectory(trajectory):
            group = self._groups.get(trajectory.group_index)
            if group is None:
                return False
            group[self.group_size + len(group)] = (trajectory, nbytes)
            return True
        return super().add(trajectory, nbytes)

    def is_complete(self, group_index: int) -> bool:
        return not self.missing_in_group(group_index)

    def episodes_of(self, groups: Sequence[int]) -> list[list[Trajectory]]:
        return [[t for t, _ in self._groups[group].values()] for group in groups]


class NoDedupe(LearnerActor):
    """A faulty learner that takes a trajectory as often as it is delivered."""

    async def start_listening(self, *args: Any) -> dict[str, Any]:
        model = self.model
        schedule = self.config.schedule
        taken = model.buffer.consumed
        model.buffer = KeepsAll(
            schedule.group_size, schedule.window, head=taken.head, beyond=sorted(taken.beyond_head)
        )
        answer = await super().start_listening(*args)
        self.components.inbox.receiver.ledger = NoMemory()
        return answer


LEARNER_FAULTS: dict[str, type[LearnerActor]] = {
    "ack-before-spool": AckBeforeSpool,
    "no-dedupe": NoDedupe,
    "unlink-before-commit": UnlinkBeforeCommit,
}
"""Faulty learners by name. The accounting must detect each fault."""


def make_chaos_launcher(fault: str, begun: Callable[[], object]) -> type[RunLauncher]:
    """Return a launcher that starts runs with `ChaosGenerator`s.

    Args:
        fault: One of `LEARNER_FAULTS`, or "" for the real learner.
        begun: Called whenever the actors of a run exist.
    """

    class ChaosLauncher(RunLauncher):
        learner_class = LEARNER_FAULTS[fault] if fault else LearnerActor
        generator_class = ChaosGenerator

        def start(self) -> RunHandle:
            running = super().start()
            begun()
            return running

    return ChaosLauncher
