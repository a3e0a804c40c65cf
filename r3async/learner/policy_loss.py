"""Per-token policy-gradient losses, by the names of `algorithm.policy_loss`.

pi: the learner; pi_a: the anchor, `algorithm.anchor`; A: the advantage; sg: no gradient. The ratio
is `r = exp(clamp(log pi - log pi_a, -20, 20))`: beyond the clamp, which no trained token should
come near, it is constant and has no gradient. Papers maximise; the losses are the negatives of
their objectives.

A custom loss is any function of the type `PolicyLossFunction`, named by
`algorithm.policy_loss = "module:function"`:

    @by_token
    def reinforce(inputs: LossInputs) -> PolicyLoss:
        return PolicyLoss(-inputs.advantages * inputs.logprobs, clipped=torch.zeros_like(inputs.mask))

It must treat an episode alike whatever others are in its micro-batch, and not divide by their
number: masks and weights (the reduction's denominators) are applied by the caller. Then its
gradient does not depend on packing.

It sees whole episodes, and may use anything in them (`LossInputs.episode_sum`, `episode_mean`).
Where an episode's samples are in several micro-batches that takes one more forward pass: see
`train_step.forward_backward`. A loss at a token that depends on that token's own columns alone is
marked with `@by_token`, and avoids that pass.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from r3async.config import AlgorithmConfig, ClipConfig, ConfigError, import_policy_loss

LOG_RATIO_LIMIT = 20.0
MAX_ROUNDING_CLIPPED = 0.1
"""Share of clipped tokens in the first step above which GSPO's range is too narrow."""


@dataclass(frozen=True)
class LossInputs:
    """The inputs of a policy loss for one micro-batch: M tokens of S episodes; float32 `[M]` unless
    stated otherwise.

    Only `logprobs` has a gradient. Every column is 0 where `mask` is False. Tokens of an episode
    that are in other micro-batches are here too: their log-probs without a gradient, and in the
    same order wherever they are seen.
    """

    logprobs: Tensor
    """Log-probs of the learner, log pi."""
    anchor_logprobs: Tensor
    """Log-probs of the anchor, log pi_a: `rollout_logprobs`, or `old_logprobs` with
    `algorithm.anchor = "recomputed"`."""
    rollout_logprobs: Tensor
    """Log-probs of the policy that sampled the tokens."""
    old_logprobs: Tensor | None
    """Log-probs of the learner before the step's first update, if `needs_old_logprobs(config)`."""
    advantages: Tensor
    mask: Tensor
    """bool `[M]`: tokens that the policy loss trains."""
    episode_index: Tensor
    """int64 `[M]`: the index, among the S episodes, of each token's episode."""
    num_episodes: int
    """The number of episodes, S. Episodes are whole, with all their trained tokens, except for a
    `by_token` loss."""
    config: AlgorithmConfig
    turns: Tensor | None = None
    """int32 `[M]`: the turn that sampled each token. None: the loss is `by_token`, or an episode's
    tokens are in its order."""
    chosen: Tensor | None = None
    """bool `[M]`: the tokens that the loss's choice among those of the whole minibatch has taken,
    if `token_choice.TOKEN_CHOICES` has one."""

    def ratio(self) -> Tensor:
        """Return r, `[M]`, with gradient."""
        return bounded_exp(self.logprobs - self.anchor_logprobs)

    def episode_sum(self, values: Tensor) -> Tensor:
        """Return float64 `[M]`, with gradient: the sum of `values` `[M]` over each token's
        episode, within `mask`."""
        return sum_by_episode(
            torch.where(self.mask, values, 0), self.episode_index, self.num_episodes
        )[self.episode_index]

    def episode_mean(self, values: Tensor) -> Tensor:
        """Return float64 `[M]`, with gradient: `episode_sum` over the number of those
        tokens; 0 without any."""
        return self.episode_sum(values) / self.episode_sum(self.mask).clamp(min=1)


class PolicyLoss(NamedTuple):
    """The result of a policy loss.

    Attributes:
        value: `[M]`: each token's loss, with gradient.
        clipped: bool `[M]`: True where a bound changed or stopped the token's gradient.
        high: bool `[M]`: True where that would be an upper bound, for the figures; None: where the
            token's own ratio is above 1.
    """

    value: Tensor
    clipped: Tensor
    high: Tensor | None = None


PolicyLossFunction = Callable[[LossInputs], PolicyLoss]
PolicyLossT = TypeVar("PolicyLossT", bound=PolicyLossFunction)

BY_TOKEN_ATTRIBUTE = "by_token"


