"""Learners whose expert biases follow the tokens, and the rule in plain Python."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from r3async.config import Config, config_from_dict
from r3async.data.models import EXPERT_BIAS_SUFFIX
from r3async.learner import build_learner
from r3async.learner.backend import LearnerBackend
from r3async.learner.micro_batches import MicroBatch
from tests.helpers import models as hm
from tests.helpers.parity import of_rank
from tests.helpers.steps import train_minibatch

RATE = 0.01


def settings(
    backend: str, *, rate: float = RATE, dtype: str = "float32", replay: str = "rollout", **parallel: int
) -> Config:
    learner = {"backend": backend, "dtype": dtype, "lr": 1e-3, "expert_bias_rate": rate, "parallel": parallel}
    return config_from_dict(
        {
            "learner": learner,
            "routing": {"min_recorded_fraction": 0.0, "replay": replay},
            "episode": {"max_total_tokens": 256, "max_prompt_tokens": 128},
        }
    )


def biases_of(learner: LearnerBackend) -> dict[str, torch.Tensor]:
    """Return the biases as they are published."""
    return {name: tensor for name, tensor in learner.export_weights().items() if name.endswith(EXPERT_BIAS_SUFFIX)}


def counted(micro_batches: Sequence[MicroBatch]) -> tuple[np.ndarray, int]:
    """Count one by one the tokens of each expert in every sample's recorded rows, int64 `[layers, experts]`, and the
    other rows."""
    layers = micro_batches[0].table["routed_experts"].shape[1]
    load, unrecorded = np.zeros((layers, hm.EXPERTS), np.int64), 0
    for m in micro_batches:
        for row in range(m.num_real_tokens):
            if not m.table["routing_recorded"][row]:
                unrecorded += 1
                continue
            for layer in range(layers):
                for expert in m.table["routed_experts"][row, layer]:
                    load[layer, expert] += 1
    return load, unrecorded


def moved(bias: torch.Tensor, tokens: np.ndarray, rate: float = RATE) -> torch.Tensor:
    """Apply the rule: up for experts that got fewer tokens than the mean, down for those that got more."""
    mean = tokens.sum() / len(tokens)
    return torch.stack(
        [b + rate if n < mean else b - rate if n > mean else b for b, n in zip(bias, tokens.tolist(), strict=True)]
    )


def step_on_rank(
    path: Path, config: Config, micro_batches: list[MicroBatch]
) -> tuple[dict[str, torch.Tensor], np.ndarray]:
    """Run on a rank: return its own biases after one step, and the load that it received."""
    learner = build_learner(config, path)
    try:
        p = config.learner.parallel
        rank = learner.ranks.rank // (p.tp * p.cp) % p.dp
        load = train_minibatch(learner, of_rank(micro_batches, rank, p.dp)).expert_load
        return {bias.name: bias.tensor.clone() for bias in learner.expert_biases}, load
    finally:
        learner.close()
