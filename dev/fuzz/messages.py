"""Fuzzing of a receiver without a socket with mutated messages, and of recovery with
mutated spool files."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dev.fuzz.common import FuzzReport, InputMonitor, make_specimen, mutate_bytes
from r3async.config import BufferConfig, TransportConfig
from r3async.data import control_messages, wire, wire_frames
from r3async.data.packed_routes import RouteForm
from r3async.data.tokens import SCHEMA, Trajectory
from r3async.transport import ReceivedTrajectory, TrajectoryReceiver
from r3async.transport.null_socket import NullSocket
from r3async.transport.spool import SPOOL_FORMAT, Spool
from r3async.world import MessageHandler
from r3async.world.curve_keys import generate_keys
from r3async.world.real import RealWorld


def mutate_control(rng: random.Random, frame: bytes) -> bytes:
    """Return a mutated control frame, mostly with a valid checksum. Otherwise almost none would
    pass the checksum."""
    if rng.random() < 0.2:
        return mutate_bytes(rng, frame)
    return control_messages.append_control_crc(mutate_bytes(rng, frame[: -wire_frames.CRC_BYTES]))


def forge_trajectory(rng: random.Random, frames: Sequence[bytes]) -> list[bytes]:
    """Return the frames of a trajectory with a mutated header, and perhaps a mutated column, and
    a valid checksum."""
    header, *columns = frames
    body = mutate_bytes(rng, wire.read_trajectory_header(header).body) or b"\xc0"
    if rng.random() < 0.3:
        i = rng.randrange(len(columns))
        columns[i] = mutate_bytes(rng, columns[i])
    return [wire.encode_trajectory_header(body, columns), *columns]


def mutate_frames(rng: random.Random, frames: list[bytes]) -> list[bytes]:
    """Return a message that differs from `frames` in one to three places: in bytes, or
    in whole frames."""
    frames = list(frames)
    for _ in range(rng.randint(1, 3)):
        i = min(rng.randrange(len(frames)), rng.randrange(len(frames)))
        kind = rng.randrange(8)
        if kind == 0 and len(frames) > 1:
            del frames[i]
        elif kind == 1:
            frames.insert(i, frames[rng.randrange(len(frames))])
        elif kind == 2:
            j = rng.randrange(len(frames))
            frames[i], frames[j] = frames[j], frames[i]
        else:
            frames[i] = (mutate_bytes if i else mutate_control)(rng, frames[i])
    return frames


class AnswerSocket(NullSocket):
    """A substitute for the receiver's socket that keeps the answers."""

    def __init__(self) -> None:
        self.answers: list[control_messages.ControlMessage] = []

    def send(self, frames: Sequence[wire_frames.Frame]) -> int:
        self.answers.append(control_messages.decode_control(frames[1]))
        return 0


class AnswerSockets:
    """An implementation of `Sockets` whose router is the given socket."""

    def __init__(self, socket: AnswerSocket):
        self._socket = socket

    def bind_router(
        self, address: str, on_message: MessageHandler, **options: object
    ) -> AnswerSocket:
        return self._socket

    async def close(self) -> None:
        pass


class AnswerWorld(RealWorld):
    def __init__(self, socket: AnswerSocket):
        self._socket = socket

    def open_sockets(self) -> Any:
        return AnswerSockets(self._socket)


class IdentityFrame:
    """A substitute for a ZeroMQ frame, of which the receiver reads only `bytes`:
    for the identity."""

    def __init__(self, data: bytes):
        self.bytes = data


