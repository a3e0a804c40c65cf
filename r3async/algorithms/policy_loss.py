"""Per-token policy-gradient losses over the log-probs of the policy that generated the tokens."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


def tis(logprobs: Tensor, rollout_logprobs: Tensor, advantages: Tensor, mask: Tensor, ratio_cap: float) -> Tensor:
    """Truncated importance sampling: `-sg(min(pi / mu, ratio_cap)) * A * log pi`, 0 where `mask` is False.

    All arguments are `[M]`; only `logprobs` (log pi) receives gradient. `rollout_logprobs` (log mu) and `advantages` may
    hold anything, NaN too, where `mask` is False: they are masked before `exp`.

    Its gradient is the importance-weighted policy gradient with weights capped from above, which bounds the variance
    and leaves the sign of every token's gradient alone (IMPALA's truncated rho, arXiv 1802.01561; for engine and
    trainer mismatch: F. Yao et al., "Your Efficient RL Framework Secretly Brings You Off-Policy RL Training", 2025).
    """
    log_ratio = torch.where(mask, logprobs.detach() - rollout_logprobs, 0.0)
    weight = log_ratio.exp().clamp(max=ratio_cap)
    return -weight * torch.where(mask, advantages, 0.0) * torch.where(mask, logprobs, 0.0)


POLICY_LOSSES: dict[str, Callable[[Tensor, Tensor, Tensor, Tensor, float], Tensor]] = {"tis": tis}
"""By the names of `algorithm.policy_loss`; each has the signature of `tis`."""
