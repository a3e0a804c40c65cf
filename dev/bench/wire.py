"""The benchmark `bench wire`: bytes and time per token of the wire format, against lists of numbers and pickle, in the
same run."""

from __future__ import annotations

import itertools
import pickle
import time
from collections.abc import Callable
from statistics import median
from typing import Any

import msgspec
import numpy as np

from dev.bench.jobs import table
from r3async.data.packed import RouteForm
from r3async.data.tokens import SCHEMA, Sample, TokenTable, Trajectory, Turn
from r3async.data.wire import decode_trajectory, encode_trajectory

FORMS: tuple[RouteForm, ...] = ("plain", "bits", "dense")
TURNS = 8
ANSWER = 0.5
"""Share of a turn that the policy samples; the rest is the environment's."""


class Timing(msgspec.Struct, frozen=True):
    """Cost of one format: bytes per token, and CPU microseconds per token (the median of the repeats; formats take
    turns). Decoding ends when every column is an array: packed routes are unpacked."""

    bytes_per_token: float
    encode_us: float
    decode_us: float


class Case(msgspec.Struct, frozen=True):
    """The figures of one trajectory, whose routes have `form` on the wire. `decode_ratio` is the decoding time of lists
    of numbers over ours."""

    name: str
    form: RouteForm
    tokens: int
    rows: int
    wire: Timing
    lists: Timing
    pickle: Timing
    decode_ratio: float


class Report(msgspec.Struct, frozen=True):
    benchmark: str
    cases: list[Case]


