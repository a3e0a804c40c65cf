"""Access to the inside of a `MegatronLearner`: its logits, gradients and own routes; and samples with columns
replaced."""

from typing import Any

import numpy as np
import torch

from r3async.config import Config, config_from_dict
from r3async.data.tokens import Sample
from r3async.learner.megatron.backend import MegatronLearner
from r3async.learner.megatron.weights import gather_weights

LENGTHS = [9, 40, 5, 17, 40, 6]
"""Tokens of the samples of most tests: two buckets, not in order."""


def settings(**changes: Any) -> Config:
    """Return the configuration of a learner. `changes` are settings, such as `learner__lr`."""
    data: dict[str, dict[str, Any]] = {
        "learner": {"dtype": "float32", "lr": 1e-2},
        "algorithm": {"rollout_kl": {"coef": 0.1}},
        "routing": {"min_recorded_fraction": 0.0},
    }
    for key, value in changes.items():
        section, name = key.split("__")
        data.setdefault(section, {})[name] = value
    return config_from_dict(data)


def logits(learner: MegatronLearner, micro_batch) -> torch.Tensor:
    """Return the logits `[N, vocab]` of a learner on one rank."""
    return learner.forward(micro_batch, np.zeros(0, np.int64), None)[:, 0] @ learner.model.get_output_weight().T


def gradients(learner: MegatronLearner) -> dict[str, torch.Tensor]:
    """Return the gradients of all parameters, under Hugging Face names."""
    return gather_weights(learner.mappings, lambda parameter: parameter.grad)


def fully_recorded(samples: list[Sample]) -> list[Sample]:
    return [replace_columns(s, routing_recorded=np.ones(len(s.table), bool)) for s in samples]


def replace_columns(sample: Sample, **columns) -> Sample:
    return Sample(sample.sample_id, sample.table.with_columns(**columns), sample.temperature)


def with_routes(samples: list[Sample], routes: np.ndarray) -> list[Sample]:
    out, at = [], 0
    for sample in samples:
        rows = routes[at : at + len(sample.table)]
        out.append(replace_columns(sample, routed_experts=rows, routing_recorded=np.ones(len(rows), bool)))
        at += len(rows)
    return out
