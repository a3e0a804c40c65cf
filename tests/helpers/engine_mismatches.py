"""Faults in vLLM, planted one at a time; imported in the engine's process, too."""

import contextlib
import re
from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import Any

import msgspec
import torch
from torch import Tensor

from r3async.rollout.vllm.worker import WorkerExtension
from r3async.weights.manifest import WeightManifest
from r3async.weights.version_file import VersionFile
from tests.helpers.mismatches import Fault, changed

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
