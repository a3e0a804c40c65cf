"""Mutated messages into the receiver, and mutated spool files into recovery: nothing may crash, hang, grow or be mistaken.

    python -m tools.fuzz --messages 1000000 --files 100000 --seed 0

runs both without a socket, in one process. Each message is answered with a reason, taken as exactly what was sent, or is
no more than a valid control message; each file gives back only trajectories that were written, and reports the rest.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import random
import resource
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from r3async.buffer.spool import Spool
from r3async.buffer.spool_file import append
from r3async.config import BufferConfig, TransportConfig
from r3async.records import SCHEMA, Sample, TokenTable, Trajectory, Turn
from r3async.transport import Receiver, wire

WARM = 0.2
"""Share of the work after which memory is compared: caches and pools have filled by then."""


class Report(msgspec.Struct, frozen=True):
    """`outcomes` counts what became of each input; `slowest` is the longest that one took, in seconds; `growth_mib` is how
    much the process grew after the first fifth."""

    inputs: int
    seconds: float
    slowest: float
    growth_mib: float
    outcomes: dict[str, int]


def specimen(seed: int, lengths: tuple[int, ...]) -> Trajectory:
    """Several rows, with random columns, nearly constant ones, and routes."""
    rng = np.random.default_rng(seed)
    samples = []
    for i, n in enumerate(lengths):
        table = {c.name: c.filled(n, (3, 2)[: len(c.inner)]) for c in SCHEMA.columns.values()}
        table["token_ids"] = rng.integers(0, 1000, n, dtype=np.int32)
        table["rollout_logprobs"] = -rng.random(n, dtype=np.float32)
        table["loss_mask"] = np.arange(n) > n // 2
        table["routing_recorded"] = rng.random(n) < 0.5
        samples.append(Sample(f"s{i}", TokenTable(table), 0.7))
    turns = [Turn(i, i, 0, n, 0.5, "eos") for i, n in enumerate(lengths)]
    return Trajectory(f"t{seed}", seed % 5, 0, 1, "g0", "eos", turns, samples, 1.0, 2.0, [{"role": "user"}])


def mutate_bytes(chance: random.Random, data: bytes) -> bytes:
    at = chance.randrange(len(data) + 1)
    kind = chance.randrange(6)
    if kind == 0:
        return data[:at] + bytes([chance.randrange(256)]) + data[at + 1 :]
    if kind == 1 and data:
        at = min(at, len(data) - 1)
        return data[:at] + bytes([data[at] ^ (1 << chance.randrange(8))]) + data[at + 1 :]
    if kind == 2:
        return data[:at]
    if kind == 3:
        return data[:at] + chance.randbytes(chance.randrange(9)) + data[at:]
    if kind == 4:
        return (
            data[:at]
            + chance.choice([b"\xdd\xff\xff\xff\xff", b"\x91" * 200, b"\xc6\xff\xff\xff\xff"])
            + data[at + 5 :]
        )
    return chance.randbytes(chance.randrange(80))


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
        frames[1] = wire.sign(body, frames[2:])
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


class Ear:
    """Stands in for the receiver's socket: keeps the answers."""

    def __init__(self) -> None:
        self.answers: list[wire.Message] = []

    def send(self, frames: list[bytes]) -> int:
        self.answers.append(wire.decode_control(frames[1]))
        return 0


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
    receiver = Receiver("run", settings, take, window=0)
    receiver._socket = ear  # type: ignore[assignment]
    failures: list[str] = []
    handler = logging.Handler(logging.ERROR)
    handler.emit = lambda record: failures.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("r3async").addHandler(handler)
    working = asyncio.create_task(receiver._intake.run())
    hello = wire.encode_control(wire.Hello("s", "raw", "run", SCHEMA.fingerprint))
    began, slowest, warm = time.perf_counter(), 0.0, 0
    try:
        for n in range(count):
            i = chance.randrange(len(originals))
            original = originals[i]
            name, group = original.trajectory_id, original.group_index
            offer = wire.encode_control(wire.Offer("s", [wire.Parcel(name, group, 100_000)]))
            deliver = [wire.encode_control(wire.Deliver("s", name, group)), *encoded[i]]
            receiver._on_message([Bytes(b"raw"), hello])  # type: ignore[list-item]
            receiver._on_message([Bytes(b"raw"), offer])  # type: ignore[list-item]
            ear.answers.clear()
            alone = chance.random() < 0.1
            message = (
                [mutate_control(chance, chance.choice([hello, offer]))] if alone else mutate_frames(chance, deliver)
            )
            signed = len(message) > 1 and _is_signed(message)
            start = time.perf_counter()
            receiver._on_message([Bytes(b"raw"), *message])  # type: ignore[list-item]
            while len(receiver._intake):  # noqa: ASYNC110
                await asyncio.sleep(0)
            if receiver._acks:
                receiver._acknowledge()
            slowest = max(slowest, time.perf_counter() - start)
            outcomes[_judge(ear.answers)] += 1
            receiver._pool.drop(b"raw")
            assert receiver._pool.used == 0, "credit was lost"
            if n == int(count * WARM):
                warm = _resident()
        assert not failures, failures[0]
    finally:
        working.cancel()
        logging.getLogger("r3async").removeHandler(handler)
    seconds = time.perf_counter() - began
    return Report(count, seconds, slowest, (_resident() - warm) / 2**20, dict(outcomes))


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


async def fuzz_spool(count: int, seed: int, directory: Path) -> Report:
    """Raises `AssertionError` for a file that gave what was not written, or lost something without a word."""
    chance = random.Random(seed)
    written = [specimen(5, (9, 40)), specimen(10, (130,)), specimen(15, (3, 4, 64))]
    path = directory / f"{0:09d}-0000.spool"
    ends = {0}
    for trajectory in written:
        offset, length = append(path, wire.encode_trajectory(trajectory), fsync=False)
        ends.add(offset + length)
    whole = path.read_bytes()
    outcomes: Counter[str] = Counter()
    spool = Spool(directory, BufferConfig(durability="disk"))
    began, slowest, warm = time.perf_counter(), 0.0, 0
    for n in range(count):
        data = whole
        for _ in range(chance.randint(1, 2)):
            data = mutate_bytes(chance, data)
        path.write_bytes(data)
        start = time.perf_counter()
        found, _, damage = spool._scan()
        slowest = max(slowest, time.perf_counter() - start)
        assert all(kept.trajectory in written for kept in found), "read what was not written"
        assert all(d.reason for d in damage), "damage without a reason"
        # Cut where a record ends is a file to which nothing more was written.
        assert damage or len(found) == len(written) or len(data) in ends, "lost without a word"
        outcomes["refused with a reason" if damage else "read, equal"] += 1
        outcomes["trajectories that were saved from damaged files"] += len(found) if damage else 0
        if n == int(count * WARM):
            warm = _resident()
    await spool.close()
    seconds = time.perf_counter() - began
    return Report(count, seconds, slowest, (_resident() - warm) / 2**20, dict(outcomes))


def _resident() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--messages", type=int, default=1_000_000)
    parser.add_argument("--files", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    reports: dict[str, Any] = {"seed": options.seed}
    reports["receiver"] = asyncio.run(fuzz_receiver(options.messages, options.seed))
    print(msgspec.json.encode(reports["receiver"]).decode(), flush=True)
    with tempfile.TemporaryDirectory(prefix="r3async-fuzz-") as directory:
        reports["spool"] = asyncio.run(fuzz_spool(options.files, options.seed, Path(directory)))
    print(msgspec.json.encode(reports).decode())


if __name__ == "__main__":
    main()
