"""Checks beyond the stages of the forward pass: dtype, installed weights, sampling, and
returned routes."""

from __future__ import annotations

from collections.abc import Collection, Iterator

from torch import Tensor

from .judge import STALE_HINT, Divergence, StageOutputs, locate_tensor, measure_errors
from .reference import ReferenceModel, StageInput

SAMPLED_TOLERANCE = 1e-3
"""Nats by which a token's returned log-prob may differ from its score in float32: decoding sums
in another order."""
SAMPLED_TOLERANCE_ROUNDED = 0.15
"""Mean number of nats by which such log-probs may differ in other dtypes."""
MAX_REROUTED_SHARE = 0.02
MAX_REROUTED_SHARE_ROUNDED = 0.25
"""Share of tokens whose routes may differ from those of a second pass, in float32 and
in other dtypes."""


def check_dtype(outputs: StageOutputs) -> Iterator[Divergence]:
    if outputs.dtype != outputs.expected_dtype:
        yield Divergence(
            outputs.name,
            "dtype",
            [-1],
            compared="the dtype of the embedding's output, with that of the settings",
            evidence=f"it computes in {outputs.dtype}; its settings say {outputs.expected_dtype}",
            hint="what overrides the dtype: generator.engine_args, the model's own config.json",
        )


def check_weights(outputs: StageOutputs, stages: Collection[Divergence]) -> Iterator[Divergence]:
    """Report tensors that are not held as they were given, except those of the divergent `stages`.

    The tokens need not show such a tensor.
    """
    shown = {(layer, divergence.stage) for divergence in stages for layer in divergence.layers}
    hidden = [name for name in outputs.stale_tensors if locate_tensor(name) not in shown]
    if hidden:
        yield Divergence(
            outputs.name,
            "weights",
            sorted({locate_tensor(name)[0] for name in hidden}),
            compared="the tensors that it holds, bit by bit with those that it was given",
            tokens=0.0,
            evidence=f"{len(hidden)} tensors differ, the first {', '.join(hidden[:3])}",
            hint=STALE_HINT,
        )


def check_sampling(reference: ReferenceModel, outputs: StageOutputs) -> Iterator[Divergence]:
    """Compare the log-probs of sampled tokens with those of the witness's own hidden states at
    that temperature.

    A difference that the witness's scores already have is not reported again.
    """
    sampled = outputs.sampled
    x = outputs.tensors.get("final_norm.out")
    if sampled is None or x is None:
        return
    n = len(sampled.logprobs)
    start = len(outputs.token_ids) - n - 1  # the token before the first
    x = x[start:]
    ids = outputs.token_ids[start:]
    # The error of its own scores against the files belongs to another stage.
    off = outputs.logprobs[start:] - _compute_head_logprobs(reference, x, ids, 1.0)
    expected = (
        _compute_head_logprobs(reference, x, ids, sampled.temperature) + off / sampled.temperature
    )
    found = measure_errors(expected, sampled.logprobs, "sampling")
    exact = outputs.dtype == "float32"
    tolerance = (SAMPLED_TOLERANCE if exact else SAMPLED_TOLERANCE_ROUNDED) * max(
        1.0, 1 / sampled.temperature
    )
    error = float(found.max() if exact else found.mean())
    if error <= tolerance and not sampled.stale_cached:
        return
    bad = found > tolerance
    facts = []
    if sampled.stale_cached:
        facts.append(
            f"a new request took {sampled.stale_cached} positions from a prefix cache that older "
            "weights made"
        )
    if bool(bad.any()):
        facts.append(f"of {n} sampled tokens the first that differs is {int(bad.nonzero()[0])}")
    yield Divergence(
        outputs.name,
        "sampling",
        [-1],
        compared=(
            "the log-probs that came with sampled tokens, with those of its own hidden states at "
            f"temperature {sampled.temperature:g}"
        ),
        error=error,
        tolerance=tolerance,
        tokens=float(bad.float().mean()),
        unit="nats",
        evidence="; ".join(facts),
        hint=(
            "restart the engine: new requests must not find what older weights left"
            if sampled.stale_cached
            else "logprobs_mode and temperature of the engine; if the first token agrees, the keys "
            "and values that decoding keeps"
        ),
    )


def _compute_head_logprobs(
    reference: ReferenceModel, input: Tensor, token_ids: Tensor, temperature: float
) -> Tensor:
    return reference.compute_stage(
        StageInput(-1, "head", input, token_ids, temperature=temperature)
    )


def check_routes(reference: ReferenceModel, outputs: StageOutputs) -> Iterator[Divergence]:
    """Compare the routes returned with an answer with those of another pass over the same tokens.

    Routes of positions that a cache of older weights served are those of the older weights.
    """
    sampled = outputs.sampled
    if sampled is None or sampled.routes is None or sampled.stale_cached:
        return
    if any(f"{layer}.choice.out" not in outputs.tensors for layer in reference.moe_layers):
        return  # a kernel that chooses and computes in one
    rows = sampled.routes
    allowed = MAX_REROUTED_SHARE if outputs.dtype == "float32" else MAX_REROUTED_SHARE_ROUNDED
    shares = {
        layer: compute_mismatch_share(
            rows[:, column], outputs.tensors[f"{layer}.choice.out"][: len(rows)]
        )
        for column, layer in enumerate(reference.moe_layers)
    }
    bad = [layer for layer, share in shares.items() if share > allowed]
    if bad:
        yield Divergence(
            outputs.name,
            "routes",
            bad,
            compared=(
                "the experts returned with an answer, with those of a second pass over its tokens"
            ),
            error=shares[bad[0]],
            tolerance=allowed,
            tokens=shares[bad[0]],
            unit="share",
            hint=(
                "columns of routes that are read as other layers, rows that are one token off, "
                "kernels that choose otherwise while decoding"
            ),
        )


def compute_mismatch_share(ids: Tensor, others: Tensor) -> float:
    """Return the share of rows `[T, K]` whose sets of experts differ."""
    if ids.shape != others.shape:
        return 1.0
    return float((ids.sort(1).values != others.sort(1).values).any(1).float().mean())
