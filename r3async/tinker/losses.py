"""The losses of the Tinker API, as functions of log-probs.

p: the learner; q: the policy that sampled; `ratio = p / q`. Each is the sum over a datum's tokens
(https://tinker-docs.thinkingmachines.ai/tinker/losses):

| name                  | loss                                                                    |
|-----------------------|-------------------------------------------------------------------------|
| `cross_entropy`       | `-weight log p`                                                         |
| `importance_sampling` | `-ratio A`                                                              |
| `ppo`                 | `-min(ratio A, clip(ratio) A)`, clipped to 0.8 .. 1.2                   |
| `cispo`               | `-clip(ratio) A log p`, where the clipped ratio has no gradient; 0 .. 4 |
| `dro`                 | `-(A log p - beta / 2 (log p - log q)^2)`, beta 0.05                    |

The losses with an advantage take keys of ours too: `rollout_kl`, the coefficient of a term
`KL(q || p)` (k2), and the masks of `algorithm.correction`, which take tokens out of the loss but
not out of that term.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from r3async.config import CorrectionConfig
from r3async.learner.drift import compute_correction_mask, k2
from r3async.tinker.protocol import ApiError, Datum

CLIP_KEYS = ("clip_low_threshold", "clip_high_threshold")
LOSS_KEYS: dict[str, dict[str, float]] = {
    "cross_entropy": {},
    "importance_sampling": {},
    "ppo": dict(zip(CLIP_KEYS, (0.8, 1.2), strict=True)),
    "cispo": dict(zip(CLIP_KEYS, (0.0, 4.0), strict=True)),
    "dro": {"beta": 0.05},
}
"""The losses, and the defaults of their own keys."""
MASK_KEYS = (
    "icepop_low",
    "icepop_high",
    "kpop",
    "geometric_low",
    "geometric_high",
    "product_low",
    "product_high",
    "veto_low",
    "veto_high",
    "max_token_kl",
)
POLICY_INPUTS = ("logprobs", "advantages")


def check_loss(loss_fn: str, config: Mapping[str, float | str]) -> dict[str, float]:
    """Return the loss's settings, with defaults. Raises `ApiError`."""
    if loss_fn not in LOSS_KEYS:
        raise ApiError(f"the loss {loss_fn!r} is not supported: {', '.join(LOSS_KEYS)} are")
    allowed = [*LOSS_KEYS[loss_fn]]
    if loss_fn != "cross_entropy":
        allowed += ["rollout_kl", *MASK_KEYS]
    settings = dict(LOSS_KEYS[loss_fn])
    for name, value in config.items():
        if name not in allowed:
            known = ", ".join(allowed) or "none"
            raise ApiError(
                f"loss_fn_config[{name!r}] is not a key of {loss_fn}, whose are: {known}"
            )
        if isinstance(value, str) or not math.isfinite(value):
            raise ApiError(f"loss_fn_config[{name!r}] must be a finite number, not {value!r}")
        settings[name] = value
    return settings


def check_datum(index: int, datum: Datum, loss_fn: str, vocab_size: int, max_tokens: int) -> None:
    """Raise `ApiError` for a datum that this loss cannot be computed of."""
    where = f"datum {index}"
    length = len(datum.tokens)
    wanted = ["target_tokens"]
    wanted += ["weights"] if loss_fn == "cross_entropy" else POLICY_INPUTS
    if sorted(wanted) != sorted(datum.inputs):
        raise ApiError(
            f"{where}: {loss_fn} takes {', '.join(wanted)}, not {', '.join(datum.inputs) or 'none'}"
        )
    targets = datum.inputs["target_tokens"]
    if not 0 < length < max_tokens:
        raise ApiError(f"{where}: {length} tokens, of 1 to {max_tokens - 1}")
    if targets.ndim not in (1, 2) or (targets.ndim == 2 and loss_fn != "cross_entropy"):
        raise ApiError(f"{where}: target_tokens of {loss_fn} has {targets.ndim} dimensions")
    for name, values in datum.inputs.items():
        if values.shape != targets.shape or len(values) != length:
            raise ApiError(
                f"{where}: {name} has the shape {list(values.shape)}, where {length} tokens have "
                f"targets of shape {list(targets.shape)}"
            )
        if not bool(np.isfinite(values).all()):
            raise ApiError(f"{where}: {name} has values that are not finite")
    if targets.dtype.kind != "i":
        raise ApiError(f"{where}: target_tokens has to be int64")
    for tokens in (datum.tokens, targets):
        if tokens.size and not 0 <= int(tokens.min()) <= int(tokens.max()) < vocab_size:
            raise ApiError(f"{where}: a token id is not one of 0 .. {vocab_size - 1}")


def compute_token_losses(
    loss_fn: str, settings: Mapping[str, float], logprobs: Tensor, inputs: Mapping[str, Tensor]
) -> Tensor:
    """Return the loss of each token of one datum, in the shape of `logprobs`.

    `inputs` are what the loss takes besides the targets. See the head of the file.
    """
    if loss_fn == "cross_entropy":
        return -inputs["weights"] * logprobs
    advantages = inputs["advantages"]
    sampling = inputs["logprobs"]
    delta = logprobs - sampling
    ratio = delta.exp()
    if loss_fn in ("ppo", "cispo"):
        clipped = ratio.clamp(settings[CLIP_KEYS[0]], settings[CLIP_KEYS[1]])
    if loss_fn == "importance_sampling":
        losses = -ratio * advantages
    elif loss_fn == "ppo":
        losses = -torch.minimum(ratio * advantages, clipped * advantages)
    elif loss_fn == "cispo":
        losses = -clipped.detach() * advantages * logprobs
    else:
        losses = -(advantages * logprobs - settings["beta"] / 2 * delta.square())
    masks: dict[str, Any] = {name: settings[name] for name in MASK_KEYS if name in settings}
    if masks:
        losses = torch.where(_keep_tokens(logprobs, sampling, masks), losses, 0.0)
    if settings.get("rollout_kl"):
        losses = losses + settings["rollout_kl"] * torch.where(sampling != 0, k2(delta), 0.0)
    return losses


def _keep_tokens(logprobs: Tensor, sampling: Tensor, masks: Mapping[str, Any]) -> Tensor:
    """Return the tokens that the masks leave in. A datum is an episode, of which those tokens count
    that were sampled: others have the log-prob 0."""
    (sampled,) = torch.nonzero(sampling, as_tuple=True)
    none = torch.zeros_like(sampled)
    config = CorrectionConfig(**masks)
    kept = torch.ones_like(logprobs, dtype=torch.bool)
    kept[sampled] = compute_correction_mask(
        logprobs[sampled], sampling[sampled], none, none, 1, config
    )
    return kept
