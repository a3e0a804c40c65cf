"""Causes in stages that are one operation: embedding, norms, output matrix; and in any stage that has weights."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from r3async.tools.diagnose.experiments import Change, Found, given, minimised, weights
from r3async.tools.diagnose.judge import Case
from r3async.tools.diagnose.reference import Trial


def rounded(case: Case) -> Found:
    def cast(dtype: torch.dtype) -> Change:
        return lambda trial: weights(trial, lambda w: w.to(dtype).to(w.dtype))

    def by_row(bits: int) -> Change:
        def change(w: Tensor) -> Tensor:
            most = 2 ** (bits - 1) - 1
            scale = w.abs().amax(-1, keepdim=True).clamp(min=1e-12) / most
            return (w / scale).round() * scale

        return lambda trial: weights(trial, change)

    for name in ("float16", "bfloat16", "float8_e4m3fn", "float8_e5m2"):
        yield cast(getattr(torch, name)), f"its weights are those of the files, rounded to {name}"
    for bits in (8, 4):
        yield by_row(bits), f"its weights are those of the files, rounded to {bits} bits with a scale a row"


def computed(case: Case) -> Found:
    for name in ("bfloat16", "float16"):

        def change(trial: Trial, name: str = name) -> None:
            trial.dtype = getattr(torch, name)

        yield change, f"it computes in {name}"


def other_layer(case: Case) -> Found:
    for layer in range(case.reference.layers):
        if layer == case.layer:
            continue

        def change(trial: Trial, layer: int = layer) -> None:
            trial.layer = case.reference.module(layer, case.stage)

        yield change, f"it computes with the weights of layer {layer}"


def embedding_shift(case: Case) -> Found:
    for by in (-1, 1):
        yield (
            given(lambda trial, by: setattr(trial, "x", trial.x.roll(by)), by),
            f"each token has the embedding of the token {'after' if by < 0 else 'before'} it",
        )


def embedding_scale(case: Case) -> Found:
    scale = float((case.y * case.expected).sum() / case.expected.square().sum())
    yield (
        lambda trial: weights(trial, lambda w: w * scale),
        f"it is {scale:.6g} times the files' (root of the hidden size: {case.y.shape[-1] ** 0.5:.6g})",
    )


def epsilon(case: Case) -> Found:
    part: Any = case.trial().part
    ratio = ((case.x * part.weight) / case.y).median(dim=-1).values
    eps = float((ratio.square() - case.x.square().mean(-1)).median())
    if eps >= 0:
        yield (
            lambda trial: setattr(trial.part, "variance_epsilon", eps),
            f"epsilon is {eps:.3g}, and {part.variance_epsilon:.3g} in config.json",
        )


def norm_form(case: Case) -> Found:
    def centred(trial: Trial) -> None:
        trial.x = trial.x - trial.x.mean(-1, keepdim=True)

    def plus_one(trial: Trial) -> None:
        trial.part.weight.data += 1

    def plain(trial: Trial) -> None:
        trial.part.weight.data.fill_(1.0)

    def whole(trial: Trial) -> None:
        trial.part.forward = lambda x: x

    yield plus_one, "its weight is taken as a difference from one"
    yield plain, "it has no weight"
    yield centred, "the mean is taken out first: a layer norm, where the files have the norm of the root mean square"
    yield whole, "nothing is normalised"


def norm_weight(case: Case) -> Found:
    part: Any = case.trial().part
    unit = case.x * torch.rsqrt(case.x.square().mean(-1, keepdim=True) + part.variance_epsilon)
    found = (unit * case.y).sum(0) / unit.square().sum(0)
    other = int(((found - part.weight).abs() > 1e-3 * part.weight.abs().clamp(min=1e-3)).sum())
    yield (
        lambda trial: trial.part.weight.data.copy_(found),
        f"{other} of {len(found)} elements of its weight are not the files'",
    )


def other_norm(case: Case) -> Found:
    if case.layer >= 0:
        names = {"input_norm": "post_attention_layernorm", "post_norm": "input_layernorm"}
        yield (
            lambda trial: trial.part.load_state_dict(getattr(trial.layer, names[case.stage]).state_dict()),
            f"its weight is that of {names[case.stage]}",
        )


def temperature(case: Case, asked: float = 1.0) -> Found:
    best = minimised(case, lambda trial, t: setattr(trial, "temperature", t), [2 ** (i / 4) for i in range(-16, 17)])
    yield (
        lambda trial: setattr(trial, "temperature", best),
        f"its log-probs are those at temperature {best:.4g}, and {asked:.4g} was asked for",
    )


def head_tied(case: Case) -> Found:
    if not case.reference.tied:
        yield (
            lambda trial: setattr(trial.layer, "weight", nn.Parameter(case.reference.embedding_weight.float())),
            "logits are made with the embedding, and config.json says that the output matrix is another",
        )


def head_shift(case: Case) -> Found:
    for by in (-1, 1):
        yield (
            given(lambda trial, by: setattr(trial, "token_ids", trial.token_ids.roll(by)), by),
            f"log-probs are those of the token {'after' if by < 0 else 'before'} each",
        )
