"""The learner's part of `bench replay`.

One job computes log-probs of the samples, gradients, and step times. The other computes log-probs of branches, whose
prefix has the routes of one call or of another. Each is a separate process, since Megatron's CPU shim changes
`torch.cuda` process-wide. They read what `replay_rollouts` wrote.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

import numpy as np

from dev.bench.jobs import BenchError, progress
from dev.bench.replay_report import (
    Branches,
    Comparison,
    LearnerDone,
    LearnerJob,
    StepTime,
    compare,
    k3,
    mismatch,
    relative_error,
    step_time,
)
from dev.bench.replay_rollouts import bare, read_samples
from r3async.config import Config, config_from_dict
from r3async.data.tokens import Sample
from r3async.learner.batch import MicroBatch, pack_samples
from r3async.learner.megatron.backend import MegatronLearner
from r3async.learner.replay import MicroBatchRoutes
from r3async.learner.trainer import train_minibatch

if TYPE_CHECKING:
    import torch

INSIDE_STEPS = 3
"""Number of steps of each kind in which the time spent on routes is measured."""
NO_STEP = 1e-30
"""Learning rate of every step here, too small to change a weight, so that all passes see the same model."""


@dataclass
class Pass:
    """The result of one learner in one routing mode. `delta`: float64 `[M]`; `gradient`: float32, one array per
    parameter."""

    delta: np.ndarray
    gradient: list[np.ndarray]
    agreement: float


def settings(job: LearnerJob, dtype: str, replay: str) -> Config:
    """Return a configuration with truncated importance sampling alone, without the KL term; any recorded fraction is
    accepted."""
    return config_from_dict(
        {
            "learner": {
                "dtype": dtype,
                "lr": NO_STEP,
                "threads": 1,
                "max_tokens_per_micro_batch": job.max_tokens_per_micro_batch,
            },
            "algorithm": {"policy_loss": "truncated_pg", "rollout_kl": {"coef": 0.0}},
            "routing": {"replay": replay, "min_recorded_fraction": 0.0},
            "episode": {"max_total_tokens": job.max_tokens_per_micro_batch, "max_prompt_tokens": 1},
        }
    )


@contextmanager
def learner_of(job: LearnerJob, dtype: str, replay: str) -> Iterator[MegatronLearner]:
    learner = MegatronLearner.from_pretrained(settings(job, dtype, replay), Path(job.model))
    try:
        yield learner
    finally:
        learner.close()


def with_random_advantages(samples: Sequence[Sample], seed: int) -> list[Sample]:
    """Return the samples with one standard normal advantage per sample, on its sampled tokens."""
    rng = np.random.default_rng(seed)
    return [
        Sample(
            s.sample_id,
            s.table.with_columns(advantages=np.where(s.table["loss_mask"], rng.normal(), 0.0).astype(np.float32)),
            s.temperature,
        )
        for s in samples
    ]


@contextmanager
def gradients_kept(learner: MegatronLearner) -> Iterator[list[np.ndarray]]:
    """Yield the sums of every parameter's gradient over the backward passes in the block, in float32.

    They come from hooks, because an optimizer step consumes the gradients that it is given.
    """
    parameters = list(learner.model.parameters())
    sums = [np.zeros(p.shape, np.float32) for p in parameters]

    def keep(index: int) -> Callable[[torch.Tensor], None]:
        def hook(gradient: torch.Tensor) -> None:
            sums[index] += gradient.float().numpy()

        return hook

    handles = [p.register_hook(keep(i)) for i, p in enumerate(parameters)]
    try:
        yield sums
    finally:
        for handle in handles:
            handle.remove()


def deltas(learner: MegatronLearner, micro_batches: Sequence[MicroBatch], *, replay: bool) -> np.ndarray:
    """Return Δ of each sampled token, float64 `[M]`: the learner's log-prob less the engine's."""
    scored = learner.logprobs(micro_batches, replay=replay)
    pairs = [(s.astype(np.float64), m.table) for s, m in zip(scored, micro_batches, strict=True)]
    return np.concatenate([(s - t["rollout_logprobs"])[t["loss_mask"]] for s, t in pairs])


def run_pass(job: LearnerJob, dtype: str, replay: str, samples: Sequence[Sample]) -> Pass:
    """Score and train all samples with `routing.replay` = `replay`."""
    with learner_of(job, dtype, replay) as learner:
        micro_batches = pack_samples(samples, job.max_tokens_per_micro_batch)
        delta = deltas(learner, micro_batches, replay=replay == "rollout")
        with gradients_kept(learner) as gradient:
            metrics = train_minibatch(learner, micro_batches).metrics
    done = Pass(delta, gradient, metrics["routing/agreement"])
    # The step that was just taken must have seen the differences and the gradient that are reported here.
    norm = sum(float(np.square(g, dtype=np.float64).sum()) for g in gradient) ** 0.5
    for name, value in (("rollout_kl/k3", k3(delta)), ("grad_norm", norm)):
        if not np.isclose(value, metrics[name], rtol=1e-3, atol=1e-9):
            raise BenchError(f"{name} is {value:.6g} here and {metrics[name]:.6g} in the learner's own step")
    return done


def comparisons(job: LearnerJob, samples: Sequence[Sample], directory: Path) -> dict[str, Comparison]:
    """Compare every learner with the engine, and every gradient with those of the float32 learner."""
    references = {}
    for replay in ("rollout", "off"):
        progress(directory, f"learner in float32, {'replay' if replay == 'rollout' else 'own routing'}")
        references[replay] = run_pass(job, "float32", replay, samples)
    out = {}
    for dtype in job.dtypes:
        modes = {}
        for replay in ("off", "rollout"):
            progress(directory, f"learner in {dtype}, {'replay' if replay == 'rollout' else 'own routing'}")
            done = references[replay] if dtype == "float32" else run_pass(job, dtype, replay, samples)
            modes[replay] = mismatch(
                done.delta,
                agreement=done.agreement,
                grad_error=relative_error(done.gradient, references["rollout"].gradient),
                grad_error_own=relative_error(done.gradient, references["off"].gradient),
            )
        out[dtype] = compare(modes["off"], modes["rollout"])
    return out


def time_steps(job: LearnerJob, dtype: str, samples: Sequence[Sample], directory: Path) -> StepTime:
    """Time `job.pairs` pairs of steps, one with and one without routes, in an order that changes from pair to pair.

    One learner takes all steps. Garbage is collected between the steps, outside the measured times. The first pair is a
    warm-up and does not count. Steps in which the time spent on routes is measured come after all pairs.
    """
    variants = {"with": list(samples), "without": bare(samples)}
    seconds: dict[str, list[float]] = {f"{clock}_{name}": [] for clock in ("cpu", "wall") for name in variants}
    routes: dict[str, list[float]] = {name: [] for name in variants}
    with learner_of(job, dtype, "rollout") as learner:

        def step(name: str) -> None:
            train_minibatch(learner, pack_samples(variants[name], job.max_tokens_per_micro_batch))

        for pair in range(-1, job.pairs):
            progress(directory, f"steps in {dtype}: {f'pair {pair + 1} of {job.pairs}' if pair >= 0 else 'warm-up'}")
            for name in sorted(variants, reverse=pair % 2 == 0):
                gc.collect()
                cpu, wall = time.process_time(), time.perf_counter()
                step(name)
                if pair >= 0:
                    seconds[f"cpu_{name}"].append(time.process_time() - cpu)
                    seconds[f"wall_{name}"].append(time.perf_counter() - wall)
        for name in [*variants] * INSIDE_STEPS:
            with time_in_routes() as spent:
                step(name)
            routes[name].append(sum(spent))
    micro_batches = pack_samples(samples, job.max_tokens_per_micro_batch)
    tokens = sum(m.num_tokens for m in micro_batches)
    route_seconds = float(np.median(routes["with"]) - np.median(routes["without"]))
    return step_time(dtype, tokens, len(micro_batches), route_seconds=route_seconds, **seconds)


@contextmanager
def time_in_routes() -> Iterator[list[float]]:
    """Yield the CPU seconds of each call in the block that loads a micro-batch's routes or chooses experts by them."""
    spent: list[float] = []

    def timed(call: Callable[..., Any]) -> Callable[..., Any]:
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            start = time.process_time()
            try:
                return call(*args, **kwargs)
            finally:
                spent.append(time.process_time() - start)

        return wrapper

    take_in, choose = MicroBatchRoutes.__init__, MicroBatchRoutes.choose_experts
    with (
        mock.patch.object(MicroBatchRoutes, "__init__", timed(take_in)),
        mock.patch.object(MicroBatchRoutes, "choose_experts", timed(choose)),
    ):
        yield spent


