"""Sums over the tokens of a micro-batch, from which the metrics of a loss are computed."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

import numpy as np
import torch
from torch import Tensor

from r3async.learner.drift import clamped_k3, k2, k3
from r3async.learner.policy_loss import bounded_exp, sum_by_episode


@dataclass
class LossSums:
    """The sums of a loss's terms and figures, as float64 scalars on the loss's device.

    All are sums, except those that `max_names` names, and `split_episode_parts`.
    """

    # Terms of the loss, each token's multiplied by its weight.
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
    clipped_high: Tensor
    masked: Tensor
    # Over episodes that have a trained token, without split ones whose parts are still open.
    episodes: Tensor
    episodes_masked: Tensor
    learner_perplexity: Tensor
    rollout_perplexity: Tensor
    perplexity_ratio: Tensor
    episode_ratio_squared: Tensor
    split_episode_parts: Tensor
    """float64 `[P, 5]`: parts of episodes that have tokens elsewhere too; `add_episodes` computes
    their figures when all parts are known. Columns: the episode's number (-1: all of it is here),
    its tokens here, those that are kept, sum(log pi), sum(log mu)."""

    def __add__(self, other: LossSums) -> LossSums:
        added = {name: getattr(self, name) + getattr(other, name) for name in self.sum_names()}
        added |= {
            name: torch.maximum(getattr(self, name), getattr(other, name))
            for name in self.max_names()
        }
        return LossSums(
            **added,
            split_episode_parts=torch.cat([self.split_episode_parts, other.split_episode_parts]),
        )

    @staticmethod
    def sum_names() -> list[str]:
        """Return the names of the sums in the order of `to_numpy`."""
        return [f.name for f in fields(LossSums) if f.name != "split_episode_parts"]

    @staticmethod
    def max_names() -> list[str]:
        """Return the names of the entries that combine by their maximum, not by their sum."""
        return ["ratio_max", "abs_diff_max"]

    @staticmethod
    def zeros(device: torch.device | str = "cpu") -> LossSums:
        """Return the sums of no tokens."""
        scalars = {
            name: torch.zeros((), dtype=torch.float64, device=device)
            for name in LossSums.sum_names()
        }
        return LossSums(
            **scalars, split_episode_parts=torch.zeros(0, 5, dtype=torch.float64, device=device)
        )

    @staticmethod
    def from_micro_batch(
        logprobs: Tensor,
        rollout_logprobs: Tensor,
        reference_logprobs: Tensor | None,
        entropies: Tensor,
        *,
        counted: Tensor,
        trained: Tensor,
        clipped: Tensor,
        clipped_high: Tensor,
        episode_index: Tensor,
        num_episodes: int,
        split_episode_ids: Tensor | None = None,
        token_limit: float = math.inf,
    ) -> LossSums:
        """Return the sums of one micro-batch; the terms of the loss are left 0.

        Columns are `[M]` without gradient; tokens count where `counted` is True.

        Args:
            counted: bool `[M]`: the tokens that count.
            trained: bool `[M]`: the counted tokens that the policy loss trains.
            clipped: bool `[M]`: the counted tokens that it clips.
            clipped_high: bool `[M]`: the counted tokens that it clips from above.
            split_episode_ids: See `TokenBatch`.
            token_limit: See `clamped_k3`.
        """
        sums = LossSums.zeros(logprobs.device)
        logprobs, rollout_logprobs, entropies = (
            torch.where(counted, x.double(), 0.0) for x in (logprobs, rollout_logprobs, entropies)
        )
        delta = logprobs - rollout_logprobs
        ratio = torch.where(counted, bounded_exp(delta), 0.0)
        sums.tokens = counted.sum(dtype=torch.float64)
        sums.k1, sums.k2, sums.k3 = (
            (-delta).sum(),
            k2(delta).sum(),
            clamped_k3(delta, token_limit).sum(),
        )
        if reference_logprobs is not None:
            away = torch.where(counted, reference_logprobs.double(), 0.0) - logprobs
            sums.reference_k3 = k3(away).sum()
        sums.abs_diff, sums.abs_diff_max = (
            delta.abs().sum(),
            delta.abs().max() if len(delta) else delta.sum(),
        )
        sums.ratio, sums.ratio_squared = ratio.sum(), ratio.square().sum()
        sums.ratio_max = ratio.max() if len(ratio) else ratio.sum()
        sums.entropy = entropies.sum(dtype=torch.float64)
        sums.clipped, sums.clipped_high = (
            x.sum(dtype=torch.float64) for x in (clipped, clipped_high)
        )
        sums.masked = (counted & ~trained).sum(dtype=torch.float64)
        columns = (counted, trained, logprobs, rollout_logprobs)
        parts = torch.stack(
            [sum_by_episode(x, episode_index, num_episodes) for x in columns], dim=1
        )
        if split_episode_ids is not None:
            sums.split_episode_parts = torch.cat(
                [split_episode_ids.double()[:, None], parts], dim=1
            )
            # Selecting rows would wait for the device.
            parts = torch.where(split_episode_ids[:, None] < 0, parts, 0.0)
        sums.add_episodes(parts)
        return sums

    def add_episodes(self, episodes: Tensor) -> None:
        """Add the figures of whole episodes: float64 `[E, 4]`, the columns of `split_episode_parts`
        after the first."""
        tokens, kept, learner, rollout = episodes.unbind(dim=1)
        trained = tokens > 0

        def total(values: Tensor) -> Tensor:
            return torch.where(trained, values, 0.0).sum()

        mean_learner, mean_rollout = (x / tokens.clamp(min=1) for x in (learner, rollout))
        self.episodes += trained.sum(dtype=torch.float64)
        self.episodes_masked += total((kept == 0).double())
        self.learner_perplexity += total((-mean_learner).exp())
        self.rollout_perplexity += total((-mean_rollout).exp())
        self.perplexity_ratio += total(bounded_exp(mean_rollout - mean_learner))
        self.episode_ratio_squared += total(bounded_exp(learner - rollout).square())

    def to_numpy(self) -> np.ndarray:
        """Return the sums, float64 `[n]`, on the host, by one transfer; without
        `split_episode_parts`."""
        return torch.stack([getattr(self, name) for name in self.sum_names()]).cpu().numpy()

    def to_metrics(self) -> dict[str, float]:
        """Return the metrics of these sums alone, see `compute_metrics`."""
        return self.compute_metrics(self.to_numpy())

    @staticmethod
    def compute_metrics(values: np.ndarray) -> dict[str, float]:
        """Return the metrics from `values` combined over micro-batches and ranks. All are 0 if no
        token was trained.

        pi: the learner; mu: the rollout policy; `delta = log pi - log mu` and
        `r = e^clamp(delta, -20, 20)` at a token. Means over tokens are over the n trained ones,
        corrected or not; means over episodes are over the N that have a trained token.

        * `loss/*`: the terms of the loss, which is their sum (`loss/entropy` is the
          bonus, so negative).
        * `rollout_kl/k1`, `/k2`, `/k3`: means of the estimators of KL(mu || pi), see `drift`;
          `reference_kl/k3`: of KL(pi || reference), 0 without a reference model.
          `entropy/mean`: nats.
        * `rollout_logprob/abs_diff_mean`, `_max`: of |delta|, on which engine and learner should
          agree with the same weights.
        * `ratio/max`: the largest r. `ratio/ess`: `(sum r)^2 / (n sum r^2)`, the effective sample
          size by token, 1 when all ratios are equal.
        * `rollout_corr/*`, the vocabulary of verl's rollout correction, whose `kl`, `k3_kl` and
          `ess` are here `rollout_kl/k1`, `rollout_kl/k3` and `ratio/ess`: `chi2_token` =
          `mean(r^2) - 1` and `chi2_seq` =
          `mean over episodes of e^2clamp(sum(delta), -20, 20) - 1`, both estimates of chi^2(pi ||
          mu); `training_ppl`, `rollout_ppl` = mean over episodes of `e^-mean(log pi)`, of
          `e^-mean(log mu)`; `ppl_ratio` = mean over episodes of `e^-mean(delta)`;
          `clipped_fraction`: the share of trained tokens that a bound of the policy loss clipped,
          and `clipped_high_fraction`, `clipped_low_fraction` by the side of the bound;
          `masked_fraction`: the share that `correction` left out of it, and
          `masked_sequence_fraction`: the share of episodes of which it left out every token.
        """
        s = dict(zip(LossSums.sum_names(), values.tolist(), strict=True))
        n = max(s["tokens"], 1.0)
        episodes = max(s["episodes"], 1.0)
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
            "ratio/ess": s["ratio"] ** 2 / (n * s["ratio_squared"]) if s["ratio_squared"] else 0.0,
            "entropy/mean": s["entropy"] / n,
            "rollout_corr/chi2_token": s["ratio_squared"] / n - 1 if s["tokens"] else 0.0,
            "rollout_corr/chi2_seq": s["episode_ratio_squared"] / episodes - 1
            if s["episodes"]
            else 0.0,
            "rollout_corr/training_ppl": s["learner_perplexity"] / episodes,
            "rollout_corr/rollout_ppl": s["rollout_perplexity"] / episodes,
            "rollout_corr/ppl_ratio": s["perplexity_ratio"] / episodes,
            "rollout_corr/clipped_fraction": s["clipped"] / n,
            "rollout_corr/clipped_high_fraction": s["clipped_high"] / n,
            "rollout_corr/clipped_low_fraction": (s["clipped"] - s["clipped_high"]) / n,
            "rollout_corr/masked_fraction": s["masked"] / n,
            "rollout_corr/masked_sequence_fraction": s["episodes_masked"] / episodes,
        }
