"""Faults that make an engine and a learner diverge, planted in the real ones, and what a diagnosis must name."""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.helpers.engine import make_model as tiny


def make_model(path: Path) -> Path:
    """Make a tiny model whose second layer is dense, with norms whose weights are not 1."""
    tiny(path, dense_layers=(1,))
    file = path / "model.safetensors"
    tensors, generator = load_file(file), torch.Generator().manual_seed(7)
    for tensor in tensors.values():
        if tensor.ndim == 1:
            tensor.add_(0.2 * torch.randn(tensor.shape, generator=generator))
    save_file(tensors, file, metadata={"format": "pt"})
    return path


class Fault(NamedTuple):
    """A fault with the diagnosis that is expected.

    Attributes:
        stage: the stage that must be named first.
        layers: the layers that must be named first; [-1] for a stage outside the layers.
        evidence: a part of the facts that are reported.
    """

    name: str
    stage: str
    layers: list[int]
    evidence: str = ""


@contextlib.contextmanager
def changed(owner: Any, name: str, value: Any) -> Iterator[None]:
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


IN_TORCH = [
    Fault("rope base", "attention", [0, 1, 2]),
    Fault("norm epsilon", "post_norm", [0]),
    Fault("gate and up exchanged", "mlp", [2]),
    Fault("window", "attention", [1], "the first at 16"),
    Fault("temperature", "head", [-1]),
]
IN_MEGATRON = [
    Fault("norm epsilon", "input_norm", [2]),
    Fault("experts permuted", "mlp", [2]),
    Fault("attention scale", "attention", [1]),
    Fault("stale projection", "attention", [1], "given: model.layers.1.self_attn.o_proj.weight"),
    Fault("temperature", "head", [-1]),
]


def check_first(divergences: list[Any], fault: Fault) -> None:
    """Check that the first of some `Divergence`s is that of a fault."""
    assert divergences, f"{fault.name}: nothing was found"
    first = divergences[0]
    assert (first.stage, first.layers) == (fault.stage, fault.layers), divergences
    assert fault.evidence in first.evidence, divergences


@contextlib.contextmanager
def planted(learner: Any, fault: str) -> Iterator[None]:
    """Plant a fault in a learner for the time of the block."""
    with contextlib.ExitStack() as stack:
        if fault == "temperature":
            score = learner.score_sequence
            stack.enter_context(changed(learner, "score_sequence", lambda ids: score(ids, 0.7)))
        elif learner.name == "torch":
            _in_torch(stack, learner.model.causal_lm, fault)
        else:
            _in_megatron(stack, learner, fault)
        yield


@contextlib.contextmanager
def _held(tensor: Tensor, other: Tensor) -> Iterator[None]:
    before = tensor.detach().clone()
    with torch.no_grad():
        tensor.copy_(other)
    try:
        yield
    finally:
        with torch.no_grad():
            tensor.copy_(before)


def _in_torch(stack: contextlib.ExitStack, causal: Any, fault: str) -> None:
    layers = causal.base_model.layers
    match fault:
        case "rope base":
            rotary = causal.base_model.rotary_emb
            share = torch.arange(len(rotary.inv_freq)) / len(rotary.inv_freq)
            stack.enter_context(changed(rotary, "inv_freq", rotary.inv_freq / 50**share))
        case "norm epsilon":
            stack.enter_context(changed(layers[0].post_attention_layernorm, "variance_epsilon", 1e-2))
        case "gate and up exchanged":
            both = layers[2].mlp.experts.gate_up_proj
            stack.enter_context(_held(both, torch.cat(both.detach().chunk(2, 1)[::-1], 1)))
        case "window":
            stack.enter_context(changed(layers[1].self_attn, "sliding_window", 16))
        case _:
            raise KeyError(fault)


def _in_megatron(stack: contextlib.ExitStack, learner: Any, fault: str) -> None:
    layers = learner.model.decoder.layers
    match fault:
        case "norm epsilon":
            stack.enter_context(changed(layers[2].input_layernorm, "eps", 1e-2))
        case "experts permuted":
            for weight in (layers[2].mlp.experts.weight1, layers[2].mlp.experts.weight2):
                stack.enter_context(_held(weight, weight.detach().roll(1, 0)))
        case "attention scale":
            core = layers[1].self_attention.core_attention
            stack.enter_context(changed(core, "_scale", 0.25))
        case "stale projection":
            weight = layers[1].self_attention.linear_proj.weight
            stack.enter_context(_held(weight, weight.detach().flip(0)))
        case _:
            raise KeyError(fault)
