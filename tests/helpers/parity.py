"""The code on each rank of the gradient parity tests, and the reference that the ranks are compared with."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from r3async.config import Config
from r3async.learner.loss import TokenBatch, compute_loss
from r3async.learner.micro_batches import MicroBatch, make_padding_batch, pack_samples
from tests.helpers import architectures as ha
from tests.helpers import models as hm
from tests.helpers.learner import settings

LENGTHS = [9, 40, 5, 17, 33, 6, 21]
BUDGET = 48


def config(*, recompute: str = "none", replay: str = "rollout", dtype: str = "float32", **parallel: int) -> Config:
    return settings(
        learner__dtype=dtype, learner__parallel=parallel, learner__recompute=recompute, routing__replay=replay
    )


def batch(seed: int = 3, *, lengths: Sequence[int] = LENGTHS, **options: Any) -> list[MicroBatch]:
    """Return packed micro-batches of different lengths; routes are random, and the last row of each sample has none."""
    return pack_samples(hm.make_samples(seed, list(lengths), temperature=0.8, **options), BUDGET)


def of_rank(micro_batches: list[MicroBatch], dp_rank: int, dp: int) -> list[MicroBatch]:
    """Return a data-parallel rank's share, with at least one padding micro-batch among all ranks."""
    count = -(-len(micro_batches) // dp) + (len(micro_batches) % dp == 0)
    mine = micro_batches[dp_rank::dp]
    return mine + [make_padding_batch(micro_batches[0], 1 + 2 * dp_rank)] * (count - len(mine))


def gradients_of_rank(model_path: str, settings: Config, micro_batches: list[MicroBatch]) -> dict[str, Any]:
    """Return one step's loss, its reduced gradients under checkpoint names (on rank 0), and what the step left
    behind."""
    from r3async.learner.megatron.backend import MegatronLearner
    from r3async.learner.megatron.weights import gather_weights
    from r3async.learner.metrics import build_minibatch_result
    from r3async.learner.minibatch import ProbeBatches
    from r3async.learner.train_step import agree_on_counts, forward_backward, measure_minibatch

    learner = MegatronLearner.from_pretrained(settings, Path(model_path))
    try:
        mine = of_rank(micro_batches, learner.ranks.dp_rank, settings.learner.parallel.dp)
        minibatch = agree_on_counts(learner, mine)
        forward_backward(learner, minibatch)
        optimizer = learner.optimizer
        for parameter in optimizer.parameters:  # whole and in float32, so each has its gradient
            parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        reducer, summed = optimizer.reducer, [p.grad for p in optimizer.parameters]
        if reducer.sums_gradients:
            reducer.reduce_gradients(summed)
        norm = reducer.compute_squared_norm(summed) ** 0.5
        gradients = gather_weights(learner.mappings, lambda p: p.grad)
        no_probes = ProbeBatches([], []), np.zeros((minibatch.drift_bin_count, 2))
        measured = measure_minibatch(learner, minibatch, *no_probes)
        result = build_minibatch_result(measured, optimizer.skip_step(minibatch.skip_cause), learner.replay)
        assert learner.replay.current_routes is None
        with learner.replay.bind_pipelined():  # refused while anything is bound
            pass
        return {
            "gradients": {n: g.numpy() for n, g in gradients.items()},
            "norm": norm,
            "result": result,
        }
    finally:
        learner.close()


def reference(
    model_path: Path, micro_batches: list[MicroBatch], settings: Config
) -> tuple[float, dict[str, np.ndarray]]:
    """Return loss and gradients of plain transformers with forced routes, one sample at a time.

    Rows without a record are forced to what the model chooses itself under the routes forced so far (they are last in
    their sample, and a last row's routes influence nothing that is trained).
    """
    model = hm.load_hf(model_path)
    total = _train(model, micro_batches, settings)
    return total, {n: g.numpy() for n, g in ha.gradients_of(model).items()}


def _train(model: Any, micro_batches: list[MicroBatch], settings: Config) -> float:
    """Return the loss, and leave the gradients in the model."""
    trained = sum(int(m.table["loss_mask"].sum()) for m in micro_batches)
    total = 0.0
    for micro_batch in micro_batches:
        for start, stop, temperature in zip(
            micro_batch.cu_seqlens, micro_batch.cu_seqlens[1:], micro_batch.temperatures, strict=False
        ):
            table = micro_batch.table.slice_rows(int(start), int(stop))
            routes = table["routed_experts"] if "routed_experts" in table else np.zeros((0, 0, 0))
            with hm.forced_routes(model, routes):
                ids = torch.from_numpy(table["token_ids"].astype(np.int64))
                logits = model(ids[None]).logits[0] / float(temperature)
            rows = np.flatnonzero(table["loss_mask"])
            everything = torch.log_softmax(logits, -1)
            logprobs = everything[rows - 1].gather(1, ids[rows][:, None])[:, 0]
            tokens = TokenBatch(
                rollout_logprobs=torch.from_numpy(table["rollout_logprobs"][rows]),
                advantages=torch.from_numpy(table["advantages"][rows]),
                weights=torch.full((len(rows),), 1 / trained),
                episode_index=torch.zeros(len(rows), dtype=torch.int64),
                num_episodes=1,
                staleness=torch.zeros(len(rows), dtype=torch.int32),
            )
            coef = settings.algorithm.rollout_kl.coef
            loss, _ = compute_loss(tokens, logprobs, torch.zeros(len(rows)), settings.algorithm, rollout_kl_coef=coef)
            loss.backward()
            total += float(loss.detach())
    return total


TOLERANCE = 1e-5


def assert_equal(answers, expected) -> None:
    assert_gradients(answers, expected)
    for answer in answers:
        # A recomputed forward pass does not count again, and padding does not count at all.
        assert answer["result"].expert_load.sum(axis=1).tolist() == [hm.TOP_K * sum(LENGTHS)] * 3


def assert_gradients(answers, expected) -> None:
    loss, gradients = expected
    metrics = answers[0]["result"].metrics
    assert metrics["loss/policy"] + metrics["loss/rollout_kl"] == pytest.approx(loss, rel=1e-5)
    found = answers[0]["gradients"]
    assert set(found) == set(gradients)
    for name, exact in gradients.items():
        scale = np.linalg.norm(exact)
        assert np.linalg.norm(found[name] - exact) <= TOLERANCE * max(scale, 1e-6), name
    norm = np.sqrt(sum(float((g.astype(np.float64) ** 2).sum()) for g in gradients.values()))
    for answer in answers:
        assert answer["norm"] == pytest.approx(norm, rel=1e-5)
        assert answer["result"].metrics == metrics