def by_token(function: PolicyLossT) -> PolicyLossT:
    """Mark a policy loss whose value at a token depends on no other token: it is correct
    without whole episodes."""
    setattr(function, BY_TOKEN_ATTRIBUTE, True)
    return function


def bounded_exp(log_ratio: Tensor) -> Tensor:
    """Return `exp(clamp(log_ratio, -20, 20))`."""
    return log_ratio.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()


def sum_by_episode(values: Tensor, episode_index: Tensor, num_episodes: int) -> Tensor:
    """Return float64 `[S]`, with gradient: the sums of `values` `[M]` over each episode; 0 for
    one without tokens.

    `episode_index` int64 `[M]` is the index of each token's episode.
    """
    sums = torch.zeros(num_episodes, dtype=torch.float64, device=values.device)
    return sums.index_add_(0, episode_index, values.double())


@by_token
def truncated_pg_loss(inputs: LossInputs) -> PolicyLoss:
    """Return the policy gradient with truncated importance weights: `-sg(min(r, cap)) A log pi`.

    Weights capped from above bound the variance and leave the sign of every token's gradient alone
    (IMPALA's truncated rho, arXiv 1802.01561). The same as `cispo_loss` with `clip_low` = 1 and
    `clip_high` = cap - 1.
    """
    ratio = inputs.ratio().detach()
    cap = inputs.config.truncated_pg.cap
    return PolicyLoss(-ratio.clamp(max=cap) * inputs.advantages * inputs.logprobs, ratio > cap)


def sequence_truncated_pg_loss(inputs: LossInputs) -> PolicyLoss:
    """Return the policy gradient with one truncated importance weight an episode:
    `-sg(min(s, cap)) A log pi`, with `s = e^clamp(sum of (log pi - log pi_a), -20, 20)`.

    With the rollout policy as the anchor, s is the whole importance weight of the episode, and no
    further forward pass is needed: verl's bypass mode with `loss_type = "reinforce"` and
    `rollout_is = "sequence"` (Liu, Li et al., "When Speed Kills Stability", 2025). The cap is that
    of `truncated_pg_loss`.
    """
    log_ratio = inputs.episode_sum((inputs.logprobs - inputs.anchor_logprobs).detach())
    ratio = bounded_exp(log_ratio).to(inputs.logprobs.dtype)
    cap = inputs.config.truncated_pg.cap
    value = -ratio.clamp(max=cap) * inputs.advantages * inputs.logprobs
    return PolicyLoss(value, ratio > cap, ratio > cap)


@by_token
def ppo_loss(inputs: LossInputs) -> PolicyLoss:
    """Return PPO's clipped loss: `-min(r A, clip(r, 1 - clip_low, 1 + clip_high) A)` (arXiv
    1707.06347, eq. 7).

    The two bounds are separate (DAPO, arXiv 2503.14476, eq. 10). With `dual_clip` = c, where A < 0,
    it is `-max(min(...), c A)` (dual-clip PPO, arXiv 1912.09729).
    """
    settings = inputs.config.ppo
    return _clip_by_settings(inputs.ratio(), inputs.advantages, settings, settings.dual_clip)


@by_token
def tis_loss(inputs: LossInputs) -> PolicyLoss:
    """Return PPO's loss with truncated importance sampling for the engine's part.

    It is `-sg(min(pi_old / mu, cap)) min(u A, clip(u, 1 - clip_low, 1 + clip_high) A)` with
    `u = pi / pi_old`, the ratio to the learner before the step, whatever `algorithm.anchor`. F. Yao
    et al., "Your Efficient RL Framework Secretly Brings You Off-Policy RL Training", 2025: PPO as
    the trainer would compute it alone, and a capped weight for the engine's part. It is decoupled
    PPO's loss, too (Hilton et al., arXiv 2110.00641; AReaL, arXiv 2505.24298, section 5.2: a cap
    of 5).
    """
    assert inputs.old_logprobs is not None
    settings = inputs.config.tis
    behaviour = bounded_exp(inputs.old_logprobs - inputs.rollout_logprobs)
    ratio = bounded_exp(inputs.logprobs - inputs.old_logprobs)
    surrogate = _clip_by_settings(ratio, inputs.advantages, settings, settings.dual_clip)
    high = ratio.detach() > 1
    capped = behaviour > settings.cap
    return PolicyLoss(
        behaviour.clamp(max=settings.cap) * surrogate.value,
        surrogate.clipped | capped,
        high | capped,
    )


