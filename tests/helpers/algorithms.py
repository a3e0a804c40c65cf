"""Made-up steps for the tests of losses, and every formula once more as plain Python over single tokens."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import get_args, get_type_hints

import numpy as np
import torch

from r3async.config import AlgorithmConfig, ClipConfig, config_from_dict
from r3async.learner.loss import TokenBatch, compute_loss
from r3async.learner.loss_sums import LossSums

REDUCTIONS = get_args(get_type_hints(AlgorithmConfig)["reduction"])


def algorithm(**settings) -> AlgorithmConfig:
    """Return `algorithm.*` from plain data, checked as if it were read from a file."""
    return config_from_dict({"algorithm": settings}).algorithm


@dataclass
class Tokens:
    """Columns of one sample, float64 `[T]` unless stated otherwise."""

    logprobs: np.ndarray
    rollout: np.ndarray
    old: np.ndarray
    reference: np.ndarray
    entropies: np.ndarray
    advantages: np.ndarray
    weights: np.ndarray
    ages: np.ndarray
    mask: np.ndarray
    chosen: np.ndarray
    """Tokens that a loss has chosen among those of the minibatch."""

    def __len__(self) -> int:
        return len(self.logprobs)


def make_samples(seed: int, lengths: Sequence[int], *, drift: float = 0.3, masked: float = 0.2) -> list[Tokens]:
    """Return samples whose advantages are constant on halves, and whose masked-out tokens hold NaN and infinities."""
    rng = np.random.default_rng(seed)
    samples = []
    for n in lengths:
        logprobs = -rng.exponential(1.0, n) - 0.01

        def near(scale: float, logprobs: np.ndarray = logprobs, n: int = n) -> np.ndarray:
            return np.minimum(logprobs + rng.normal(0, scale, n), -1e-3)

        mask = rng.random(n) >= masked
        columns = {
            "logprobs": logprobs,
            "rollout": near(drift),
            "old": near(drift / 2),
            "reference": near(2 * drift),
            "entropies": rng.random(n),
            "advantages": np.repeat(rng.normal(size=2), [n - n // 2, n // 2]),
            "weights": rng.random(n) / 10,
        }
        # Only values that float32 can hold, so that a float64 reference sees the same inputs.
        columns = {k: v.astype(np.float32).astype(np.float64) for k, v in columns.items()}
        for name in ("rollout", "old", "reference", "advantages", "weights"):
            columns[name][~mask] = rng.choice([np.nan, np.inf, -np.inf], np.count_nonzero(~mask))
        samples.append(Tokens(**columns, ages=rng.integers(0, 5, n), mask=mask, chosen=np.arange(n) % 3 == seed % 3))
    return samples


def batch_of(
    samples: Sequence[Tokens], dtype: torch.dtype = torch.float32
) -> tuple[TokenBatch, torch.Tensor, torch.Tensor]:
    """Return one micro-batch of the tokens in `mask`: `TokenBatch`, log-probs and entropies (both with gradient)."""

    def column(name: str) -> torch.Tensor:
        return torch.from_numpy(np.concatenate([getattr(s, name)[s.mask] for s in samples] or [np.zeros(0)])).to(dtype)

    batch = TokenBatch(
        rollout_logprobs=column("rollout"),
        advantages=column("advantages"),
        weights=column("weights"),
        episode_index=torch.repeat_interleave(
            torch.arange(len(samples)), torch.tensor([s.mask.sum() for s in samples], dtype=torch.long)
        ),
        num_episodes=len(samples),
        staleness=column("ages").to(torch.int32),
        chosen=column("chosen").bool(),
        old_logprobs=column("old"),
        reference_logprobs=column("reference"),
    )
    return batch, column("logprobs").requires_grad_(), column("entropies").requires_grad_()


@dataclass
class Outcome:
    """Results of some micro-batches together: loss, sums, and each sample's gradients by log-probs and by entropies."""

    loss: float
    sums: LossSums
    logprob_grads: list[np.ndarray]
    entropy_grads: list[np.ndarray]


def run(
    micro_batches: Sequence[Sequence[Tokens]],
    config: AlgorithmConfig,
    dtype: torch.dtype = torch.float32,
    coef: float = 0.3,
    max_token_age: int | None = None,
) -> Outcome:
    """Run `compute_loss` on each micro-batch; gradients are in the order of the samples."""
    loss, sums = 0.0, LossSums.zeros()
    by_logprobs: list[np.ndarray] = []
    by_entropies: list[np.ndarray] = []
    for samples in micro_batches:
        batch, logprobs, entropies = batch_of(samples, dtype)
        value, part = compute_loss(
            batch, logprobs, entropies, config, rollout_kl_coef=coef, max_token_staleness=max_token_age
        )
        value.backward()
        loss, sums = loss + value.item(), sums + part
        by_logprobs += by_sample(samples, logprobs)
        if config.entropy_coef:
            by_entropies += by_sample(samples, entropies)
    return Outcome(loss, sums, by_logprobs, by_entropies)


