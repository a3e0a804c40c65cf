"""Checks beyond the stages of the forward pass: dtype, installed weights, sampling, cache, and
returned routes."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

import torch
from torch import Tensor

from r3async.data.routes import LOST_ROUTES_FIX

from .causes import locate_tensor
from .choice import compute_mismatch_share
from .experiments import FIX_STALE
from .judge import Divergence, DivergentStage, Explanation, StageOutputs, measure_errors
from .reference import ReferenceModel
from .simple import try_temperature

SAMPLED_TOLERANCE = 1e-3
"""Nats by which a token's returned log-prob may differ from its score in float32: decoding sums
in another order."""
SAMPLED_TOLERANCE_ROUNDED = 0.15
"""Mean number of nats by which such log-probs may differ in other dtypes."""
MAX_REROUTED_SHARE = 0.02
MAX_REROUTED_SHARE_ROUNDED = 0.25
"""Share of tokens whose routes may differ from those of a second pass, in float32 and
in other dtypes."""
MAX_UNEXPLAINED_ROUTES = 0.2
"""Share of tokens that an alternative explanation of the routes may leave unexplained."""


def check_dtype(outputs: StageOutputs) -> Iterator[Divergence]:
    if outputs.dtype != outputs.expected_dtype:
        evidence = (
            f"what its embedding gives is {outputs.dtype}; its settings say "
            f"{outputs.expected_dtype}"
        )
        fix = (
            "look for what overrides the dtype: generator.engine_args, the model's own config.json"
        )
        explanation = Explanation("dtype", evidence, fix, 0.0)
        yield Divergence(outputs.name, "dtype", [-1], 1.0, 0.0, 1.0, explanations=[explanation])


def check_weights(outputs: StageOutputs, stages: Collection[Divergence]) -> Iterator[Divergence]:
    """Report tensors that are not held as they were given, except those of the divergent `stages`.

    The tokens need not show such a tensor.
    """
    shown = {(layer, parting.stage) for parting in stages for layer in parting.layers}
    hidden = [name for name in outputs.stale_tensors if locate_tensor(name) not in shown]
    if hidden:
        layers = sorted({locate_tensor(name)[0] for name in hidden})
        evidence = (
            f"{len(hidden)} tensors, the first {', '.join(hidden[:3])}, are not held "
            "as they were given"
        )
        explanation = Explanation("stale tensor", evidence, FIX_STALE, 0.0)
        yield Divergence(outputs.name, "weights", layers, 1.0, 0.0, 0.0, explanations=[explanation])


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
    fix = (
        "restart the engine; new requests must not find what older weights left: see weights.probe"
    )
    explanations = []
    if sampled.stale_cached:
        evidence = (
            f"a new request took {sampled.stale_cached} positions from a prefix cache that "
            "older weights made"
        )
        explanations.append(Explanation("stale prefix cache", evidence, fix, 0.0))
    case = DivergentStage(
        reference,
        outputs,
        -1,
        "head",
        x,
        sampled.logprobs,
        expected,
        tolerance,
        token_errors=found,
        token_ids=ids,
    )
    for change, evidence in try_temperature(case, sampled.temperature):
        left = case.compute_remaining_error(change)
        if left <= max(tolerance, 0.1 * error):
            share = 0.0 if left <= tolerance else left / error
            fix = "make logprobs_mode and episode.temperature of the engine those of the learner"
            explanations.append(Explanation("temperature", evidence, fix, share))
    if not explanations:
        first = int((found > tolerance).nonzero()[0]) if bool((found > tolerance).any()) else 0
        what = (
            "the first token agrees: keys and values kept while decoding are others"
            if first
            else "the first token differs too"
        )
        explanations.append(
            Explanation(
                "cache",
                f"of {n} sampled tokens the first that differs is {first}; {what}",
                fix,
                1.0,
            )
        )
    share = float((found > tolerance).float().mean())
    yield Divergence(outputs.name, "sampling", [-1], error, tolerance, share, "nats", explanations)


def _compute_head_logprobs(
    reference: ReferenceModel, input: Tensor, token_ids: Tensor, temperature: float
) -> Tensor:
    trial = reference.make_trial(-1, "head", input, token_ids, None)
    trial.temperature = temperature
    return trial.compute_output()


def check_routes(reference: ReferenceModel, outputs: StageOutputs) -> Iterator[Divergence]:
    """Compare the routes returned with an answer with those of another pass over the same tokens.

    Routes of positions that a cache of older weights served are those of the older weights.
    """
    sampled = outputs.sampled
    if sampled is None or sampled.routes is None or sampled.stale_cached:
        return
    if any(f"{layer}.choice.out" not in outputs.tensors for layer in reference.moe_layers):
        return  # a kernel that chooses and computes in one
    layers = reference.moe_layers
    rows = sampled.routes
    used = [outputs.tensors[f"{layer}.choice.out"][: len(rows)] for layer in layers]
    allowed = MAX_REROUTED_SHARE if outputs.dtype == "float32" else MAX_REROUTED_SHARE_ROUNDED
    shares = [compute_mismatch_share(rows[:, column], chosen) for column, chosen in enumerate(used)]
    bad = [column for column, share in enumerate(shares) if share > allowed]
    if bad:
        explanations = sorted(
            _explain_reroutes(layers, rows[:, bad[0]], used, bad[0]), key=lambda each: each.left
        )
        share = shares[bad[0]]
        where = [layers[column] for column in bad]
        yield Divergence(
            outputs.name, "routes", where, share, allowed, share, "share", explanations
        )


def _explain_reroutes(
    layers: Sequence[int], rows: Tensor, used: Sequence[Tensor], column: int
) -> Iterator[Explanation]:
    """Explain the routes `rows` `[T, K]` of a column.

    Args:
        used: The experts that each router chose.
    """
    shifted = "rows of routes are one token off"
    others: list[tuple[str, str, str, float]] = [
        (
            "layer order",
            f"they are those of layer {layer}",
            "columns of routes are read as other layers",
            compute_mismatch_share(rows, chosen),
        )
        for layer, chosen in zip(layers, used, strict=True)
        if layer != layers[column]
    ]
    others += [
        (
            "order of tokens",
            "they are those of the token before each",
            shifted,
            compute_mismatch_share(rows[1:], used[column][:-1]),
        ),
        (
            "order of tokens",
            "they are those of the token after each",
            shifted,
            compute_mismatch_share(rows[:-1], used[column][1:]),
        ),
    ]
    first = torch.arange(rows.shape[1]).expand_as(rows)
    fix = LOST_ROUTES_FIX
    others.append(
        (
            "routes not recorded",
            "every row has the first experts",
            fix,
            compute_mismatch_share(rows, first),
        )
    )
    found = [Explanation(*each) for each in others if each[3] <= MAX_UNEXPLAINED_ROUTES]
    other = "decoding chooses other experts than prefill: compare the kernels of both"
    yield from found or [
        Explanation("another pass", "they are no other layer's and no other token's", other, 1.0)
    ]
