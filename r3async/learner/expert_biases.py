"""Load balancing without a loss term (arXiv 2408.15664; DeepSeek-V3, Moonlight, GLM-4.5).

Experts are chosen by their score and a bias, which follows the tokens that the expert got.

The tokens are those of the step's own counts (`RoutingCounts.expert_load`), over all ranks:
replayed experts count as replayed, padding is left out, and a row of several samples counts once
for each. Megatron's own update counts padding and shared rows once, so neither backend uses it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from r3async.config import LearnerConfig
from r3async.learner.replay import RoutingReplay
from r3async.learner.results import LearnerError


@dataclass(frozen=True)
class ExpertBias:
    """The biases of one router, float32 `[experts]`, on its device.

    Attributes:
        name: Name in checkpoints.
        moe_layer_index: Index of the router's MoE layer.
        tensor: The tensor that the router reads.
        is_writer: True on the one rank, among those that hold it, that writes it to checkpoints.
    """

    name: str
    moe_layer_index: int
    tensor: Tensor
    is_writer: bool


def check_expert_biases(
    biases: Sequence[ExpertBias], learner: LearnerConfig, replay: RoutingReplay
) -> None:
    """Raise `LearnerError` if biases have to be updated and the model has none."""
    elsewhere = replay.num_moe_layers and not replay.moe_layer_indices
    if learner.expert_bias_rate and not biases and not elsewhere:
        raise LearnerError(
            f"learner.expert_bias_rate = {learner.expert_bias_rate:g}, but no bias decides which "
            "experts this model chooses: set it to 0"
        )


@torch.no_grad()
def update_expert_biases(
    biases: Sequence[ExpertBias], expert_load: np.ndarray, rate: float
) -> None:
    """Raise by `rate` the biases of experts that got fewer tokens than their layer's mean, and
    lower the others'.

    A bias stays if its expert got exactly the mean. `expert_load` `[layers, experts]` counts the
    tokens of a step over all ranks.
    """
    for bias in biases:
        tokens = expert_load[bias.moe_layer_index].astype(np.float64)
        step = torch.from_numpy(np.sign(tokens.mean() - tokens).astype(np.float32))
        bias.tensor.add_(step.to(bias.tensor.device), alpha=rate)