def gspo_loss(inputs: LossInputs) -> PolicyLoss:
    """Return PPO's clipped loss on the length-normalised ratio of the episode. GSPO, arXiv
    2507.18071, section 4.

    It is `-min(s A, clip(s, 1 - clip_low, 1 + clip_high) A)` with
    `log s = clamp(mean over the episode's tokens of (log pi - log pi_a), -20, 20)`.

    In the token form of its section 4.3, `s_t = sg(s) pi / sg(pi)`: equal to GSPO in value and,
    where A and the weight are the same all over an episode, in gradient; and correct for advantages
    that differ between turns too.

    Its range is narrow: with the rollout's anchor the rounding of bf16 between engine and learner
    alone is wider for short episodes. With `noise`, the standard deviation of a token's log-ratio
    that rounding causes, that of the mean over n tokens is `noise / sqrt(n)`, and neither bound is
    nearer to 1 than three of them.
    """
    settings = inputs.config.gspo
    log_ratio = inputs.episode_mean((inputs.logprobs - inputs.anchor_logprobs).detach())
    ratio = bounded_exp(log_ratio).to(inputs.logprobs.dtype)
    ratio = ratio * (inputs.logprobs - inputs.logprobs.detach()).exp()
    least = (
        3 * settings.noise * inputs.episode_sum(inputs.mask).clamp(min=1).rsqrt().to(ratio.dtype)
    )
    return _clip_to_bounds(
        ratio,
        inputs.advantages,
        1 - least.clamp(min=settings.clip_low),
        1 + least.clamp(min=settings.clip_high),
    )


@by_token
def cispo_loss(inputs: LossInputs) -> PolicyLoss:
    """Return CISPO's loss: `-sg(clip(r, 1 - clip_low, 1 + clip_high)) A log pi`. No token's
    gradient is dropped.

    CISPO, arXiv 2506.13585, eq. 4 and 5, without a lower bound (`clip_low` = 1) as there; an upper
    bound on r of about 5 is ScaleRL's, arXiv 2510.13786.
    """
    settings = inputs.config.cispo
    ratio = inputs.ratio().detach()
    low = 1 - settings.clip_low
    high = 1 + settings.clip_high
    weight = ratio.clamp(low, high)
    return PolicyLoss(-weight * inputs.advantages * inputs.logprobs, (ratio < low) | (ratio > high))


@by_token
def sapo_loss(inputs: LossInputs) -> PolicyLoss:
    """Return SAPO's loss: `-sigmoid(tau (r - 1)) (4 / tau) A`.

    Here `tau = tau_positive` where A > 0, else `tau_negative`. A soft gate in place of a clip, with
    the gradient of `-r A` at r = 1. SAPO, arXiv 2511.20347.
    """
    settings = inputs.config.sapo
    tau = torch.full_like(inputs.advantages, settings.tau_negative)
    tau = tau.masked_fill(inputs.advantages > 0, settings.tau_positive)
    gate = torch.sigmoid(tau * (inputs.ratio() - 1)) * 4 / tau
    return PolicyLoss(-gate * inputs.advantages, torch.zeros_like(inputs.mask))


@by_token
def dppo_loss(inputs: LossInputs) -> PolicyLoss:
    """Return DPPO's loss: `-M r A`, with `M = 0` where the policy has moved too far in the
    direction of A, else 1.

    `M = 0` where `|pi - pi_a|` (the total variation between "this token" and "any other" under the
    two) is above `threshold_high` and A > 0 and r > 1, or above `threshold_low` and A < 0 and r
    < 1. DPPO with the binary-TV divergence, arXiv 2602.04879, eq. 11 to 13. Its authors anchor on
    the rollout policy.
    """
    settings = inputs.config.dppo
    ratio = inputs.ratio()
    advantages = inputs.advantages
    change = inputs.logprobs.detach().exp() - inputs.anchor_logprobs.exp()
    too_high = (advantages > 0) & (change > settings.threshold_high)
    too_low = (advantages < 0) & (change < -settings.threshold_low)
    clipped = too_high | too_low
    return PolicyLoss(torch.where(clipped, 0.0, -ratio * advantages), clipped)