async def fuzz_receiver(count: int, seed: int) -> FuzzReport:
    """Send `count` mutated messages to a receiver, and report the outcomes.

    Raises `AssertionError` for a message that is mistaken for another trajectory, or refused
    without a reason.
    """
    rng = random.Random(seed)
    originals = [
        make_specimen(0, (9, 40)),
        make_specimen(1, (130,)),
        make_specimen(2, (3, 4, 5, 64)),
    ]
    originals += [make_specimen(3, (9, 700), (6, 4)), make_specimen(4, (700, 3), (6, 4))]
    forms: list[RouteForm] = ["plain", "plain", "plain", "bits", "bits"]
    encoded = [
        [bytes(f) for f in wire.encode_trajectory(t, routes=form)]
        for t, form in zip(originals, forms, strict=True)
    ]
    by_id = {t.trajectory_id: t for t in originals}
    fits = False
    socket = AnswerSocket()

    def check_trajectory(trajectory: Trajectory) -> None:
        if fits:  # with a valid checksum it may be another trajectory, but a valid one
            decoded = wire.decode_trajectory(wire.encode_trajectory(trajectory))
            for sample in decoded.samples:  # routes are unpacked when they are read
                assert all(len(column) == len(sample.table) for _, column in sample.table.items())
        else:
            assert trajectory == by_id.get(trajectory.trajectory_id), "taken for another trajectory"

    async def receive_trajectories() -> None:
        async for batch in receiver:
            for received in batch:
                await take_in(received)

    async def take_in(received: ReceivedTrajectory) -> None:
        trajectory = received.trajectory
        try:
            check_trajectory(trajectory)
        except Exception as error:
            failures.append(f"{type(error).__name__}: {error}")
            await receiver.reject(received, "it failed")
            return
        receiver.accept(received)
        receiver.release_trajectory(trajectory.trajectory_id)
        receiver.ledger.forget_unconsumed()

    settings = TransportConfig(max_message_bytes=2**20, credit_bytes=2**20)
    receiver = TrajectoryReceiver(
        "run",
        settings,
        keys=generate_keys()[0],
        window=0,
        world=AnswerWorld(socket),
    )
    await receiver.start()
    receiving = asyncio.create_task(receive_trajectories())
    failures: list[str] = []
    handler = logging.Handler(logging.ERROR)
    handler.emit = lambda record: failures.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("r3async").addHandler(handler)
    hello = control_messages.encode_control(
        control_messages.Hello("s", "raw", "run", SCHEMA.fingerprint)
    )
    watch = InputMonitor(count)
    try:
        for _ in range(count):
            some = rng.sample(range(len(originals)), rng.choice([1, 1, 2, len(originals)]))
            named = [
                (originals[i].trajectory_id, originals[i].group_index, encoded[i]) for i in some
            ]
            fits = rng.random() < 0.3
            if fits:
                named[0] = (*named[0][:2], forge_trajectory(rng, encoded[some[0]]))
            items = [
                control_messages.DeliveryItem(name, group, 100_000, [len(f) for f in frames])
                for name, group, frames in named
            ]
            deliver = [
                bytes(f)
                for f in control_messages.encode_delivery(
                    "s", items, [frames for _, _, frames in named]
                )
            ]
            receiver._on_message([IdentityFrame(b"raw"), hello])
            socket.answers.clear()
            alone = rng.random() < 0.1
            message = (
                [mutate_control(rng, hello)]
                if alone
                else deliver
                if fits
                else mutate_frames(rng, deliver)
            )
            with watch.measure_input():
                receiver._on_message([IdentityFrame(b"raw"), *message])
                while len(receiver._intake):  # noqa: ASYNC110
                    await asyncio.sleep(0)
                if receiver._pending_acks:
                    receiver._send_acks()
            watch.outcomes[_judge_answers(socket.answers)] += 1
            assert receiver.unreleased_bytes == 0, "memory was lost"
        assert not failures, failures[0]
    finally:
        receiving.cancel()
        await receiver.close()
        logging.getLogger("r3async").removeHandler(handler)
    return watch.make_report()


def _judge_answers(answers: list[control_messages.ControlMessage]) -> str:
    for answer in answers:
        if isinstance(answer, control_messages.Reject | control_messages.Refusal):
            assert answer.reason, "refused without a reason"
            return "refused with a reason"
        if isinstance(answer, control_messages.Ack):
            return "taken, equal"
    return "a valid control message, or one of an earlier session"


async def fuzz_spool(count: int, seed: int, directory: Path) -> FuzzReport:
    """Recover trajectories from `count` mutated spool files, and report the outcomes.

    Raises `AssertionError` for a file that returns what was not written, or loses something
    without a report.
    """
    rng = random.Random(seed)
    written = [make_specimen(5, (9, 40)), make_specimen(10, (130,)), make_specimen(15, (3, 4, 64))]
    path = directory / f"{0:09d}-0000.spool"
    ends = {0}
    for trajectory in written:
        offset, length = SPOOL_FORMAT.append_record(
            path, wire.encode_trajectory(trajectory), fsync=False
        )
        ends.add(offset + length)
    written_bytes = path.read_bytes()
    spool = Spool(directory, BufferConfig(durability="disk"))
    watch = InputMonitor(count)
    for _ in range(count):
        data = written_bytes
        for _ in range(rng.randint(1, 2)):
            data = mutate_bytes(rng, data)
        path.write_bytes(data)
        with watch.measure_input():
            recovered, _, damage = spool._scan_directory()
        assert all(spooled.trajectory in written for spooled in recovered), (
            "read what was not written"
        )
        assert all(d.reason for d in damage), "damage without a reason"
        # A file that is cut at the end of a record looks as if nothing more had been written to it.
        assert damage or len(recovered) == len(written) or len(data) in ends, (
            "lost without a report"
        )
        watch.outcomes["refused with a reason" if damage else "read, equal"] += 1
        watch.outcomes["trajectories that were saved from damaged files"] += (
            len(recovered) if damage else 0
        )
    await spool.close()
    return watch.make_report()
