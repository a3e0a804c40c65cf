"""What all three have in common: a report, a trajectory to mutate, and changes of bytes."""

from __future__ import annotations

import gc
import random
import resource
from pathlib import Path

import msgspec
import numpy as np

from r3async.data.records import SCHEMA, Sample, TokenTable, Trajectory, Turn

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


def resident() -> int:
    """Bytes of memory that this process has now, without what nobody refers to any more."""
    gc.collect()
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize()
