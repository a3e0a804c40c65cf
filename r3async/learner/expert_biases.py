"""Balancing experts without a term of the loss (arXiv 2408.15664; DeepSeek-V3, Moonlight, GLM-4.5): a bias of each expert
decides, with its score, who is chosen, and follows the tokens that the expert got.

The tokens are those of the step's own counts (`RoutingCounts.expert_load`), over all ranks: replayed experts as they were
replayed, padding left out, a row of several samples once for each. Megatron's own update counts padding and shared rows once,
so that neither backend uses it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from r3async.config import LearnerConfig
from r3async.learner import LearnerError
from r3async.learner.replay import RoutingReplay


@dataclass(frozen=True)
class ExpertBias:
    """The biases of one router, float32 `[experts]`, on its device: `tensor` is what the router reads. `name`: in checkpoints.
    `moe_layer_index`: which MoE layer it is. `is_writer`: of the ranks that hold it, this one hands it in."""

    name: str
    moe_layer_index: int
    tensor: Tensor
    is_writer: bool


def check_expert_biases(biases: Sequence[ExpertBias], learner: LearnerConfig, replay: RoutingReplay) -> None:
    """Raise `LearnerError` if biases have to be updated and the model has none."""
    elsewhere = replay.num_moe_layers and not replay.moe_layer_indices
    if learner.expert_bias_rate and not biases and not elsewhere:
        raise LearnerError(
            f"learner.expert_bias_rate = {learner.expert_bias_rate:g}, but no bias decides which experts this model chooses: set "
            "it to 0"
        )


@torch.no_grad()
def update_expert_biases(biases: Sequence[ExpertBias], expert_load: np.ndarray, rate: float) -> None:
    """Raise the bias of each expert that got fewer tokens than the mean of its layer by `rate`, and lower those that got more.
    `expert_load` `[layers, experts]`: tokens of a step over all ranks."""
    for bias in biases:
        tokens = expert_load[bias.moe_layer_index].astype(np.float64)
        step = torch.from_numpy(np.sign(tokens.mean() - tokens).astype(np.float32))
        bias.tensor.add_(step.to(bias.tensor.device), alpha=rate)