def sampled_table(tokens: int, routes: tuple[int, int] | None, seed: int = 0) -> TokenTable:
    """Return `tokens` of an episode of `TURNS` turns, as a generator sends them. `routes`: layers and top_k of the
    routes, or None for none."""
    rng = np.random.default_rng(seed)
    turn = np.full(tokens, -1, np.int32)
    rewards = np.zeros(tokens, np.float32)
    edges = np.linspace(0, tokens, TURNS + 1).astype(int)
    for i, (start, stop) in enumerate(itertools.pairwise(edges)):
        first = stop - round((stop - start) * ANSWER)
        turn[first:stop] = i
        rewards[stop - 1] = rng.random()
    columns = {
        "token_ids": rng.integers(0, 150_000, tokens, dtype=np.int32),
        "loss_mask": turn >= 0,
        "rollout_logprobs": np.where(turn >= 0, -rng.exponential(0.5, tokens), 0).astype(np.float32),
        "policy_version": np.where(turn >= 0, 17 + turn // 4, -1).astype(np.int32),
        "turn": turn,
        "rewards": rewards,
    }
    if routes is not None:
        columns["routed_experts"] = sampled_routes(rng, tokens, *routes)
        columns["routing_recorded"] = np.arange(tokens) < tokens - 1
    return TokenTable(columns)


def sampled_routes(rng: np.random.Generator, tokens: int, layers: int, top_k: int, experts: int = 128) -> np.ndarray:
    """Return random routes, uint8 `[tokens, layers, top_k]`: distinct experts in any order. They come from a limited
    number of sets, each shifted by a random number of experts."""
    some = rng.random((4096, experts)).argsort(axis=1)[:, :top_k]
    rows = some[rng.integers(0, len(some), tokens * layers)] + rng.integers(0, experts, (tokens * layers, 1))
    return (rows % experts).reshape(tokens, layers, top_k).astype(np.uint8)


def sampled_trajectory(
    tokens: int, rows: int = 1, routes: tuple[int, int] | None = None, name: str = "t0", group: int = 0
) -> Trajectory:
    """Return a trajectory of `rows` samples with `tokens` each."""
    samples = [Sample(f"{name}/{i}", sampled_table(tokens, routes, i), 1.0) for i in range(rows)]
    turns = [Turn(i, i % rows, 1, tokens, 0.5, "eos") for i in range(max(rows, TURNS))]
    return Trajectory(name, group, 0, 1, "g0", "eos", turns, samples, 1.0, 2.0)


def run(quick: bool) -> Report:
    cases: list[tuple[str, int, int, RouteForm]] = [
        ("no routes", 8192, 1, "plain"),
        ("no routes, short", 512, 1, "plain"),
        ("no routes, 16 rows", 512, 16, "plain"),
        *(("routes 48x8", 2048, 1, form) for form in FORMS),
        *(("routes 48x8, long", 32_768, 1, form) for form in FORMS),
    ]
    if quick:
        cases = [("no routes", 2048, 1, "plain"), *(("routes 48x8", 256, 1, form) for form in FORMS)]
    return Report("wire", [_measure(*case, quick) for case in cases])


def _measure(name: str, tokens: int, rows: int, form: RouteForm, quick: bool) -> Case:
    routes = (48, 8) if name.startswith("routes") else None
    trajectory = sampled_trajectory(tokens, rows, routes)
    total = tokens * rows
    frames = [bytes(f) for f in encode_trajectory(trajectory, routes=form)]
    assert _sorted(decode_trajectory(frames)) == _sorted(trajectory)
    lists = _to_lists(trajectory)
    assert _from_lists(lists) == trajectory
    pickled = pickle.dumps(trajectory_fields(trajectory), protocol=5)
    heavy = total * (1 + (np.prod(routes) if routes else 0)) > 1_000_000
    few, many = (2, 5) if quick or heavy else (5, 50)
    seconds = _take_turns(
        {
            "encode": (lambda: encode_trajectory(trajectory, routes=form), many),
            "decode": (lambda: [dict(s.table.items()) for s in decode_trajectory(frames).samples], many),
            "lists encode": (lambda: _to_lists(trajectory), few),
            "lists decode": (lambda: _from_lists(lists), few),
            "pickle encode": (lambda: pickle.dumps(trajectory_fields(trajectory), protocol=5), many),
            "pickle decode": (lambda: pickle.loads(pickled), many),
        }
    )

    def timing(prefix: str, nbytes: int) -> Timing:
        encode, decode = seconds[f"{prefix}encode"], seconds[f"{prefix}decode"]
        return Timing(nbytes / total, encode / total * 1e6, decode / total * 1e6)

    ratio = seconds["lists decode"] / seconds["decode"]
    wire = timing("", sum(map(len, frames)))
    return Case(
        name,
        form,
        tokens,
        rows,
        wire,
        timing("lists ", len(lists)),
        timing("pickle ", len(pickled)),
        decode_ratio=ratio,
    )


def _sorted(trajectory: Trajectory) -> list[TokenTable]:
    """Return the tables, with the experts of each row in ascending order."""
    tables = [sample.table for sample in trajectory.samples]
    return [
        table.with_columns(routed_experts=np.sort(table["routed_experts"], axis=-1))
        if "routed_experts" in table
        else table
        for table in tables
    ]


def _take_turns(jobs: dict[str, tuple[Callable[[], Any], int]]) -> dict[str, float]:
    """Return the median CPU seconds of each job. They take turns, so that other load on the machine hits all of
    them."""
    times: dict[str, list[float]] = {name: [] for name in jobs}
    for i in range(max(count for _, count in jobs.values())):
        for name, (job, count) in jobs.items():
            if i < count:
                began = time.process_time()
                job()
                times[name].append(time.process_time() - began)
    return {name: median(t) for name, t in times.items()}


def trajectory_fields(trajectory: Trajectory) -> dict[str, Any]:
    """Return the trajectory as one would pass it to pickle: the fields, and the columns as arrays."""
    fields = msgspec.structs.asdict(trajectory)
    fields["turns"] = [msgspec.structs.asdict(t) for t in trajectory.turns]
    fields["samples"] = [
        {"sample_id": s.sample_id, "temperature": s.temperature, "table": dict(s.table.items())}
        for s in trajectory.samples
    ]
    return fields


def _to_lists(trajectory: Trajectory) -> bytes:
    fields = trajectory_fields(trajectory)
    for sample in fields["samples"]:
        sample["table"] = {name: array.tolist() for name, array in sample["table"].items()}
    return msgspec.msgpack.encode(fields)


def _from_lists(data: bytes) -> Trajectory:
    fields = msgspec.msgpack.decode(data)
    samples = []
    for sample in fields["samples"]:
        table = {
            name: np.asarray(values, SCHEMA.columns[name].dtypes[0]) for name, values in sample.pop("table").items()
        }
        samples.append(Sample(table=TokenTable(table), **sample))
    fields["samples"] = samples
    fields["turns"] = [Turn(**t) for t in fields["turns"]]
    return Trajectory(**fields)


def render(report: Report) -> str:
    """Format the report as a table for people."""
    rows = [
        (
            f"{case.name}, {case.form}, {name}",
            f"{t.bytes_per_token:.2f}",
            f"{t.encode_us:.4f}",
            f"{t.decode_us:.4f}",
            f"{case.decode_ratio:,.0f}" if t is case.wire else "",
        )
        for case in report.cases
        for name, t in (("wire", case.wire), ("lists", case.lists), ("pickle", case.pickle))
    ]
    heads = ("case, format", "bytes/token", "encode us/token", "decode us/token", "times as fast as lists")
    return "\n".join(table(heads, rows))