def compare_and_time(job: LearnerJob, directory: Path) -> LearnerDone:
    """Run the job on `samples.bin`."""
    samples = with_random_advantages(read_samples(directory / "samples.bin"), job.seed)
    return LearnerDone(
        comparisons=comparisons(job, samples, directory) if job.dtypes else {},
        steps={dtype: time_steps(job, dtype, samples[: job.step_samples], directory) for dtype in job.step_dtypes},
    )


# -- branches ----------------------------------------------------------------------------------------------------------

BRANCH_DTYPE = "float32"
"""Dtype of the learner, as of the engine: with the same weights and routes they agree, and the remaining difference
comes from the routes."""


def score_branches(job: LearnerJob, directory: Path) -> Branches:
    """Run the job on what `branch` wrote, with the moved model."""
    first, own, inherited = (read_samples(directory / f"{name}.bin") for name in ("first", "own", "inherited"))
    progress(directory, f"learner in {BRANCH_DTYPE}, at the engine's version")
    with learner_of(job, BRANCH_DTYPE, "rollout") as learner:
        drift, with_own, with_inherited = (
            deltas(learner, pack_samples(samples, job.max_tokens_per_micro_batch), replay=True)
            for samples in (first, own, inherited)
        )
    return Branches(
        dtype=BRANCH_DTYPE,
        branch_tokens=len(with_own),
        drift=k3(drift),
        k3_own=k3(with_own),
        k3_inherited=k3(with_inherited),
        max_abs_own=float(np.abs(with_own).max()),
        max_abs_inherited=float(np.abs(with_inherited).max()),
        moved_routes=moved_routes(own, inherited),
    )


def moved_routes(own: list[Sample], inherited: list[Sample]) -> float:
    """Return the share of (position, MoE layer) whose set of experts differs between the two, over all recorded
    positions."""
    different = recorded = 0
    for one, other in zip(own, inherited, strict=True):
        a, b = (np.sort(s.table["routed_experts"][one.table["routing_recorded"]], -1) for s in (one, other))
        different, recorded = different + int((a != b).any(-1).sum()), recorded + a.shape[0] * a.shape[1]
    return different / recorded
