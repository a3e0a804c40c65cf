"""The benchmark `bench packing`: how well samples are divided into micro-batches and among ranks,
against bounds and simpler ways.

It needs no model and no data: lengths are drawn from five distributions, and costs come from a
published config.json. Efficiencies are geometric means over the numbers of samples and the numbers
of ranks above one; a value is of one seed.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import fmean, geometric_mean, median
from typing import Any

import msgspec
import numpy as np

from dev.bench.report import Measurements
from r3async.config import ConfigError
from r3async.learner.micro_batch_plan import (
    CostModel,
    build_cost_model,
    find_round_levels,
    plan_micro_batches,
)
from r3async.tools.memory import PUBLISHED_CONFIGS

LENGTH_CAPS = {"lognormal": 32768, "bimodal": 32768, "pareto": 65536, "groups": 32768, "cut": 32768}
SAMPLE_COUNTS = (256, 1024, 8192)
RANK_COUNTS = (1, 8, 64)
LENGTH_GROUP_SIZE = 8
REPEATS = 3

DEFAULT_MODEL = "Qwen3-30B-A3B"

PackingPlan = list[list[list[int]]]


class PackingFigures(msgspec.Struct, frozen=True):
    """The figures of one batch.

    Attributes:
        at_bound: whether no plan can have fewer micro-batches.
        efficiency: total cost / (ranks · Σ_j costliest micro-batch at index j).
        ceiling: an upper bound on `efficiency` for any plan with as many micro-batches.
        apart: the efficiency of the simpler way `divide_then_pack`.
        dealt: the efficiency of the simpler way `pack_then_deal`.
        cpu_ms: median CPU time of a few calls.
    """

    lengths: str
    samples: int
    ranks: int
    seed: int
    at_bound: bool
    efficiency: float
    ceiling: float
    apart: float
    dealt: float
    cpu_ms: float


def read_model_shape(model: str) -> dict[str, Any]:
    """Return the configuration of a published model, by name, or of a model directory."""
    if model in PUBLISHED_CONFIGS:
        return PUBLISHED_CONFIGS[model]
    path = Path(model) / "config.json"
    if not path.is_file():
        raise ConfigError(
            f"--model {model} is no model directory (no config.json in it), nor one of "
            f"{', '.join(PUBLISHED_CONFIGS)}"
        )
    return json.loads(path.read_text())


def draw_lengths(kind: str, samples: int, seed: int) -> np.ndarray:
    """Return random sample lengths of one distribution, int64 `[samples]`.

    `lognormal`: mu 7, sigma 1, in 64..32768. `bimodal`: 70 % uniform in 200..1500, 30 % in
    8,000..30,000. `pareto`: Lomax, shape 1.2, scale 500, in 100..65536. `groups`: groups of 8
    samples, a scale lognormal(7, 1) for the group times lognormal(0, 0.3) for the sample, in
    64..32768. `cut`: lognormal(8.6, 1), of which the limit of 8,192 cuts a third.
    """
    rng = np.random.default_rng([list(LENGTH_CAPS).index(kind), samples, seed])
    if kind == "lognormal":
        drawn = rng.lognormal(7, 1, samples).clip(64, 32768)
    elif kind == "bimodal":
        short = rng.random(samples) < 0.7
        drawn = np.where(short, rng.uniform(200, 1500, samples), rng.uniform(8000, 30000, samples))
    elif kind == "pareto":
        drawn = (500 * rng.pareto(1.2, samples)).clip(100, 65536)
    elif kind == "cut":
        drawn = rng.lognormal(8.6, 1, samples).clip(64, 8192)
    else:
        scale = np.repeat(rng.lognormal(7, 1, -(-samples // LENGTH_GROUP_SIZE)), LENGTH_GROUP_SIZE)[
            :samples
        ]
        drawn = (scale * rng.lognormal(0, 0.3, samples)).clip(64, 32768)
    return drawn.astype(np.int64)


def fewest_bins(lengths: np.ndarray, cap: int) -> int:
    """Return a lower bound on the number of micro-batches: L2 of Martello & Toth 1990 (Discrete
    Applied Mathematics 28), in integers.

    For a threshold `k` <= cap/2 let n1 be the samples longer than cap - k, n2 those in (cap/2,
    cap - k]. No two of these share a micro-batch, and samples in [k, cap/2] fit only beside the n2:
    n1 + n2 + ceil((their sum - space beside the n2) / cap). The bound is the largest over all
    thresholds; k = 0 gives at least ceil(total / cap).
    """
    n = np.sort(lengths)
    before = np.concatenate([[0], np.cumsum(n)])
    half = np.searchsorted(n, cap // 2, "right")
    k = np.concatenate([[0], n[:half]])
    first = np.searchsorted(n, k, "left")
    high = np.searchsorted(n, cap - k, "right")
    n1 = len(n) - high
    n2 = high - half
    beside = n2 * cap - (before[high] - before[half])
    rest = before[half] - before[first] - beside
    return int((n1 + n2 + np.maximum(0, -(-rest // cap))).max())


def pack_then_deal(
    lengths: np.ndarray, max_tokens: int, ranks: int, cost: CostModel
) -> PackingPlan:
    """Pack first-fit decreasing for all ranks together, then deal the micro-batches to the ranks
    in turn, by cost."""
    (bins,) = plan_micro_batches(lengths.tolist(), max_tokens=max_tokens, cost=cost)
    bins += [[] for _ in range(-len(bins) % ranks)]
    return [bins[rank::ranks] for rank in range(ranks)]


def divide_then_pack(
    lengths: np.ndarray, max_tokens: int, ranks: int, cost: CostModel
) -> PackingPlan:
    """Divide the samples among the ranks for equal cost, and let each rank pack its own, as
    trainers do whose ranks agree on nothing but the number of micro-batches."""
    each = cost.estimate_costs(lengths)
    loads = np.zeros(ranks)
    mine: list[list[int]] = [[] for _ in range(ranks)]
    for index in np.argsort(-each, kind="stable").tolist():
        rank = int(loads.argmin())
        mine[rank].append(index)
        loads[rank] += each[index]
    packed = [
        plan_micro_batches(lengths[own].tolist(), max_tokens=max_tokens, cost=cost)[0]
        for own in mine
    ]
    count = max(len(bins) for bins in packed)
    return [
        [[own[i] for i in m] for m in bins] + [[] for _ in range(count - len(bins))]
        for own, bins in zip(mine, packed, strict=True)
    ]


def sum_by_micro_batch(planned: PackingPlan, values: np.ndarray) -> np.ndarray:
    """Return the sum of the values of each micro-batch's samples, `[ranks, micro-batches]`."""
    return np.asarray([[values[m].sum() for m in mine] for mine in planned])


