"""Causes in single-operation stages (embedding, norms, output matrix) and in any stage
that has weights."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from .experiments import Experiments, TrialChange, bind_value, change_weights, find_minimum
from .judge import DivergentStage
from .reference import StageTrial


def try_rounded_weights(case: DivergentStage) -> Experiments:
    def cast(dtype: torch.dtype) -> TrialChange:
        return lambda trial: change_weights(trial, lambda w: w.to(dtype).to(w.dtype))

    def by_row(bits: int) -> TrialChange:
        def change(w: Tensor) -> Tensor:
            most = 2 ** (bits - 1) - 1
            scale = w.abs().amax(-1, keepdim=True).clamp(min=1e-12) / most
            return (w / scale).round() * scale

        return lambda trial: change_weights(trial, change)

    for name in ("float16", "bfloat16", "float8_e4m3fn", "float8_e5m2"):
        yield cast(getattr(torch, name)), f"its weights are those of the files, rounded to {name}"
    for bits in (8, 4):
        yield (
            by_row(bits),
            f"its weights are those of the files, rounded to {bits} bits with a scale a row",
        )


def try_compute_dtype(case: DivergentStage) -> Experiments:
    for name in ("bfloat16", "float16"):

        def change(trial: StageTrial, name: str = name) -> None:
            trial.dtype = getattr(torch, name)

        yield change, f"it computes in {name}"


def try_other_layer(case: DivergentStage) -> Experiments:
    for layer in range(case.reference.layers):
        if layer == case.layer:
            continue

        def change(trial: StageTrial, layer: int = layer) -> None:
            trial.layer = case.reference.copy_module(layer, case.stage)

        yield change, f"it computes with the weights of layer {layer}"


def try_embedding_shift(case: DivergentStage) -> Experiments:
    for by in (-1, 1):
        yield (
            bind_value(lambda trial, by: setattr(trial, "input", trial.input.roll(by)), by),
            f"each token has the embedding of the token {'after' if by < 0 else 'before'} it",
        )


def try_embedding_scale(case: DivergentStage) -> Experiments:
    scale = float((case.output * case.expected).sum() / case.expected.square().sum())
    yield (
        lambda trial: change_weights(trial, lambda w: w * scale),
        (
            f"it is {scale:.6g} times the files' (root of the hidden size: "
            f"{case.output.shape[-1] ** 0.5:.6g})"
        ),
    )


def try_norm_epsilon(case: DivergentStage) -> Experiments:
    part: Any = case.make_trial().module
    ratio = ((case.input * part.weight) / case.output).median(dim=-1).values
    eps = float((ratio.square() - case.input.square().mean(-1)).median())
    if eps >= 0:
        yield (
            lambda trial: setattr(trial.module, "variance_epsilon", eps),
            f"epsilon is {eps:.3g}, and {part.variance_epsilon:.3g} in config.json",
        )


def try_norm_form(case: DivergentStage) -> Experiments:
    def centred(trial: StageTrial) -> None:
        trial.input = trial.input - trial.input.mean(-1, keepdim=True)

    def plus_one(trial: StageTrial) -> None:
        trial.module.weight.data += 1

    def plain(trial: StageTrial) -> None:
        trial.module.weight.data.fill_(1.0)

    def whole(trial: StageTrial) -> None:
        trial.module.forward = lambda x: x

    yield plus_one, "its weight is taken as a difference from one"
    yield plain, "it has no weight"
    yield (
        centred,
        (
            "the mean is taken out first: a layer norm, where the files have the norm of the "
            "root mean square"
        ),
    )
    yield whole, "nothing is normalised"


def try_norm_weight(case: DivergentStage) -> Experiments:
    part: Any = case.make_trial().module
    unit = case.input * torch.rsqrt(
        case.input.square().mean(-1, keepdim=True) + part.variance_epsilon
    )
    found = (unit * case.output).sum(0) / unit.square().sum(0)
    other = int(((found - part.weight).abs() > 1e-3 * part.weight.abs().clamp(min=1e-3)).sum())
    yield (
        lambda trial: trial.module.weight.data.copy_(found),
        f"{other} of {len(found)} elements of its weight are not the files'",
    )


def try_other_norm(case: DivergentStage) -> Experiments:
    if case.layer >= 0:
        names = {"input_norm": "post_attention_layernorm", "post_norm": "input_layernorm"}
        yield (
            lambda trial: trial.module.load_state_dict(
                getattr(trial.layer, names[case.stage]).state_dict()
            ),
            f"its weight is that of {names[case.stage]}",
        )


def try_temperature(case: DivergentStage, requested: float = 1.0) -> Experiments:
    best = find_minimum(
        case,
        lambda trial, t: setattr(trial, "temperature", t),
        [2 ** (i / 4) for i in range(-16, 17)],
    )
    yield (
        lambda trial: setattr(trial, "temperature", best),
        f"its log-probs are those at temperature {best:.4g}, and {requested:.4g} was asked for",
    )


def try_tied_head(case: DivergentStage) -> Experiments:
    if not case.reference.is_tied:
        yield (
            lambda trial: setattr(
                trial.layer, "weight", nn.Parameter(case.reference.embedding_weight.float())
            ),
            (
                "logits are made with the embedding, and config.json says that the output "
                "matrix is another"
            ),
        )


def try_head_shift(case: DivergentStage) -> Experiments:
    for by in (-1, 1):
        yield (
            bind_value(lambda trial, by: setattr(trial, "token_ids", trial.token_ids.roll(by)), by),
            f"log-probs are those of the token {'after' if by < 0 else 'before'} each",
        )
