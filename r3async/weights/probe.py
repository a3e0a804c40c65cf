"""A probe that compares the log-probs of engine and learner on a fixed text after each
delivery of weights.

Weights that arrive corrupted load without an error and generate fluent text; only the log-probs
show it. Scoring a given text does not test how a token is *sampled*, at the run's temperature, or
the log-prob reported for it. So the engine also samples after several prefixes of the text. The
sampled tokens are not known beforehand, but with logits `z` at a position,
`log softmax(z / T)[t] = log softmax(z)[t] / T - c`, where `c = logsumexp(z / T) - logsumexp(z) / T`
is the same for every token `t`: the learner's two scores of the text's own next token, at
temperature 1 and at `T`, determine it.

Two correct programs do not always agree on one text. If a router's scores of two experts are equal
up to rounding, each may choose a different one, and the log-probs of that token and of those after
it differ by far more than rounding. A second text decides: it has the same tokens as the first, so
an error in a tensor shows there as well, and such a tie does not.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np

from r3async.config import Config
from r3async.weights.manifest import TensorMismatch

FAILED_MODEL_DIRECTORY = "probe-failed"
"""Model directory, in a run's directory, of the version with which a probe failed, for
`r3async diagnose`."""
_PROBE_TEXT = (
    "The quick brown fox jumps over 13 lazy dogs; def f(x): return x * 2  # reverse: "
    "xof nworb kciuq. "
)


class ProbeResult(msgspec.Struct, frozen=True):
    """The differences in nats, engine minus learner. `position` is that of the largest one, in
    the probe's tokens."""

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

    def describe_scored(self) -> str:
        return (
            f"mean |difference| of the probe's log-probs is {self.mean_difference:.3g} nats "
            f"(weights.probe_tolerance = {self.tolerance:g}); the largest is "
            f"{self.max_difference:.3g} at position {self.position} (token {self.token_id}): "
            f"learner {self.learner_logprob:.4f}, engine {self.engine_logprob:.4f}. Do not "
            "train on this engine."
        )

    def describe_sampled(self, temperature: float) -> str:
        return (
            f"at episode.temperature = {temperature:g} the mean |difference| of sampled log-probs "
            f"is {self.mean_difference:.3g} nats ({self.tolerance:g} are allowed); the largest is "
            f"{self.max_difference:.3g} at position {self.position} (token {self.token_id}): "
            f"{self.learner_logprob:.4f} by the learner's scores, {self.engine_logprob:.4f} "
            "reported. The learner would divide by probabilities that nothing was sampled with. Do "
            "not train on this engine."
        )


class SampledProbe(msgspec.Struct, frozen=True):
    """The tokens sampled after several prefixes of the text, one after each.

    Attributes:
        positions: Length of each prefix, int32 `[n]`.
        token_ids: Sampled tokens, int32 `[n]`.
        reported: The log-probs that came with them, as in an episode, float32 `[n]`.
        plain: The log-probs of the same tokens when the engine scores them, at temperature
            1, float32 `[n]`.
    """

    positions: np.ndarray
    token_ids: np.ndarray
    reported: np.ndarray
    plain: np.ndarray


def choose_probe_positions(tokens: int, count: int = 16, max_length: int = 64) -> list[int]:
    """Return evenly spaced prefix lengths of a text of so many tokens; few, because each
    costs a request."""
    return sorted({int(p) for p in np.linspace(1, min(tokens - 1, max_length), count)})


def compare_sampled_probe(
    sampled: SampledProbe, scores: np.ndarray, temperature: float, tolerance: float
) -> ProbeResult:
    """Compare the reported log-probs with those that follow from the learner's scores.

    `scores` `[2, T - 1]` are at temperature 1 and at `temperature`. Rounding of logits is divided
    by the temperature, and `tolerance`, which is for temperature 1, grows with it.
    """
    plain, tempered = scores[:, sampled.positions - 1].astype(np.float64)
    constant = plain / temperature - tempered
    expected = sampled.plain.astype(np.float64) / temperature - constant
    tolerance *= max(1.0, 1.0 / temperature)
    return _measure_differences(
        sampled.positions, sampled.token_ids, expected, sampled.reported, tolerance
    )