def plan_efficiency(planned: PackingPlan, each: np.ndarray) -> float:
    """Return the efficiency of a plan (`PackingFigures.efficiency`). `each`: cost
    of every sample."""
    return float(each.sum() / (len(planned) * sum_by_micro_batch(planned, each).max(0).sum()))


def time_plan(call: Callable[[], PackingPlan]) -> tuple[PackingPlan, float]:
    """Return the result of `call`, and its median CPU time in milliseconds."""
    cpu = []
    for _ in range(REPEATS):
        began = time.process_time()
        planned = call()
        cpu.append(1e3 * (time.process_time() - began))
    return planned, median(cpu)


def measure_batch(
    kind: str, samples: int, ranks: int, seed: int, cost: CostModel
) -> PackingFigures:
    """Divide one batch in every way. Raises `AssertionError` if a plan breaks the cap
    or loses a sample."""
    lengths = draw_lengths(kind, samples, seed)
    cap = LENGTH_CAPS[kind]
    given, each = lengths.tolist(), cost.estimate_costs(lengths)
    locked, cpu_ms = time_plan(
        lambda: plan_micro_batches(given, max_tokens=cap, ranks=ranks, cost=cost)
    )
    assert sorted(i for mine in locked for m in mine for i in m) == list(range(samples))
    assert sum_by_micro_batch(locked, lengths).max() <= cap
    count = len(locked[0])
    least = find_round_levels(
        lengths, max_tokens=cap, ranks=ranks, count=count, cost=cost, total_cost=each.sum()
    )
    return PackingFigures(
        kind,
        samples,
        ranks,
        seed,
        at_bound=count == -(-fewest_bins(lengths, cap) // ranks),
        efficiency=plan_efficiency(locked, each),
        ceiling=min(1.0, float(each.sum() / (ranks * least.sum()))),
        apart=plan_efficiency(divide_then_pack(lengths, cap, ranks, cost), each),
        dealt=plan_efficiency(pack_then_deal(lengths, cap, ranks, cost), each),
        cpu_ms=cpu_ms,
    )


def measure_packing(
    seeds: Sequence[int], *, quick: bool = False, model: str = DEFAULT_MODEL
) -> Measurements:
    """Measure all distributions, numbers of samples and ranks. `quick` leaves out the largest
    number of samples."""
    cost = build_cost_model(read_model_shape(model))
    sizes = SAMPLE_COUNTS[:-1] if quick else SAMPLE_COUNTS
    cases = [
        measure_batch(k, n, ranks, seed, cost)
        for seed in seeds
        for k in LENGTH_CAPS
        for n in sizes
        for ranks in RANK_COUNTS
    ]
    measured = Measurements(
        facts={
            "costs": f"{model}, {cost.linear:.4g} n + {cost.quadratic:.4g} n² FLOPs for n tokens"
        }
    )
    for kind in (*LENGTH_CAPS, "all"):
        for seed in seeds:
            measured.add_figures(
                kind,
                summarize_figures(
                    [c for c in cases if c.seed == seed and kind in (c.lengths, "all")]
                ),
            )
    for n in sizes:
        measured.add_figures(
            f"planning {n:,} samples",
            {"CPU ms, longest": max(c.cpu_ms for c in cases if c.samples == n)},
        )
    return measured


def summarize_figures(cases: Sequence[PackingFigures]) -> dict[str, float]:
    several = [c for c in cases if c.ranks > 1]
    return {
        "lockstep": geometric_mean(c.efficiency for c in several),
        "ceiling": geometric_mean(c.ceiling for c in several),
        "apart": geometric_mean(c.apart for c in several),
        "dealt": geometric_mean(c.dealt for c in several),
        "share with fewest micro-batches": fmean(c.at_bound for c in cases),
        "cases in which apart or dealt is better": sum(
            max(c.apart, c.dealt) > c.efficiency * (1 + 1e-9) for c in several
        ),
    }