def by_sample(samples: Sequence[Tokens], values: torch.Tensor) -> list[np.ndarray]:
    """Return the gradient by `values` of the tokens in `mask`, at each token of each sample; 0 elsewhere."""
    assert values.grad is not None
    out, start = [], 0
    for sample in samples:
        count = int(sample.mask.sum())
        out.append(np.zeros(len(sample)))
        out[-1][sample.mask] = values.grad[start : start + count].double().numpy()
        start += count
    return out


# -- every formula, token by token -----------------------------------------------------------------------------------


def exp20(x: float) -> float:
    return math.exp(min(max(x, -20.0), 20.0))


def clip(x: float, low: float, high: float) -> float:
    return min(max(x, low), high)


def binary_kl(p: float, q: float) -> float:
    p, q = (clip(x, 1e-6, 1 - 1e-6) for x in (p, q))
    return p * math.log(p / q) + (1 - p) * math.log((1 - p) / (1 - q))


def k3(delta: float) -> float:
    return math.exp(delta) - 1 - delta


def kept_tokens(sample: Tokens, config: AlgorithmConfig, max_token_age: int | None = None) -> list[bool]:
    """Return for each token of a sample True if the corrections leave it in the policy loss."""
    c = config.correction
    rows = [t for t in range(len(sample)) if sample.mask[t]]
    learner = sample.logprobs if c.numerator == "learner" else sample.old
    deltas = {t: float(learner[t] - sample.rollout[t]) for t in rows}

    def inside(ratio: float, low: float | None, high: float | None) -> bool:
        return (low is None or ratio >= low) and (high is None or ratio <= high)

    whole = True
    if rows:
        whole &= inside(math.exp(sum(deltas.values()) / len(rows)), c.geometric_low, c.geometric_high)
        whole &= inside(math.exp(sum(deltas.values())), c.product_low, c.product_high)
        whole &= all(inside(math.exp(d), c.veto_low, c.veto_high) for d in deltas.values())
        whole &= c.max_token_kl is None or max(k3(d) for d in deltas.values()) <= c.max_token_kl
    kept = []
    for t in range(len(sample)):
        good = whole and t in deltas
        if good:
            p, q = math.exp(learner[t]), math.exp(sample.rollout[t])
            good &= inside(math.exp(deltas[t]), c.icepop_low, c.icepop_high)
            good &= c.kpop is None or (binary_kl(p, q) <= c.kpop and binary_kl(q, p) <= c.kpop)
            good &= max_token_age is None or int(sample.ages[t]) <= max_token_age
        kept.append(good)
    return kept


