"""Trajectories with random values in every column, as objects and as bytes."""

from typing import Any

import msgspec
import numpy as np
from hypothesis import HealthCheck, settings

from r3async.data import wire
from r3async.data.supports import SupportSets
from r3async.data.tokens import SCHEMA, Sample, TokenSchema, TokenTable, Trajectory, Turn

RAW = [n for n, c in SCHEMA.columns.items() if not c.compressible and not c.holds_sets]
COMPRESSIBLE = [n for n, c in SCHEMA.columns.items() if c.compressible]
ROWS, LAYOUTS, PACKED = range(3)
"""Indices of the entries that stand for a table in a body."""
FAST = settings(max_examples=120, suppress_health_check=[HealthCheck.too_slow])


def make_supports(rng: np.random.Generator, length: int, vocab_size: int = 200) -> SupportSets:
    """Return random supports: some small, some large, some of any tokens, some not recorded."""
    dense = rng.random((length, vocab_size)) < rng.choice([0.0, 0.02, 0.5, 0.98, 1.0], (length, 1))
    sets = SupportSets.from_bitmaps(np.packbits(dense, axis=1, bitorder="little"), vocab_size)
    keep = rng.random(length) < 0.8
    return SupportSets.from_parts(length, [(int(i), sets[i : i + 1]) for i in np.flatnonzero(keep)])


def make_table(
    seed: int, length: int, inner: int = 2, schema: TokenSchema = SCHEMA, optional: bool = True, wide: bool = False
) -> TokenTable:
    """Return a table with random values in every column that the schema declares, whatever they mean."""
    rng = np.random.default_rng(seed)
    columns: dict[str, Any] = {}
    for column in schema.columns.values():
        if column.optional and not optional:
            continue
        if column.holds_sets:
            columns[column.name] = make_supports(rng, length)
            continue
        dtype = np.dtype(column.dtypes[-1 if wide else 0])
        shape = (length, *(inner + i for i in range(len(column.inner_dims))))
        if dtype.kind == "f":
            columns[column.name] = rng.standard_normal(shape).astype(dtype)
        else:
            columns[column.name] = rng.integers(0, 2 if dtype.kind == "b" else 200, shape).astype(dtype)
    return TokenTable(columns, schema)


def make_trajectory(name: str = "t0", tables: list[TokenTable] | None = None, **changes: Any) -> Trajectory:
    tables = [make_table(0, 7), make_table(1, 3)] if tables is None else tables
    fields: dict[str, Any] = {
        "trajectory_id": name,
        "group_index": 4,
        "episode_index": 1,
        "task_seed": 99,
        "generator_id": "g0",
        "stop_reason": "eos",
        "turns": [Turn(i, i, 1, len(t), 0.5, "eos") for i, t in enumerate(tables) if len(t)],
        "samples": [Sample(f"{name}/{i}", table, 0.7) for i, table in enumerate(tables)],
        "started_at": 1.5,
        "finished_at": 2.5,
        "preview": [{"role": "user", "content": "hé 你"}],
    }
    return Trajectory(**(fields | changes))


def as_bytes(frames: list[Any]) -> list[bytes]:
    return [bytes(f) for f in frames]


def forge(frames: list[bytes], change: Any) -> list[bytes]:
    """Return the message with its body changed and a matching checksum, as a defective peer could send it."""
    body = msgspec.msgpack.decode(wire.read_trajectory_header(frames[0]).body)
    for sample in body["samples"]:
        sample["table"][LAYOUTS] = msgspec.msgpack.decode(sample["table"][LAYOUTS])
    body = change(body)
    if isinstance(body, dict):
        for table in (sample["table"] for sample in body.get("samples", ())):
            if isinstance(table, list) and len(table) > LAYOUTS:
                table[LAYOUTS] = msgspec.msgpack.encode(table[LAYOUTS])
    body = body if isinstance(body, bytes) else msgspec.msgpack.encode(body)
    return [wire.encode_trajectory_header(body, frames[1:]), *frames[1:]]


def runny_table(length: int, turns: int = 3) -> TokenTable:
    """Return a table that looks like a sampled episode: prompt, answers, observations."""
    rng = np.random.default_rng(length)
    turn = np.full(length, -1, np.int32)
    rewards = np.zeros(length, np.float32)
    step = length // (2 * turns)
    for i in range(turns if step else 0):
        turn[(2 * i + 1) * step : (2 * i + 2) * step] = i
        rewards[(2 * i + 2) * step - 1] = 0.25 * i
    table = {n: c.filled_rows(length, (4, 2)[: len(c.inner_dims)]) for n, c in SCHEMA.columns.items()}
    return TokenTable(
        table
        | {
            "token_ids": rng.integers(0, 1000, length, dtype=np.int32),
            "turn": turn,
            "rewards": rewards,
            "loss_mask": turn >= 0,
            "policy_version": np.where(turn >= 0, 7, -1).astype(np.int32),
            "rollout_logprobs": -rng.random(length, dtype=np.float32),
            "routed_experts": rng.integers(0, 8, (length, 4, 2), dtype=np.uint8),
        }
    )


def edit(*path: Any, value: Any) -> Any:
    """Return a change that sets one place of the decoded body."""

    def change(body: Any) -> Any:
        place = body
        for key in path[:-1]:
            place = place[key]
        place[path[-1]] = value
        return body

    return change