def cppo_loss(inputs: LossInputs) -> PolicyLoss:
    """Return CPPO's loss: `-M r A`, with `M = 0` where a token that moves further away exceeds its
    threshold or the budget of its prefix, else 1.

    Of an episode's trained tokens 1 .. T, with `D_t = |pi - pi_a|` as in `dppo_loss`, and weights
    `w_t = 1 - (1 - weight_min) (t - 1) / (T - 1)`, it is `M_t = 1` where `A_t (r_t - 1) <= 0`, or

        w_t D_t <= min(threshold, threshold + budget W_{t-1} - S_{t-1})

    for the sums W of w and S of w D over the tokens before it, masked or not: an early token may
    move less than a late one, and less after a prefix that moved more than `budget` in the mean.
    CPPO with the binary-TV divergence and a constant budget, arXiv 2606.10968, eq. 8 to 11 and
    algorithm 1. (Its runs on base models take each response's 90th percentile of D for the budget,
    within budget .. 2 budget, eq. 22.) Its authors anchor on the rollout policy.
    """
    settings = inputs.config.cppo
    ratio = inputs.ratio()
    change = inputs.logprobs.detach().double().exp() - inputs.anchor_logprobs.double().exp()
    place = _sum_prefixes(inputs, inputs.mask)
    last = (inputs.episode_sum(inputs.mask) - 1).clamp(min=1)
    weights = 1 - (1 - settings.weight_min) * place / last
    moved = weights * change.abs()
    slack = settings.budget * _sum_prefixes(inputs, weights) - _sum_prefixes(inputs, moved)
    clipped = (inputs.advantages * change > 0) & (moved > settings.threshold + slack.clamp(max=0))
    return PolicyLoss(torch.where(clipped, 0.0, -ratio * inputs.advantages), clipped)


def _sum_prefixes(inputs: LossInputs, values: Tensor) -> Tensor:
    """Return float64 `[M]`: the sum of `values` `[M]`, each within 0..1, over the tokens of the
    episode before each token, in the order of its turns, within `inputs.mask`.

    In integers, as multiples of 2^-40: exact whatever else is in the micro-batch, and deterministic
    on a GPU, where torch has no such running sum of floats.
    """
    order = torch.arange(len(values), device=values.device)
    for key in (inputs.turns, inputs.episode_index):
        order = order if key is None else order[torch.argsort(key[order], stable=True)]
    steps = (torch.where(inputs.mask, values, 0).double() * 2**40).round().long()[order]
    running = steps.cumsum(0) - steps
    episodes = inputs.episode_index[order]
    first = torch.full((inputs.num_episodes,), 2**62, device=values.device)
    first.scatter_reduce_(0, episodes, running, "amin")
    return torch.empty_like(running).index_copy(0, order, running - first[episodes]) / 2**40


@by_token
def clip_cov_loss(inputs: LossInputs) -> PolicyLoss:
    """Return Clip-Cov's loss: that of `ppo_loss`, 0 for the chosen tokens, some of those that lower
    the entropy most (`token_choice.choose_clip_cov`).

    Clip-Cov, arXiv 2505.22617, eq. 12, with PPO's clipping as in its authors' code.
    """
    assert inputs.chosen is not None
    loss = ppo_loss(inputs)
    value = torch.where(inputs.chosen, 0.0, loss.value)
    return PolicyLoss(value, loss.clipped | inputs.chosen, loss.high)


@by_token
def kl_cov_loss(inputs: LossInputs) -> PolicyLoss:
    """Return KL-Cov's loss: `-r A`, plus `coef |log pi - log pi_a|` for the chosen tokens, those
    that lower the entropy most (`token_choice.choose_kl_cov`).

    KL-Cov, arXiv 2505.22617, eq. 14, with its authors' estimate of the KL.
    """
    assert inputs.chosen is not None
    away = (inputs.logprobs - inputs.anchor_logprobs).abs()
    penalty = inputs.config.kl_cov.coef * torch.where(inputs.chosen, away, 0.0)
    value = penalty - inputs.ratio() * inputs.advantages
    return PolicyLoss(value, torch.zeros_like(inputs.mask))


@by_token
def m2po_loss(inputs: LossInputs) -> PolicyLoss:
    """Return M2PO's loss: `-r A`, 0 for the chosen tokens, those that move furthest away
    (`token_choice.choose_m2po`).

    M2PO, arXiv 2510.01161, eq. 5. Its ratio is to the policy that sampled.
    """
    assert inputs.chosen is not None
    return PolicyLoss(
        torch.where(inputs.chosen, 0.0, -inputs.ratio() * inputs.advantages), inputs.chosen
    )


def _clip_by_settings(
    ratio: Tensor, advantages: Tensor, settings: ClipConfig, dual_clip: float | None = None
) -> PolicyLoss:
    """Return `-min(r A, clip(r) A)`, where A < 0 at most `-dual_clip A`; without gradient where a
    bound is in effect."""
    low, high = (
        torch.full_like(ratio, bound) for bound in (1 - settings.clip_low, 1 + settings.clip_high)
    )
    loss = _clip_to_bounds(ratio, advantages, low, high)
    if dual_clip is None:
        return loss
    cut = (advantages < 0) & (ratio > dual_clip)
    return PolicyLoss(
        torch.where(cut, -dual_clip * advantages, loss.value), loss.clipped | cut, loss.high
    )


