"""Recording of supports by the sampler of vLLM's first model runner, as bits beside the token.

The second model runner records ids itself, but needs Triton. Log-probs after top-k, top-p and min-p
are minus infinity for tokens that cannot be sampled. So a row of `logprob_token_ids`, which has the
sampled token first, gets a bit for each token of the vocabulary behind it: all rows have one shape,
nothing waits for the device, and the bits travel wherever log-probs do.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from vllm.v1.outputs import SamplerOutput
from vllm.v1.sample.sampler import Sampler

WORD_BITS = 32


def pack_bits(allowed: Tensor) -> Tensor:
    """Pack bool `[B, V]` into int32 `[B, ceil(V / 32)]`, the lowest bit of the
    lowest byte first."""
    extra = -allowed.shape[1] % WORD_BITS
    lanes = torch.nn.functional.pad(allowed, (0, extra)).view(len(allowed), -1, 8).to(torch.uint8)
    shifts = torch.arange(8, dtype=torch.uint8, device=allowed.device)
    return (lanes << shifts).sum(dim=-1, dtype=torch.uint8).view(torch.int32)


class MaskRecordingSampler(Sampler):
    """A sampler that adds the bits of each row's support to the output of vLLM's sampler."""

    _processed_logprobs: Tensor | None = None

    def sample(self, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
        sampled, self._processed_logprobs = super().sample(*args, **kwargs)
        return sampled, self._processed_logprobs

    def forward(self, *args: Any, **kwargs: Any) -> SamplerOutput:
        output = super().forward(*args, **kwargs)
        processed = self._processed_logprobs
        self._processed_logprobs = None
        tensors = output.logprobs_tensors
        if processed is not None and tensors is not None:
            ids = torch.cat([tensors.logprob_token_ids, pack_bits(processed > -torch.inf)], dim=1)
            output.logprobs_tensors = tensors._replace(logprob_token_ids=ids)
        return output


def record_sampling_masks(runner: Any) -> None:
    """Replace the sampler of a first model runner. The second one has its own from the start."""
    old = runner.sampler
    if isinstance(old, Sampler):
        runner.sampler = MaskRecordingSampler(old.logprobs_mode, old.use_fp64_gumbel)
