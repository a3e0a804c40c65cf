"""Mutated messages into a receiver without a socket."""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections import Counter
from collections.abc import Sequence
from typing import Any

from r3async.config import TransportConfig
from r3async.data.records import SCHEMA, Trajectory
from r3async.tools.fuzz.common import WARM, Report, mutate_bytes, resident, specimen
from r3async.transport import Receiver, wire
from r3async.transport.keys import new_keys
from r3async.transport.sockets import NoSocket
from r3async.world import OnMessage
from r3async.world.real import RealWorld


def mutate_control(chance: random.Random, frame: bytes) -> bytes:
    """Bytes changed, and most often signed again: or next to none would come past the checksum."""
    if chance.random() < 0.2:
        return mutate_bytes(chance, frame)
    return wire.sign_control(mutate_bytes(chance, frame[: -wire.CRC_BYTES]))


def mutate_frames(chance: random.Random, frames: list[bytes]) -> list[bytes]:
    """A message that differs from `frames` in one to three places: bytes, whole frames, or a header signed again."""
    frames = list(frames)
    if len(frames) > 1 and chance.random() < 0.3:
        body = mutate_bytes(chance, wire.read_header(frames[1]).body) or b"\xc0"
        if chance.random() < 0.3:
            i = chance.randrange(2, len(frames))
            frames[i] = mutate_bytes(chance, frames[i])
        frames[1] = wire.with_checksum(body, frames[2:])
        return frames
    for _ in range(chance.randint(1, 3)):
        i = min(chance.randrange(len(frames)), chance.randrange(len(frames)))
        kind = chance.randrange(8)
        if kind == 0 and len(frames) > 1:
            del frames[i]
        elif kind == 1:
            frames.insert(i, frames[chance.randrange(len(frames))])
        elif kind == 2:
            j = chance.randrange(len(frames))
            frames[i], frames[j] = frames[j], frames[i]
        else:
            frames[i] = (mutate_bytes if i else mutate_control)(chance, frames[i])
    return frames


class Ear(NoSocket):
    """Stands in for the receiver's socket: keeps the answers."""

    def __init__(self) -> None:
        self.answers: list[wire.Message] = []

    def send(self, frames: Sequence[wire.Frame]) -> int:
        self.answers.append(wire.decode_control(frames[1]))
        return 0


class Ears:
    """`Sockets` whose router is `ear`."""

    def __init__(self, ear: Ear):
        self._ear = ear

    def router(self, address: str, on_message: OnMessage, **options: object) -> Ear:
        return self._ear

    async def close(self) -> None:
        pass


class EarWorld(RealWorld):
    def __init__(self, ear: Ear):
        self._ear = ear

    def sockets(self) -> Any:
        return Ears(self._ear)


class Bytes:
    """Stands in for a frame of ZeroMQ: only its `bytes` are used, of the identity."""

    def __init__(self, data: bytes):
        self.bytes = data


async def fuzz_receiver(count: int, seed: int) -> Report:
    """Raises `AssertionError` for a message that was mistaken for another trajectory, or answered without a reason."""
    chance = random.Random(seed)
    originals = [specimen(0, (9, 40)), specimen(1, (130,)), specimen(2, (3, 4, 5, 64))]
    encoded = [[bytes(f) for f in wire.encode_trajectory(t)] for t in originals]
    by_id = {t.trajectory_id: t for t in originals}
    outcomes: Counter[str] = Counter()
    signed = False
    ear = Ear()

    def take(trajectory: Trajectory, nbytes: int) -> None:
        if signed:  # Past the checksum it may be another trajectory, but a valid one.
            assert wire.decode_trajectory(wire.encode_trajectory(trajectory)) is not None
        else:
            assert trajectory == by_id.get(trajectory.trajectory_id), "taken for another trajectory"
        receiver.release(trajectory.trajectory_id)
        receiver.ledger.discard(trajectory.group_index, trajectory.trajectory_id)

    settings = TransportConfig(max_message_bytes=2**20, credit_bytes=2**20)
    receiver = Receiver("run", settings, take, keys=new_keys()[0], window=0, world=EarWorld(ear))
    await receiver.start()
    failures: list[str] = []
    handler = logging.Handler(logging.ERROR)
    handler.emit = lambda record: failures.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("r3async").addHandler(handler)
    hello = wire.encode_control(wire.Hello("s", "raw", "run", SCHEMA.fingerprint))
    began, slowest, warm = time.perf_counter(), 0.0, 0
    try:
        for n in range(count):
            i = chance.randrange(len(originals))
            original = originals[i]
            name, group = original.trajectory_id, original.group_index
            deliver = [wire.encode_control(wire.Deliver("s", name, group, 100_000)), *encoded[i]]
            receiver._on_message([Bytes(b"raw"), hello])
            ear.answers.clear()
            alone = chance.random() < 0.1
            message = [mutate_control(chance, hello)] if alone else mutate_frames(chance, deliver)
            signed = len(message) > 1 and _is_signed(message)
            start = time.perf_counter()
            receiver._on_message([Bytes(b"raw"), *message])
            while len(receiver._intake):  # noqa: ASYNC110
                await asyncio.sleep(0)
            if receiver._acks:
                receiver._acknowledge()
            slowest = max(slowest, time.perf_counter() - start)
            outcomes[_judge(ear.answers)] += 1
            assert receiver.bytes_held == 0, "memory was lost"
            if n == int(count * WARM):
                warm = resident()
        assert not failures, failures[0]
    finally:
        await receiver.close()
        logging.getLogger("r3async").removeHandler(handler)
    seconds = time.perf_counter() - began
    return Report(count, seconds, slowest, (resident() - warm) / 2**20, dict(outcomes))


def _is_signed(message: list[bytes]) -> bool:
    try:
        header = wire.read_header(message[1])
        return wire.checksum([header.packed, *message[2:]]) == header.checksum
    except wire.WireError:
        return False


def _judge(answers: list[wire.Message]) -> str:
    for answer in answers:
        if isinstance(answer, wire.Reject | wire.Refusal):
            assert answer.reason, "refused without a reason"
            return "refused with a reason"
        if isinstance(answer, wire.Ack):
            return "taken, equal"
    return "a valid control message, or one of an earlier session"