def _clip_to_bounds(ratio: Tensor, advantages: Tensor, low: Tensor, high: Tensor) -> PolicyLoss:
    """Return `-min(r A, clip(r, low, high) A)`, bounds `[M]`."""
    clipped = ((advantages > 0) & (ratio > high)) | ((advantages < 0) & (ratio < low))
    bounded = torch.minimum(torch.maximum(ratio.detach(), low), high)
    return PolicyLoss(
        -torch.where(clipped, bounded, ratio) * advantages, clipped, ratio.detach() > 1
    )


POLICY_LOSSES: dict[str, PolicyLossFunction] = {
    "truncated_pg": truncated_pg_loss,
    "sequence_truncated_pg": sequence_truncated_pg_loss,
    "ppo": ppo_loss,
    "tis": tis_loss,
    "gspo": gspo_loss,
    "cispo": cispo_loss,
    "sapo": sapo_loss,
    "dppo": dppo_loss,
    "cppo": cppo_loss,
    "clip_cov": clip_cov_loss,
    "kl_cov": kl_cov_loss,
    "m2po": m2po_loss,
}


def resolve_policy_loss(name: str) -> PolicyLossFunction:
    """Return the loss that `algorithm.policy_loss` names; the configuration has checked it."""
    return POLICY_LOSSES.get(name) or import_policy_loss(name)


def check_custom_loss(config: AlgorithmConfig) -> None:
    """Raise `ConfigError` if a custom loss, called with four made up tokens, returns anything but
    what its type says."""
    function = resolve_policy_loss(config.policy_loss)
    tokens = torch.zeros(4)
    inputs = LossInputs(
        logprobs=torch.full((4,), -1.0, requires_grad=True),
        anchor_logprobs=tokens - 1,
        rollout_logprobs=tokens - 1,
        old_logprobs=tokens - 1 if needs_old_logprobs(config) else None,
        advantages=tokens + 1,
        mask=torch.ones(4, dtype=torch.bool),
        episode_index=torch.tensor([0, 0, 1, 1]),
        num_episodes=2,
        config=config,
    )
    said = f"`algorithm.policy_loss` = {config.policy_loss!r}"
    try:
        made = function(inputs)
    except Exception as error:
        raise ConfigError(
            f"{said} fails with four made up tokens: {type(error).__name__}: {error}"
        ) from error
    if not isinstance(made, PolicyLoss):
        raise ConfigError(
            f"{said} returns a {type(made).__name__}: it must return r3async.PolicyLoss(value, "
            "clipped), each with one entry a token"
        )
    for name, part in (("value", made.value), ("clipped", made.clipped)):
        if not isinstance(part, Tensor) or part.shape != inputs.mask.shape:
            what = list(part.shape) if isinstance(part, Tensor) else type(part).__name__
            raise ConfigError(f"{said}: `{name}` has one entry a token, here [4], and it is {what}")


def needs_old_logprobs(config: AlgorithmConfig) -> bool:
    """Return True if the learner must compute `old_logprobs` before the step's first update."""
    compared = (config.anchor, config.correction.numerator)
    return "recomputed" in compared or config.policy_loss == "tis"


def explain_gspo_clipping(algorithm: AlgorithmConfig, metrics: Mapping[str, float]) -> str:
    """Return a hint if GSPO's range is too narrow in the first step: the reason, and what to set.
    Empty if it is not.

    In the first step engine and learner have equal weights, and ratios are 1 but for rounding. The
    noise of a token's log-ratio is `sqrt(2 k3)`. Empty with another loss, too.
    """
    clipped = metrics["rollout_corr/clipped_fraction"]
    if (
        algorithm.policy_loss != "gspo"
        or algorithm.anchor != "rollout"
        or clipped <= MAX_ROUNDING_CLIPPED
    ):
        return ""
    noise = math.sqrt(2 * metrics.get("rollout_kl/k3_staleness_0", 0.0))
    return (
        f"{clipped:.0%} of the tokens are clipped by rounding alone, of which a token's log-ratio "
        f"has {noise:.2g}: set algorithm.gspo.noise={noise:.2g}, which widens the range of short "
        'episodes, or algorithm.anchor="recomputed"'
    )
