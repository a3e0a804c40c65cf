"""What a step reports of its loss: sums over trained tokens and episodes that add up over micro-batches and ranks.

pi: the learner; mu: the rollout policy; `delta = log pi - log mu` and `r = e^clamp(delta, -20, 20)` at a token. Means over
tokens are over the n trained ones, corrected or not; means over episodes are over the N that have a trained token.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import numpy as np
import torch
from torch import Tensor

from r3async.learner.losses.kl import k1, k2, k3, reference_k3
from r3async.learner.losses.policy_loss import bounded_exp
from r3async.learner.losses.segments import segment_count, segment_sum


@dataclass
class ObjectiveSums:
    """float64 scalars on the loss's device. All are sums, except those that `maxima` names, and `open`."""

    # The terms of the loss, each token's multiplied by its weight.
    policy: Tensor
    rollout_kl: Tensor
    reference_kl: Tensor
    entropy_bonus: Tensor
    # Over trained tokens.
    tokens: Tensor
    k1: Tensor
    k2: Tensor
    k3: Tensor
    reference_k3: Tensor
    abs_diff: Tensor
    abs_diff_max: Tensor
    ratio: Tensor
    ratio_squared: Tensor
    ratio_max: Tensor
    entropy: Tensor
    clipped: Tensor
    left_out: Tensor
    # Over episodes that have a trained token, without the open ones.
    episodes: Tensor
    episodes_left_out: Tensor
    learner_perplexity: Tensor
    rollout_perplexity: Tensor
    perplexity_ratio: Tensor
    episode_ratio_squared: Tensor
    open: Tensor
    """float64 `[P, 5]`: of parts of episodes that have tokens elsewhere too, which `finish` makes figures of when all parts
    are there: the episode's number, its tokens here, those that are kept, sum(log pi), sum(log mu)."""

    def __add__(self, other: ObjectiveSums) -> ObjectiveSums:
        added = {name: getattr(self, name) + getattr(other, name) for name in self.names()}
        added |= {name: torch.maximum(getattr(self, name), getattr(other, name)) for name in self.maxima()}
        return ObjectiveSums(**added, open=torch.cat([self.open, other.open]))

    @staticmethod
    def names() -> list[str]:
        """The sums in the order of `values`."""
        return [f.name for f in fields(ObjectiveSums) if f.name != "open"]

    @staticmethod
    def maxima() -> list[str]:
        """The names that combine by their maximum, not by their sum."""
        return ["ratio_max", "abs_diff_max"]

    @staticmethod
    def zero(device: torch.device | str = "cpu") -> ObjectiveSums:
        """Of no token at all."""
        scalars = {name: torch.zeros((), dtype=torch.float64, device=device) for name in ObjectiveSums.names()}
        return ObjectiveSums(**scalars, open=torch.zeros(0, 5, dtype=torch.float64, device=device))

    @staticmethod
    def of_batch(
        logprobs: Tensor,
        rollout_logprobs: Tensor,
        reference_logprobs: Tensor | None,
        entropies: Tensor,
        *,
        mask: Tensor,
        kept: Tensor,
        clipped: Tensor,
        sequence: Tensor,
        sequences: int,
        open: Tensor | None = None,
    ) -> ObjectiveSums:
        """Of one micro-batch; the terms of the loss are left 0. Columns `[M]` without gradient, of which those count where
        `mask` is True; `kept`, `clipped` bool `[M]`: which of `mask` the policy loss trains, and clips. `open`: as in
        `TokenBatch`."""
        sums = ObjectiveSums.zero(logprobs.device)
        logprobs, rollout_logprobs, entropies = (
            torch.where(mask, x.double(), 0.0) for x in (logprobs, rollout_logprobs, entropies)
        )
        delta = logprobs - rollout_logprobs
        ratio = torch.where(mask, bounded_exp(delta), 0.0)
        sums.tokens = mask.sum(dtype=torch.float64)
        sums.k1, sums.k2, sums.k3 = k1(delta).sum(), k2(delta).sum(), k3(delta).sum()
        if reference_logprobs is not None:
            away = torch.where(mask, reference_logprobs.double(), 0.0) - logprobs
            sums.reference_k3 = reference_k3(away).sum()
        sums.abs_diff, sums.abs_diff_max = delta.abs().sum(), delta.abs().max() if len(delta) else delta.sum()
        sums.ratio, sums.ratio_squared = ratio.sum(), ratio.square().sum()
        sums.ratio_max = ratio.max() if len(ratio) else ratio.sum()
        sums.entropy = entropies.sum(dtype=torch.float64)
        sums.clipped = clipped.sum(dtype=torch.float64)
        sums.left_out = (mask & ~kept).sum(dtype=torch.float64)
        tokens, kept_tokens = (segment_count(m, sequence, sequences) for m in (mask, kept))
        learner, rollout = (segment_sum(x, mask, sequence, sequences) for x in (logprobs, rollout_logprobs))
        parts = torch.stack([tokens, kept_tokens, learner, rollout], dim=1)
        if open is not None:
            sums.open = torch.cat([open.double()[:, None], parts], dim=1)[open >= 0]
            parts = parts[open < 0]
        sums.finish(parts)
        return sums

    def finish(self, episodes: Tensor) -> None:
        """Add the figures of whole episodes: float64 `[E, 4]`, the columns of `open` after the first."""
        tokens, kept, learner, rollout = episodes.unbind(dim=1)
        trained = tokens > 0

        def total(values: Tensor) -> Tensor:
            return torch.where(trained, values, 0.0).sum()

        mean_learner, mean_rollout = (x / tokens.clamp(min=1) for x in (learner, rollout))
        self.episodes += trained.sum(dtype=torch.float64)
        self.episodes_left_out += total((kept == 0).double())
        self.learner_perplexity += total((-mean_learner).exp())
        self.rollout_perplexity += total((-mean_rollout).exp())
        self.perplexity_ratio += total(bounded_exp(mean_rollout - mean_learner))
        self.episode_ratio_squared += total(bounded_exp(learner - rollout).square())

    def values(self) -> np.ndarray:
        """float64 `[n]` on the host, by one transfer; without `open`."""
        return torch.stack([getattr(self, name) for name in self.names()]).cpu().numpy()

    def metrics(self) -> dict[str, float]:
        """See `metrics_of`."""
        return self.metrics_of(self.values())

    @staticmethod
    def metrics_of(values: np.ndarray) -> dict[str, float]:
        """From `values` combined over micro-batches and ranks. All are 0 if no token was trained.

        * `loss/*`: the terms of the loss, which they add up to (`loss/entropy` is the bonus, so negative).
        * `rollout_kl/k1`, `/k2`, `/k3`: means of the estimators of KL(mu || pi), see `kl`; `reference_kl/k3`: of
          KL(pi || reference), 0 without a reference model. `entropy/mean`: nats.
        * `rollout_logprob/abs_diff_mean`, `_max`: of |delta|, which engine and learner should agree on with the same weights.
        * `ratio/max`: the largest r. `ratio/ess`: `(sum r)^2 / (n sum r^2)`, the effective sample size by token, 1 when all
          ratios are equal.
        * `rollout_corr/*`, the vocabulary of verl's rollout correction: `kl` = k1, `k3_kl` = k3, `ess` = `ratio/ess`;
          `chi2_token` = `mean(r^2) - 1` and `chi2_seq` = `mean over episodes of e^2clamp(sum(delta), -20, 20) - 1`, both
          estimates of chi^2(pi || mu); `training_ppl`, `rollout_ppl` = mean over episodes of `e^-mean(log pi)`, of
          `e^-mean(log mu)`; `ppl_ratio` = mean over episodes of `e^-mean(delta)`; `clipped_fraction`: of trained tokens,
          those that a bound of the policy loss held; `masked_fraction`: those that `correction` left out of it, and
          `masked_sequence_fraction`: episodes of which it left out every token.
        """
        s = dict(zip(ObjectiveSums.names(), values.tolist(), strict=True))
        n, episodes = max(s["tokens"], 1.0), max(s["episodes"], 1.0)
        ess = s["ratio"] ** 2 / (n * s["ratio_squared"]) if s["ratio_squared"] else 0.0
        return {
            "loss/policy": s["policy"],
            "loss/rollout_kl": s["rollout_kl"],
            "loss/reference_kl": s["reference_kl"],
            "loss/entropy": s["entropy_bonus"],
            "rollout_kl/k1": s["k1"] / n,
            "rollout_kl/k2": s["k2"] / n,
            "rollout_kl/k3": s["k3"] / n,
            "reference_kl/k3": s["reference_k3"] / n,
            "rollout_logprob/abs_diff_mean": s["abs_diff"] / n,
            "rollout_logprob/abs_diff_max": s["abs_diff_max"],
            "ratio/max": s["ratio_max"],
            "ratio/ess": ess,
            "entropy/mean": s["entropy"] / n,
            "rollout_corr/kl": s["k1"] / n,
            "rollout_corr/k3_kl": s["k3"] / n,
            "rollout_corr/ess": ess,
            "rollout_corr/chi2_token": s["ratio_squared"] / n - 1 if s["tokens"] else 0.0,
            "rollout_corr/chi2_seq": s["episode_ratio_squared"] / episodes - 1 if s["episodes"] else 0.0,
            "rollout_corr/training_ppl": s["learner_perplexity"] / episodes,
            "rollout_corr/rollout_ppl": s["rollout_perplexity"] / episodes,
            "rollout_corr/ppl_ratio": s["perplexity_ratio"] / episodes,
            "rollout_corr/clipped_fraction": s["clipped"] / n,
            "rollout_corr/masked_fraction": s["left_out"] / n,
            "rollout_corr/masked_sequence_fraction": s["episodes_left_out"] / episodes,
        }
