"""Does the engine think what the learner thinks? One fixed text, scored by both after a delivery.

Weights that arrive corrupted load without an error and generate fluent text; only the log-probs tell.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np

from r3async.config import Config
from r3async.weights.manifest import Difference

_TEXT = "The quick brown fox jumps over 13 lazy dogs; def f(x): return x * 2  # reverse: xof nworb kciuq. "


class ProbeResult(msgspec.Struct, frozen=True):
    """Differences in nats, engine minus learner. `position` is that of the largest one, in the probe's tokens."""

    mean_difference: float
    max_difference: float
    position: int
    token_id: int
    learner_logprob: float
    engine_logprob: float
    tolerance: float

    @property
    def passed(self) -> bool:
        return bool(self.mean_difference <= self.tolerance)

    def describe(self) -> str:
        return (
            f"mean |difference| of the probe's log-probs is {self.mean_difference:.3g} nats (weights.probe_tolerance = "
            f"{self.tolerance:g}); the largest is {self.max_difference:.3g} at position {self.position} (token "
            f"{self.token_id}): learner {self.learner_logprob:.4f}, engine {self.engine_logprob:.4f}. The weights "
            "that the engine installed are not those that the learner published. Do not train on this engine."
        )


def name_differences(found: Sequence[Difference], most: int = 4) -> str:
    """In words: which published tensors an engine does not hold."""
    if not found:
        return (
            "The engine holds what loading the published tensors again gives: the fault is in how it loads or computes them, or "
            "in what the learner published."
        )
    named = ", ".join(f"{d.tensor!r} ({d.elements} elements of parameter {d.parameter!r})" for d in found[:most])
    return f"It does not hold {named}" + (f" and {len(found) - most} more." if len(found) > most else ".")


def probe_text(max_tokens: int) -> str:
    """At most `max_tokens - 1` bytes, so that no tokenizer makes more tokens than fit."""
    return (_TEXT * 4)[: max(2, min(len(_TEXT) * 4, max_tokens - 2))]


def probe_tolerance(config: Config) -> float:
    """`weights.probe_tolerance`, or what precision explains: bf16 against fp32 differs by 0.01 to 0.06 nats on average."""
    if config.weights.probe_tolerance is not None:
        return config.weights.probe_tolerance
    exact = config.generator.dtype == "float32" and config.learner.dtype == "float32"
    return 1e-3 if exact else 0.15


def compare_probe(token_ids: Sequence[int], learner: np.ndarray, engine: np.ndarray, tolerance: float) -> ProbeResult:
    """Compare log-probs `[T - 1]` of tokens `1..T`. A non-finite log-prob counts as an infinite difference."""
    if learner.shape != engine.shape or len(learner) != len(token_ids) - 1:
        raise ValueError(f"probe of {len(token_ids)} tokens: learner scored {learner.shape}, engine {engine.shape}")
    difference = np.abs(engine.astype(np.float64) - learner.astype(np.float64))
    difference = np.where(np.isfinite(difference), difference, np.inf)
    worst = int(difference.argmax())
    return ProbeResult(
        mean_difference=float(difference.mean()),
        max_difference=float(difference[worst]),
        position=worst + 1,
        token_id=int(token_ids[worst + 1]),
        learner_logprob=float(learner[worst]),
        engine_logprob=float(engine[worst]),
        tolerance=tolerance,
    )
