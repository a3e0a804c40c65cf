"""Workers of vLLM with faults, or which report what they did; imported in the engine's process, too."""

from collections.abc import Iterable

import msgspec
import torch
from vllm import ir
from vllm.model_executor.layers import utils

from r3async.rollout.vllm.weight_comparison import iter_weight_contents
from r3async.rollout.vllm.worker import WorkerExtension, digest_weights
from r3async.weights.manifest import WeightManifest
from r3async.weights.version_reader import VersionFile


class FaultyExtension(WorkerExtension):
    """A worker with the fault that it is told to have.

    `flipped`: one bit of three tensors differs from what was checked. `unfinished`: it reloads as plain vLLM does, and
    experts stay in checkpoint layout. `lost`: the reload dies half-way.
    """

    FLIPPED = (
        "model.layers.0.mlp.experts.3.up_proj.weight",
        "model.layers.2.self_attn.k_proj.weight",
        "model.norm.weight",
    )
    r3_fault = ""

    def r3_plant(self, fault: str) -> None:
        self.r3_fault, self.r3_load_plan = fault, None

    def r3_map_file(self, published: WeightManifest) -> torch.Tensor:
        content = super().r3_map_file(published).clone()
        for name, tensor in VersionFile(published, content).iter_tensors():
            if self.r3_fault == "flipped" and name in self.FLIPPED:
                tensor.reshape(-1).view(torch.int32)[7] ^= 1 << 22
        return content

    def r3_finish_load(self) -> None:
        if self.r3_fault == "lost":
            raise RuntimeError("lost half-way")
        if self.r3_fault != "unfinished":
            super().r3_finish_load()


class ComparedExtension(WorkerExtension):
    """A worker that reports how it loads, and what it holds."""

    r3_reloads = 0
    r3_kept: dict[str, torch.Tensor]

    def r3_reload_tensors(self, published: WeightManifest, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        self.r3_reloads += 1
        super().r3_reload_tensors(published, tensors)

    def r3_loads(self) -> int:
        """Return how often vLLM's loader loaded."""
        return self.r3_reloads

    def r3_copies(self) -> int:
        return self.r3_load_plan.copy_count if self.r3_load_plan is not None else -1

    def r3_worked(self) -> list[str]:
        """Return the names of the modules that vLLM processes after it has loaded them, except experts that are only
        packed."""
        names = {module: name for name, module in self.model_runner.get_model().named_modules()}
        return [names[module] for module, _ in self.r3_load_plan._processed_loads]

    def r3_digests(self) -> dict[str, int]:
        return digest_weights(self.model_runner.get_model())

    def r3_cache_of_an_episode(self) -> int:
        """Return the bytes of the cache that a request of the greatest length takes."""
        specs = self.get_kv_cache_spec().values()
        return sum(spec.max_memory_usage_bytes(self.vllm_config) for spec in specs)

    def r3_norm_providers(self) -> list[list[str]]:
        """Return the implementations of vLLM's two norms, the first choice first."""
        return [op.get_priority() for op in (ir.ops.rms_norm, ir.ops.fused_add_rms_norm)]

    def r3_cache_bytes(self) -> int:
        """Return the bytes of the whole cache."""
        return sum(cache.nbytes for cache in self.model_runner.kv_caches)

    def r3_keep(self, names: list[str]) -> None:
        """Keep copies of what the model holds now under these names."""
        contents = dict(iter_weight_contents(self.model_runner.get_model()))
        self.r3_kept = {name: contents[name].clone() for name in names}

    def r3_put_back(self, name: str) -> None:
        """Make the model hold what was kept, as if the last update had left it out."""
        owner, _, attribute = name.rpartition(".")
        module = self.model_runner.get_model().get_submodule(owner)
        if getattr(module, attribute).numel():
            getattr(module, attribute).data.copy_(self.r3_kept[name])
            return
        module.weight = torch.nn.Parameter(self.r3_kept[name].contiguous(), requires_grad=False)
        utils.dispatch_cpu_unquantized_gemm(module, remove_weight=True)

    def r3_load_as_vllm(self, manifest: bytes) -> None:
        published = msgspec.msgpack.decode(manifest, type=WeightManifest)
        self.r3_reload_tensors(published, VersionFile(published).iter_tensors())
