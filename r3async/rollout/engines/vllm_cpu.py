"""vLLM's CPU engine: experts that are packed again after a reload, small matrices that are not packed at all, and rotary
positions of all heads."""

from __future__ import annotations

from typing import Any

import torch

SMALL_MATRIX_ELEMENTS = 2**18
"""Elements. From here on packed matrices are multiplied faster: of 1024 x 1024 it takes 1.2 times as long as it is with 64 rows,
and 3 times as long with 4."""


def repack_cpu_experts(model: torch.nn.Module) -> int:
    """Bring reloaded expert weights into the layout that vLLM's CPU kernels compute with; returns how many layers.

    vLLM (0.30 to 0.32) packs experts for the CPU on the first load only; after a reload the kernels would read
    checkpoint layout as packed layout and give wrong outputs without an error. No layers on other devices.
    """
    repacked = 0
    for module in model.modules():
        if needs_cpu_repack(module):
            module.quant_method.moe_kernel.fused_experts.process_weights_after_loading(module)
            repacked += 1
    return repacked


def find_tied_modules(model: torch.nn.Module) -> list[torch.nn.Module]:
    """Modules whose only weights are an earlier module's: an output layer that is the embedding. A loader gives them nothing."""
    seen: set[int] = set()
    tied = []
    for module in model.modules():
        own = [id(p) for p in module.parameters(recurse=False)]
        if own and seen.issuperset(own):
            tied.append(module)
        seen.update(own)
    return tied


def repack_cpu_tied_layers(model: torch.nn.Module) -> None:
    """Have layers whose weights are another module's compute with those that it has now: vLLM packs what it loads, and it has
    loaded nothing for them. None on other devices."""
    from vllm.model_executor.layers import utils

    for module in find_tied_modules(model):
        if hasattr(module, "cpu_linear"):
            utils.dispatch_cpu_unquantized_gemm(module, remove_weight=False)


def needs_cpu_repack(module: torch.nn.Module) -> bool:
    """`repack_cpu_experts` does."""
    kernel = getattr(getattr(module, "quant_method", None), "moe_kernel", None)
    weight = getattr(module, "w13_weight", None)
    return kernel is not None and weight is not None and bool(weight.device.type == "cpu")


def is_unpacked_linear(module: torch.nn.Module) -> bool:
    """A linear layer on CPU computes with its `weight`, and with nothing that was made of it."""
    return getattr(module, "cpu_linear", None) is torch.nn.functional.linear


def patch_vllm_for_cpu() -> None:
    """What has to be otherwise in a process that runs vLLM on CPU. Called before a model is loaded. Idempotent."""
    patch_small_matrices()
    patch_rotary_embedding()


def patch_rotary_embedding() -> None:
    """In this process vLLM turns all heads of a query that has a dimension for them.

    Its kernel for the CPU (0.30) reads the number of heads from the last dimension: of queries `[tokens, heads, D]`, as
    latent attention hands them over, it turns the first head alone, without an error. Only YaRN does not go through it.
    """
    from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding

    kernel = RotaryEmbedding.forward_cpu

    def forward(self: Any, positions: torch.Tensor, query: torch.Tensor, key: torch.Tensor | None = None) -> Any:
        if query.dim() == 3:
            return self.forward_native(positions, query, key)
        return kernel(self, positions, query, key)

    if kernel.__module__ != __name__:
        RotaryEmbedding.forward_cpu = forward


def patch_small_matrices() -> None:
    """In this process vLLM does not pack small matrices in single precision. Called before a model is loaded. Idempotent.

    It packs each for oneDNN, which compiles a kernel for each number of rows that it meets, and forgets the oldest of them: of
    a small matrix this takes longer than all products with it between two versions of the weights. So does packing each version.
    """
    from vllm.model_executor.layers import utils

    pack = utils.dispatch_cpu_unquantized_gemm

    def dispatch(layer: Any, remove_weight: bool) -> None:
        if _is_small_matrix(layer.weight):
            layer.cpu_linear = torch.nn.functional.linear
        else:
            pack(layer, remove_weight)

    if pack.__module__ != __name__:
        utils.dispatch_cpu_unquantized_gemm = dispatch


def _is_small_matrix(weight: torch.Tensor) -> bool:
    """Other dtypes are multiplied by oneDNN in either case."""
    return bool(weight.dtype == torch.float32 and weight.ndim == 2 and weight.numel() < SMALL_MATRIX_ELEMENTS)
