"""Faults that make an engine and a learner diverge, planted in the real ones, and what a diagnosis must name."""

import contextlib
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import msgspec
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from r3async.rollout.vllm.worker import WorkerExtension
from r3async.weights.fetch import VersionFile
from r3async.weights.manifest import WeightManifest
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
        cause: the likeliest cause.
    """

    name: str
    stage: str
    layers: list[int]
    cause: str


# -- in vLLM -----------------------------------------------------------------------------------------------------------

IN_ENGINE = [
    Fault("rope base", "attention", [0, 1, 2], "rope base"),
    Fault("attention scale", "attention", [1], "attention scale"),
    Fault("window", "attention", [2], "attention mask"),
    Fault("norm epsilon", "input_norm", [2], "norm epsilon"),
    Fault("norm of keys", "attention", [0], "norm of queries and keys"),
    Fault("rounded cache", "attention", [1], "quantised cache"),
    Fault("gates not normalised", "mlp", [2], "gate form"),
    Fault("gate order", "mlp", [0], "gate order"),
    Fault("scaled embedding", "embedding", [-1], "scale of the embedding"),
    Fault("logits scaled", "head", [-1], "temperature"),
    Fault("temperature", "sampling", [-1], "temperature"),
    Fault("raw log-probs", "sampling", [-1], "temperature"),
    # Faults in the names that the loader sees.
    Fault("gate and up exchanged", "mlp", [0], "gate and up projection"),
    Fault("experts permuted", "mlp", [2], "expert permutation"),
    Fault("router rows", "router", [0], "expert permutation"),
    Fault("layers exchanged", "attention", [0, 2], "layer order"),
    Fault("keys are values", "attention", [1], "projections"),
    Fault("output is embedding", "head", [-1], "tied output matrix"),
    Fault("norms exchanged", "post_norm", [1], "weight of the norm"),
    Fault("float8 weights", "mlp", [1], "quantised weights"),
    Fault("int8 experts", "mlp", [2], "quantised weights"),
    # Faults in which a tensor is not installed.
    Fault("stale projection", "attention", [2], "stale tensor"),
    Fault("stale expert", "mlp", [0], "stale tensor"),
    Fault("stale router", "router", [2], "stale tensor"),
    Fault("stale norm", "final_norm", [-1], "stale tensor"),
]

STALE = {
    "stale projection": "model.layers.2.self_attn.o_proj.weight",
    "stale expert": "model.layers.0.mlp.experts.3.up_proj.weight",
    "stale router": "model.layers.2.mlp.gate.weight",
    "stale norm": "model.norm.weight",
}


def _renamed(pairs: dict[str, str], layer: int | None = None) -> Callable[[str, Tensor], tuple[str, Tensor]]:
    def change(name: str, tensor: Tensor) -> tuple[str, Tensor]:
        if layer is None or f"layers.{layer}." in name:
            for old, new in pairs.items():
                if old in name:
                    return name.replace(old, new), tensor
        return name, tensor

    return change


def _next_expert(name: str, tensor: Tensor) -> tuple[str, Tensor]:
    if "layers.2." in name and (found := re.search(r"experts\.(\d+)\.", name)):
        return name.replace(found[0], f"experts.{(int(found[1]) + 1) % 8}."), tensor
    return name, tensor


def _changed(pattern: str, change: Callable[[Tensor], Tensor]) -> Callable[[str, Tensor], tuple[str, Tensor]]:
    return lambda name, tensor: (name, change(tensor) if re.search(pattern, name) else tensor)


def int8(tensor: Tensor) -> Tensor:
    scale = tensor.abs().amax(-1, keepdim=True) / 127
    return (tensor / scale).round() * scale


LOADED: dict[str, Callable[[str, Tensor], tuple[str, Tensor]]] = {
    "gate and up exchanged": _renamed({".gate_proj.": ".up_proj.", ".up_proj.": ".gate_proj."}, 0),
    "experts permuted": _next_expert,
    "router rows": _changed(r"layers\.0\.mlp\.gate\.weight", lambda t: t.flip(0)),
    "layers exchanged": _renamed(
        {"layers.0.self_attn.": "layers.2.self_attn.", "layers.2.self_attn.": "layers.0.self_attn."}
    ),
    "keys are values": _renamed({".k_proj.": ".v_proj.", ".v_proj.": ".k_proj."}, 1),
    "float8 weights": _changed(r"layers\.1\.mlp\.", lambda t: t.to(torch.float8_e4m3fn).to(t.dtype)),
    "int8 experts": _changed(r"layers\.2\.mlp\.experts", int8),
}


class PlantingExtension(WorkerExtension):
    """A worker in which one fault at a time can be planted."""

    r3_fault = ""
    r3_before: Mapping[str, Tensor] = MappingProxyType({})

    def r3_plant(self, fault: str) -> None:
        model = self.model_runner.get_model()
        self.r3_healing = contextlib.ExitStack()
        self.r3_fault, self.r3_load_plan = fault, None  # a plan was made by the right names
        if fault in LOADED or fault in ("output is embedding", "norms exchanged"):
            self.r3_healing.enter_context(_loading(type(model), fault))
        elif fault not in STALE:
            self.r3_healing.enter_context(_computing(model, self.model_runner.sampler, fault))

    def r3_heal(self) -> None:
        self.r3_healing.close()
        self.r3_fault, self.r3_load_plan = "", None

    def r3_install_version(self, manifest: bytes) -> tuple[int, int]:
        """Install a version; a stale tensor keeps the bytes of the version before."""
        published = msgspec.msgpack.decode(manifest, type=WeightManifest)
        kept = {
            name: tensor.clone()
            for name, tensor in VersionFile(published).iter_tensors()
            if name == STALE.get(self.r3_fault)
        }
        out = super().r3_install_version(manifest)
        self.r3_before = kept
        return out

    def r3_map_file(self, published: WeightManifest) -> Tensor:
        content = super().r3_map_file(published)
        if not self.r3_before:
            return content
        content = content.clone()
        for name, tensor in VersionFile(published, content).iter_tensors():
            if name in self.r3_before:
                tensor.copy_(self.r3_before[name])
        return content


@contextlib.contextmanager
def _loading(kind: Any, fault: str) -> Iterator[None]:
    load = kind.load_weights

    def wrong(self: Any, weights: Any) -> Any:
        weights = list(weights)
        if fault == "output is embedding":
            embedding = dict(weights)["model.embed_tokens.weight"]
            weights = [(n, embedding if n == "lm_head.weight" else t) for n, t in weights]
        elif fault == "norms exchanged":
            given = dict(weights)
            other = given["model.layers.1.input_layernorm.weight"]
            weights = [(n, other if n == "model.layers.1.post_attention_layernorm.weight" else t) for n, t in weights]
        else:
            weights = [LOADED[fault](n, t) for n, t in weights]
        return load(self, weights)

    kind.load_weights = wrong
    try:
        yield
    finally:
        kind.load_weights = load


@contextlib.contextmanager
def changed(owner: Any, name: str, value: Any) -> Iterator[None]:
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


def _computing(model: Any, sampler: Any, fault: str) -> contextlib.AbstractContextManager[Any]:
    layers = model.model.layers
    match fault:
        case "rope base":
            rotary = layers[0].self_attn.rotary_emb
            with changed(rotary, "base", 5e5):
                cache = rotary._compute_cos_sin_cache()
            return changed(rotary, "cos_sin_cache", cache)
        case "attention scale":
            impl = layers[1].self_attn.attn.impl
            return changed(impl, "scale", impl.scale * 1.3)
        case "window":
            return changed(layers[2].self_attn.attn.impl, "sliding_window", 16)
        case "norm epsilon":
            return changed(layers[2].input_layernorm, "variance_epsilon", 1e-2)
        case "norm of keys":
            both = contextlib.ExitStack()
            for norm in (layers[0].self_attn.q_norm, layers[0].self_attn.k_norm):
                both.enter_context(changed(norm, "variance_epsilon", 0.3))
            return both
        case "rounded cache":  # as with kv_cache_dtype="fp8_e5m2", which not every CPU has
            impl = layers[1].self_attn.attn.impl
            keep = impl.do_kv_cache_update

            def rounded(layer: Any, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Any:
                kept = (t.to(torch.float8_e5m2).to(t.dtype) for t in (key, value))
                return keep(layer, *kept, *args, **kwargs)

            return changed(impl, "do_kv_cache_update", rounded)
        case "gates not normalised":
            return changed(layers[2].mlp.experts.router, "renormalize", False)
        case "gate order":
            router = layers[0].mlp.experts.router
            choose = router._compute_routing

            def swapped(*args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
                gates, ids = choose(*args, **kwargs)
                return gates.flip(1).contiguous(), ids

            return changed(router, "_compute_routing", swapped)
        case "scaled embedding":
            handle = model.model.embed_tokens.register_forward_hook(lambda m, a, out: out * 8)
            return contextlib.closing(_Closing(handle.remove))
        case "logits scaled":
            return changed(model.logits_processor, "scale", 1.25)
        case "temperature":
            apply = sampler.apply_temperature
            return changed(sampler, "apply_temperature", lambda logits, temp, *a: apply(logits, temp * 1.3, *a))
        case "raw log-probs":
            both = contextlib.ExitStack()
            for part in (sampler, sampler.topk_topp_sampler):
                both.enter_context(changed(part, "logprobs_mode", "raw_logprobs"))
            return both
    raise KeyError(fault)


class _Closing:
    def __init__(self, close: Callable[[], object]):
        self.close = close


# -- in learners -------------------------------------------------------------------------------------------------------

IN_TORCH = [
    Fault("rope base", "attention", [0, 1, 2], "rope base"),
    Fault("norm epsilon", "post_norm", [0], "norm epsilon"),
    Fault("gates not normalised", "mlp", [0], "gate form"),
    Fault("gate and up exchanged", "mlp", [2], "gate and up projection"),
    Fault("activation", "mlp", [2], "activation"),
    Fault("window", "attention", [1], "attention mask"),
    Fault("temperature", "head", [-1], "temperature"),
]
IN_MEGATRON = [
    Fault("rope base", "attention", [0, 1, 2], "rope base"),
    Fault("norm epsilon", "input_norm", [2], "norm epsilon"),
    Fault("gate and up exchanged", "mlp", [0], "gate and up projection"),
    Fault("experts permuted", "mlp", [2], "expert permutation"),
    Fault("attention scale", "attention", [1], "attention scale"),
    Fault("stale projection", "attention", [1], "stale tensor"),
    Fault("temperature", "head", [-1], "temperature"),
]


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
        case "gates not normalised":
            stack.enter_context(changed(layers[0].mlp.gate, "norm_topk_prob", False))
        case "gate and up exchanged":
            both = layers[2].mlp.experts.gate_up_proj
            stack.enter_context(_held(both, torch.cat(both.detach().chunk(2, 1)[::-1], 1)))
        case "activation":
            stack.enter_context(changed(layers[2].mlp.experts, "act_fn", torch.nn.GELU()))
        case "window":
            stack.enter_context(changed(layers[1].self_attn, "sliding_window", 16))
        case _:
            raise KeyError(fault)


def _in_megatron(stack: contextlib.ExitStack, learner: Any, fault: str) -> None:
    layers = learner.model.decoder.layers
    match fault:
        case "rope base":
            frequencies = learner.shape.rotary.frequencies
            other = tuple(f / 50 ** (i / len(frequencies)) for i, f in enumerate(frequencies))
            rotary = msgspec.structs.replace(learner.shape.rotary, frequencies=other)
            stack.enter_context(changed(learner, "shape", msgspec.structs.replace(learner.shape, rotary=rotary)))
        case "norm epsilon":
            stack.enter_context(changed(layers[2].input_layernorm, "eps", 1e-2))
        case "gate and up exchanged":
            both = layers[0].mlp.experts.weight1
            stack.enter_context(_held(both, torch.cat(both.detach().chunk(2, 1)[::-1], 1)))
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