def _measure_differences(
    positions: np.ndarray,
    token_ids: np.ndarray,
    learner: np.ndarray,
    engine: np.ndarray,
    tolerance: float,
) -> ProbeResult:
    """Summarize the differences of log-probs; all arrays are `[n]`.

    A difference that is not finite counts as infinite.
    """
    difference = np.abs(engine.astype(np.float64) - learner.astype(np.float64))
    difference = np.where(np.isfinite(difference), difference, np.inf)
    worst = int(difference.argmax())
    return ProbeResult(
        mean_difference=float(difference.mean()),
        max_difference=float(difference[worst]),
        position=int(positions[worst]),
        token_id=int(token_ids[worst]),
        learner_logprob=float(learner[worst]),
        engine_logprob=float(engine[worst]),
        tolerance=tolerance,
    )


def describe_mismatches(mismatches: Sequence[TensorMismatch], max_named: int = 4) -> str:
    """Return a sentence that names the published tensors that an engine does not hold."""
    if not mismatches:
        return (
            "The engine holds what loading the published tensors again gives: the fault is in how "
            "it loads or computes them, or in what the learner published."
        )
    named = ", ".join(
        f"{d.tensor!r} ({d.elements} elements of parameter {d.parameter!r})"
        for d in mismatches[:max_named]
    )
    return f"The engine does not hold {named}" + (
        f" and {len(mismatches) - max_named} more." if len(mismatches) > max_named else "."
    )


def make_probe_text(max_tokens: int) -> str:
    """Return a text of at most `max_tokens - 2` bytes, and at least 2, so that no tokenizer makes
    more tokens than fit."""
    return (_PROBE_TEXT * 4)[: max(2, min(len(_PROBE_TEXT) * 4, max_tokens - 2))]


def make_probe_pair(token_ids: Sequence[int] | np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the probe's text and the second text, int32 `[T]` each.

    The second has the same tokens in reverse order.
    """
    text = np.asarray(token_ids, np.int32)
    return text, text[::-1].copy()


ROUNDED_TOLERANCE = 0.15
"""Mean difference in nats that passes where engine or learner computes in bfloat16 or float16.
Log-probs of bf16 and fp32 differ by 0.01 to 0.06 with trained models; the logits of vLLM, which are
bf16 too, add 0.003 to 0.02 (D-202)."""
TF32_TOLERANCE = ROUNDED_TOLERANCE / 8
"""The same where both compute in float32 and the engine on GPUs: vLLM's kernel of experts
multiplies in TF32 there, which rounds an eighth as much as bf16."""
EXACT_TOLERANCE = 1e-3


def resolve_probe_tolerance(config: Config, engine_on_gpu: bool) -> float:
    """Return `weights.probe_tolerance`, or else a tolerance for the precision of the dtypes."""
    if config.weights.probe_tolerance is not None:
        return config.weights.probe_tolerance
    if config.generator.dtype != "float32" or config.learner.dtype != "float32":
        return ROUNDED_TOLERANCE
    return TF32_TOLERANCE if engine_on_gpu else EXACT_TOLERANCE


def compare_probe(
    token_ids: Sequence[int], learner: np.ndarray, engine: np.ndarray, tolerance: float
) -> ProbeResult:
    """Compare log-probs `[T - 1]` of tokens `1..T`. A non-finite log-prob counts as an
    infinite difference."""
    if learner.shape != engine.shape or len(learner) != len(token_ids) - 1:
        raise ValueError(
            f"probe of {len(token_ids)} tokens: learner scored {learner.shape}, "
            f"engine {engine.shape}"
        )
    return _measure_differences(
        np.arange(1, len(token_ids)), np.asarray(token_ids)[1:], learner, engine, tolerance
    )
