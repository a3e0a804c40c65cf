"""The data axes of `bench scale`: rows of a step at the learner, layers and experts of routes, generators of a
fleet."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from statistics import median

import msgspec
import numpy as np

from dev.bench.jobs import Say
from dev.bench.scale import Point
from r3async.config import Config, config_from_dict
from r3async.data.tokens import SCHEMA, Sample, TokenTable, Trajectory, Turn, format_trajectory_id

ROWS, FEW_ROWS = (1024, 4096, 16_384, 65_536), (256, 512, 1024)
GROUP = 8
LAYERS, FEW_LAYERS = (4, 8, 16, 32, 64), (2, 4, 8)
EXPERTS, FEW_EXPERTS = (16, 64, 256, 1024), (16, 32, 64)
ROUTED_TOKENS, TOP_K = 4096, 8
GENERATORS, FEW_GENERATORS = (1, 8, 64, 512), (1, 4, 16)
REPEATS = 3
TARGET_SECONDS = 0.05
"""Minimum CPU seconds of a measurement: shorter calls are repeated in it."""


def _point(size: int, work: float, call: Callable[[], object], repeats: int, say: Say) -> Point:
    """Measure `call`, which does `work`. Its first call is not measured."""
    call()
    seconds = []
    for _ in range(repeats):
        began, calls = time.process_time(), 0
        while (spent := time.process_time() - began) < TARGET_SECONDS or not calls:
            call()
            calls += 1
        seconds.append(spent / calls)
    middle = median(seconds)
    point = Point(size, work, middle, repeats, (max(seconds) - min(seconds)) / middle)
    say(f"{size}: {point.unit_us:.3f} µs a unit")
    return point


# -- rows --------------------------------------------------------------------------------------------------------------


def rows(quick: bool, say: Say) -> list[Point]:
    """Measure what the learner does with a step's rows before the first forward pass: advantages, minibatches, plan,
    packing."""
    from r3async.learner.batch import CostModel, pack_for_ranks
    from r3async.learner.trainer import prepare_minibatches

    def both(groups: list[list[Trajectory]], config: Config) -> None:
        for samples in prepare_minibatches(groups, config)[0]:
            pack_for_ranks(samples, 8192, ranks=4, cost=CostModel(1.0, 1e-4), whole_episodes=False)

    points = []
    for size in FEW_ROWS if quick else ROWS:
        groups = [_group(index) for index in range(size // GROUP)]
        config = config_from_dict({"schedule": {"prompts_per_step": len(groups), "group_size": GROUP}})

        points.append(_point(size, size, partial(both, groups, config), 1 if quick else REPEATS, say))
    return points


def _group(index: int) -> list[Trajectory]:
    rng = np.random.default_rng(index)
    return [_episode(index, k, int(tokens), rng) for k, tokens in enumerate(rng.integers(16, 64, GROUP))]


def _episode(group: int, index: int, tokens: int, rng: np.random.Generator) -> Trajectory:
    """Return an episode of one turn, whose prompt is half of its tokens."""
    first, name, reward = tokens // 2, format_trajectory_id(group, index), float(rng.random())
    columns = {key: column.filled_rows(tokens) for key, column in SCHEMA.columns.items() if not column.optional}
    columns["token_ids"] = rng.integers(0, 1000, tokens, dtype=np.int32)
    columns["rollout_logprobs"][first:] = -1.0
    columns["loss_mask"][first:], columns["turn"][first:], columns["policy_version"][first:] = True, 0, 0
    columns["rewards"][-1] = reward
    turns = [Turn(0, 0, first, tokens, reward, "stop")]
    return Trajectory(name, group, index, group, "generator-0", "env_done", turns, [Sample(name, TokenTable(columns))])


# -- routes ------------------------------------------------------------------------------------------------------------


def layers(quick: bool, say: Say) -> list[Point]:
    """Measure routes of a trajectory through `size` layers, from the sender's table to the learner's tensors. Work is
    layers."""
    return [_routes(size, size, 128, quick, say) for size in (FEW_LAYERS if quick else LAYERS)]


def experts(quick: bool, say: Say) -> list[Point]:
    """Measure routes through 8 layers of `size` experts. Work is experts: cost that grows more slowly than they do is
    no concern."""
    return [_routes(size, 8, size, quick, say) for size in (FEW_EXPERTS if quick else EXPERTS)]


def _routes(size: int, layers: int, experts: int, quick: bool, say: Say) -> Point:
    import torch

    from r3async.data.wire import decode_trajectory, encode_trajectory
    from r3async.learner.batch import collate_samples
    from r3async.learner.replay import RoutingReplay

    tokens = ROUTED_TOKENS // 16 if quick else ROUTED_TOKENS
    torch.set_num_threads(1)  # processor time is of all threads, also of those that wait for each other
    table = _episode(0, 0, tokens, np.random.default_rng(0)).samples[0].table
    recorded = np.arange(tokens) < tokens - 1
    table = table.with_columns(routed_experts=random_routes(tokens, layers, experts), routing_recorded=recorded)
    sent = _episode(0, 0, tokens, np.random.default_rng(0))
    sent = msgspec.structs.replace(sent, samples=[Sample(sent.trajectory_id, table)])
    replay = RoutingReplay(
        num_moe_layers=layers,
        moe_layer_indices=range(layers),
        top_k=TOP_K,
        num_experts=experts,
        is_enabled=True,
        device=torch.device("cpu"),
    )

    def whole_way() -> None:
        arrived = decode_trajectory([bytes(frame) for frame in encode_trajectory(sent)])
        with replay.bind_routes(collate_samples(arrived.samples)):
            pass

    return _point(size, size, whole_way, 1 if quick else REPEATS, say)


def random_routes(tokens: int, layers: int, experts: int) -> np.ndarray:
    """Return random routes `[tokens, layers, 8]`: different experts for each token, with equal chances for all."""
    rng = np.random.default_rng(0)
    dtype = np.uint8 if experts <= 256 else np.uint16
    by_layer = [rng.random((tokens, experts)).argpartition(TOP_K, axis=1)[:, :TOP_K] for _ in range(layers)]
    return np.stack(by_layer, axis=1).astype(dtype)


# -- generators --------------------------------------------------------------------------------------------------------


def generators(quick: bool, say: Say) -> list[Point]:
    """Measure a run's conductor, called by `size` generators (`bench conductor`). Work is the groups that they play."""
    from dev.bench.conductor import run
    from dev.bench.fleet import Load

    load = Load(0, episode_seconds=4.0, seconds=8.0, warm_up=4.0) if quick else Load(0, seconds=30.0)
    sizes: Sequence[int] = FEW_GENERATORS if quick else GENERATORS
    points = []
    for size in sizes:
        runs = [run(load, [size], ["simulated"], say).rows[0].measured for _ in range(1 if quick else REPEATS)]
        seconds = [m.cpu_seconds for m in runs]
        spread = (max(seconds) - min(seconds)) / median(seconds)
        counts = {"messages": float(runs[0].leases + runs[0].asked)}
        points.append(Point(size, runs[0].groups, median(seconds), len(runs), spread, counts))
    return points
