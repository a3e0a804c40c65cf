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
from r3async.weights.version_reader import VersionFile
from tests.helpers.mismatches import Fault, changed

IN_ENGINE = [
    Fault("attention scale", "attention", [1]),
    Fault("norm epsilon", "input_norm", [2]),
    Fault("rounded cache", "attention", [1]),
    Fault("gates not normalised", "mlp", [2]),
    Fault("scaled embedding", "embedding", [-1]),
    Fault("logits scaled", "head", [-1]),
    Fault("temperature", "sampling", [-1]),
    # Faults in the names that the loader sees.
    Fault("router rows", "router", [0]),
    Fault("layers exchanged", "attention", [0, 2]),
    Fault("norms exchanged", "post_norm", [1]),
    # Faults in which a tensor is not installed.
    Fault("stale projection", "attention", [2], "given: model.layers.2.self_attn.o_proj.weight"),
    Fault("stale expert", "mlp", [0], "given: model.layers.0.mlp.experts.3.up_proj.weight"),
    Fault("stale norm", "final_norm", [-1], "given: model.norm.weight"),
]

STALE = {
    "stale projection": "model.layers.2.self_attn.o_proj.weight",
    "stale expert": "model.layers.0.mlp.experts.3.up_proj.weight",
    "stale norm": "model.norm.weight",
}


def _renamed(pairs: dict[str, str]) -> Callable[[str, Tensor], tuple[str, Tensor]]:
    def change(name: str, tensor: Tensor) -> tuple[str, Tensor]:
        for old, new in pairs.items():
            if old in name:
                return name.replace(old, new), tensor
        return name, tensor

    return change


def _changed(pattern: str, change: Callable[[Tensor], Tensor]) -> Callable[[str, Tensor], tuple[str, Tensor]]:
    return lambda name, tensor: (name, change(tensor) if re.search(pattern, name) else tensor)


LOADED: dict[str, Callable[[str, Tensor], tuple[str, Tensor]]] = {
    "router rows": _changed(r"layers\.0\.mlp\.gate\.weight", lambda t: t.flip(0)),
    "layers exchanged": _renamed(
        {"layers.0.self_attn.": "layers.2.self_attn.", "layers.2.self_attn.": "layers.0.self_attn."}
    ),
}


class PlantingExtension(WorkerExtension):
    """A worker in which one fault at a time can be planted."""

    r3_fault = ""
    r3_before: Mapping[str, Tensor] = MappingProxyType({})

    def r3_plant(self, fault: str) -> None:
        model = self.model_runner.get_model()
        self.r3_healing = contextlib.ExitStack()
        self.r3_fault, self.r3_load_plan = fault, None  # a plan was made by the right names
        if fault in LOADED or fault == "norms exchanged":
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
        if fault == "norms exchanged":
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
        case "attention scale":
            impl = layers[1].self_attn.attn.impl
            return changed(impl, "scale", impl.scale * 1.3)
        case "norm epsilon":
            return changed(layers[2].input_layernorm, "variance_epsilon", 1e-2)
        case "rounded cache":  # as with kv_cache_dtype="fp8_e5m2", which not every CPU has
            impl = layers[1].self_attn.attn.impl
            keep = impl.do_kv_cache_update

            def rounded(layer: Any, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Any:
                kept = (t.to(torch.float8_e5m2).to(t.dtype) for t in (key, value))
                return keep(layer, *kept, *args, **kwargs)

            return changed(impl, "do_kv_cache_update", rounded)
        case "gates not normalised":
            return changed(layers[2].mlp.experts.router, "renormalize", False)
        case "scaled embedding":
            handle = model.model.embed_tokens.register_forward_hook(lambda m, a, out: out * 8)
            return contextlib.closing(_Closing(handle.remove))
        case "logits scaled":
            return changed(model.logits_processor, "scale", 1.25)
        case "temperature":
            apply = sampler.apply_temperature
            return changed(sampler, "apply_temperature", lambda logits, temp, *a: apply(logits, temp * 1.3, *a))
    raise KeyError(fault)


class _Closing:
    def __init__(self, close: Callable[[], object]):
        self.close = close
