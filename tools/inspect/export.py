"""Export trajectories for other programs, as one JSON object per line or as Parquet. Both
hold the same rows.

A row is a trajectory: the facts that `inspect --json` shows, `turns`, `preview`, and `samples`,
each with its columns as lists of one length. A column that a source does not have is left out
(JSON) or null (Parquet). JSON has null for a number that is not finite.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import msgspec

from r3async.data.tokens import SCHEMA

from ..targets import name_target
from .run import InspectError
from .trajectories import InspectedTrajectory

PARQUET_BATCH_ROWS = 64
TRACE_COLUMNS = {"learner_logprobs": ("float32", 0), "learner_experts": ("uint16", 2)}
"""Columns of traces that are not in `tokens.SCHEMA`: dtype, and number of dimensions
after the tokens."""


def make_row(trajectory: InspectedTrajectory, version: int | None) -> dict[str, Any]:
    """Convert a trajectory to plain lists and numbers."""
    samples = [
        {"sample_id": s.sample_id, "temperature": s.temperature}
        | {n: a.tolist() for n, a in s.columns.items()}
        for s in trajectory.samples
    ]
    turns = [msgspec.to_builtins(turn) for turn in trajectory.turns]
    return trajectory.to_facts(version) | {
        "turns": turns,
        "preview": trajectory.preview,
        "samples": samples,
    }


def export_trajectories(
    trajectories: Iterable[InspectedTrajectory], path: Path, version: int | None
) -> int:
    """Write `path` atomically and return the number of rows.

    Raises `InspectError` for a name that ends in neither `.jsonl` nor `.parquet`, and where Parquet
    is not installed; `OSError` where `path` cannot be written.
    """
    writers = {".jsonl": _write_jsonl, ".parquet": _write_parquet}
    if path.suffix not in writers:
        raise InspectError(f"--export {path}: the name has to end in .jsonl or .parquet")
    aside = path.with_name(f".{path.name}.tmp-{os.getpid()}")
    try:
        with name_target(path):
            count = writers[path.suffix]((make_row(seen, version) for seen in trajectories), aside)
            aside.replace(path)
    finally:
        with contextlib.suppress(OSError):
            aside.unlink()
    return count


def _write_jsonl(rows: Iterator[dict[str, Any]], path: Path) -> int:
    count = 0
    with path.open("xb") as file:
        for row in rows:
            file.write(msgspec.json.encode(row) + b"\n")
            count += 1
    return count


def _write_parquet(rows: Iterator[dict[str, Any]], path: Path) -> int:
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError as error:
        raise InspectError(
            'Parquet needs pyarrow: pip install "r3async[parquet]"; or --export FILE.jsonl, '
            "which needs nothing"
        ) from error
    schema = _make_parquet_schema(pyarrow)
    count = 0
    with parquet.ParquetWriter(path, schema, compression="zstd") as writer:
        while some := list(islice(rows, PARQUET_BATCH_ROWS)):
            writer.write_table(pyarrow.Table.from_pylist(some, schema=schema))
            count += len(some)
    return count


def _make_parquet_schema(pa: Any) -> Any:
    """Return the schema of a row. Columns of samples follow their declaration, with
    the widest dtype."""
    kinds = {
        "bool": pa.bool_(),
        "int32": pa.int32(),
        "float32": pa.float32(),
        "uint16": pa.uint16(),
    }
    columns = {
        c.name: ("int32" if c.holds_sets else c.dtypes[-1], len(c.inner_dims) + c.holds_sets)
        for c in SCHEMA.columns.values()
    } | TRACE_COLUMNS

    def listed(dtype: str, inner: int) -> Any:
        kind = kinds[dtype]
        for _ in range(1 + inner):
            kind = pa.list_(kind)
        return kind

    sample = [("sample_id", pa.string()), ("temperature", pa.float64())]
    sample += [(name, listed(*of)) for name, of in columns.items()]
    counts = ("index", "sample", "start", "stop")
    turn = [
        *((name, pa.int64()) for name in counts),
        ("reward", pa.float64()),
        ("stop_reason", pa.string()),
    ]
    fields = {
        **dict.fromkeys(
            ("source", "where", "trajectory_id", "generator_id", "stop_reason"), pa.string()
        ),
        **dict.fromkeys(
            ("step", "learner_version", "group_index", "episode_index", "task_seed"), pa.int64()
        ),
        **dict.fromkeys(
            ("tokens", "sampled", "lineage", "version_min", "version_max", "age"), pa.int64()
        ),
        **dict.fromkeys(("reward", "started_at", "finished_at"), pa.float64()),
        "turns": pa.list_(pa.struct(turn)),
        "preview": pa.list_(pa.struct([("role", pa.string()), ("content", pa.string())])),
        "samples": pa.list_(pa.struct(sample)),
    }
    return pa.schema(list(fields.items()))