def policy_term(sample: Tokens, t: int, kept: list[bool], config: AlgorithmConfig) -> tuple[float, float]:
    """Return a token's policy loss, and its derivative by the token's log-prob, worked out by hand."""
    lp, mu, old, a = (float(x[t]) for x in (sample.logprobs, sample.rollout, sample.old, sample.advantages))
    anchors = sample.rollout if config.anchor == "rollout" else sample.old
    anchor = float(anchors[t])
    r = exp20(lp - anchor)
    name = config.policy_loss
    if name == "truncated_pg":
        w = min(r, config.truncated_pg.cap)
        return -w * a * lp, -w * a
    if name == "sequence_truncated_pg":
        r = exp20(math.fsum(float(sample.logprobs[i] - anchors[i]) for i in range(len(sample)) if kept[i]))
        w = min(r, config.truncated_pg.cap)
        return -w * a * lp, -w * a
    if name == "cispo":
        w = clip(r, 1 - config.cispo.clip_low, 1 + config.cispo.clip_high)
        return -w * a * lp, -w * a
    if name == "sapo":
        tau = config.sapo.tau_positive if a > 0 else config.sapo.tau_negative
        s = 1 / (1 + math.exp(-tau * (r - 1)))
        return -s * 4 / tau * a, -4 * s * (1 - s) * r * a
    if name == "dppo":
        far = abs(math.exp(lp) - math.exp(anchor))
        if (a > 0 and r > 1 and far > config.dppo.threshold_high) or (
            a < 0 and r < 1 and far > config.dppo.threshold_low
        ):
            return 0.0, 0.0
        return -r * a, -r * a
    if name == "cppo":
        c, rows = config.cppo, [i for i in range(len(sample)) if kept[i]]
        weights = [1 - (1 - c.weight_min) * i / max(len(rows) - 1, 1) for i in range(len(rows))]
        moved = [
            w * abs(math.exp(sample.logprobs[i]) - math.exp(anchors[i])) for w, i in zip(weights, rows, strict=True)
        ]
        at = rows.index(t)
        budget = c.threshold + c.budget * math.fsum(weights[:at]) - math.fsum(moved[:at])
        stays = a * (r - 1) <= 0 or moved[at] <= min(c.threshold, budget)
        return (-r * a, -r * a) if stays else (0.0, 0.0)
    if name == "clip_cov" and sample.chosen[t]:
        return 0.0, 0.0
    if name == "kl_cov":
        coef = config.kl_cov.coef * bool(sample.chosen[t])
        return coef * abs(lp - anchor) - r * a, coef * np.sign(lp - anchor) - r * a
    if name == "m2po":
        return (0.0, 0.0) if sample.chosen[t] else (-r * a, -r * a)
    weight, settings, dual = 1.0, config.ppo, config.ppo.dual_clip
    if name == "gspo":
        rows = [i for i in range(len(sample)) if kept[i]]
        r = exp20(sum(float(sample.logprobs[i] - anchors[i]) for i in rows) / len(rows))
        settings, dual = config.gspo, None
        least = 3 * settings.noise / math.sqrt(len(rows))
        settings = ClipConfig(clip_low=max(least, settings.clip_low), clip_high=max(least, settings.clip_high))
    if name == "tis":
        settings = config.tis
        dual, weight, r = settings.dual_clip, min(exp20(old - mu), settings.cap), exp20(lp - old)
    unclipped, bounded = r * a, clip(r, 1 - settings.clip_low, 1 + settings.clip_high) * a
    value = min(unclipped, bounded)
    slope = unclipped if unclipped <= bounded else 0.0
    if dual is not None and a < 0 and dual * a > value:
        value, slope = dual * a, 0.0
    return -weight * value, -weight * slope


def behaviour_weight(sample: Tokens, t: int, config: AlgorithmConfig) -> float:
    """Return the weight of a token by `algorithm.correction.weight`."""
    c = config.correction
    if c.weight == "none":
        return 1.0
    rows = [t] if c.weight == "token" else [i for i in range(len(sample)) if sample.mask[i]]
    return min(exp20(sum(float(sample.old[i] - sample.rollout[i]) for i in rows)), c.weight_cap)


def by_hand(
    samples: Sequence[Tokens], config: AlgorithmConfig, coef: float = 0.3
) -> dict[str, float | list[np.ndarray]]:
    """Return the terms of the loss (`loss/*`) and the gradients by log-probs, computed token by token."""
    terms = dict.fromkeys(("loss/policy", "loss/rollout_kl", "loss/reference_kl", "loss/entropy"), 0.0)
    gradients = []
    for sample in samples:
        kept, gradient = kept_tokens(sample, config), np.zeros(len(sample))
        for t in range(len(sample)):
            if not sample.mask[t]:
                continue
            w, delta = float(sample.weights[t]), float(sample.logprobs[t] - sample.rollout[t])
            value, slope = {
                "k1": (-delta, -1.0),
                "abs": (abs(delta), math.copysign(1.0, delta)),
                "k2": (delta**2 / 2, delta),
                "k3": (k3(delta), math.exp(delta) - 1),
            }[config.rollout_kl.estimator]
            terms["loss/rollout_kl"] += w * coef * value
            gradient[t] += w * coef * slope
            away, reference = float(sample.reference[t] - sample.logprobs[t]), config.reference_kl
            r, cap = exp20(delta), reference.weight_cap
            value, slope = k3(away), 1 - math.exp(away)
            if reference.weighted:
                value, slope = min(r, cap) * value, -r * away if r <= cap else cap * slope
            terms["loss/reference_kl"] += w * reference.coef * value
            gradient[t] += w * reference.coef * slope
            if kept[t]:
                value, slope = policy_term(sample, t, kept, config)
                factor = behaviour_weight(sample, t, config)
                value, slope = factor * value, factor * slope
                terms["loss/policy"] += w * value
                gradient[t] += w * slope
                terms["loss/entropy"] -= w * config.entropy_coef * float(sample.entropies[t])
        gradients.append(gradient)
    return {**terms, "gradients": gradients}


def distance(got: Sequence[np.ndarray], want: Sequence[np.ndarray]) -> float:
    """Return the norm of the difference, relative to the norm of `want`."""
    a, b = np.concatenate([*got, np.zeros(1)]), np.concatenate([*want, np.zeros(1)])
    return float(np.linalg.norm(a - b) / max(np.linalg.norm(b), 1e-30))
