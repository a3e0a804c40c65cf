"""Megatron's 1F1B schedule over this rank's pipeline stage."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from megatron.core.pipeline_parallel.schedules import forward_backward_pipelining_without_interleaving
from torch import Tensor

from r3async.learner.megatron import cpu
from r3async.learner.megatron.modules import HiddenStatesModel


def run_stages(
    model: HiddenStatesModel,
    forward: Callable[[int], Tensor],
    finish: Callable[[int, Tensor], Tensor],
    count: int,
    *,
    forward_only: bool = False,
) -> None:
    """Run micro-batches `0..count` through all stages, and back unless `forward_only`.

    `forward(index)` is this stage's forward pass; its input has been set in the model. `finish(index, output)` gives the
    scalar loss, on the last stage only. Collective among the stages.
    """

    def step(iterator: Iterator[int], _: HiddenStatesModel) -> tuple[Tensor, Callable[[Tensor], Any]]:
        index = next(iterator)
        return forward(index), lambda output: (finish(index, output), torch.zeros([], dtype=torch.int), {})

    with cpu.cuda_means_cpu():
        forward_backward_pipelining_without_interleaving(
            forward_step_func=step,
            data_iterator=iter(range(count)),
            model=model,
            num_microbatches=count,
            # Stages tell each other the length of every micro-batch; these are only first guesses.
            seq_length=1,
            micro_batch_size=1,
            forward_only=forward_only,
        )
