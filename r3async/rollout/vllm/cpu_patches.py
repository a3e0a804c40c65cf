"""Patches of vLLM's CPU engine.

Experts are packed again after a reload, views of a packed convolution get its new weights, small
matrices are not packed at all, rotary embeddings apply to all heads, experts run beside adapters of
other layers, norms are computed by vLLM's own kernels, and the KV cache is no larger than needed.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
from typing import Any

import torch

logger = logging.getLogger(__name__)

NORM_KERNELS = "r3async_cpu"
"""Name under which `register_norm_kernels` gives vLLM the kernels."""
NORM_KERNEL_COLUMNS = 16
"""Number of which the kernels take multiples of columns, whatever the width of their vectors."""
CHOSEN_CACHE_KEY = "r3async_kv_cache_chosen"
"""Key in vLLM's `additional_config` whose value is True if `engine_args` says the cache's size."""
KV_CACHE_FILLS = 2
"""KV caches of all running requests at their longest: one for them, one for prefixes of others."""
SMALL_MATRIX_ELEMENTS = 2**18
"""Number of elements from which packed matrices are multiplied faster. An unpacked 1024 x 1024
matrix takes 1.2 times as long as a packed one with 64 rows, and 3 times as long with 4."""


def repack_cpu_experts(model: torch.nn.Module) -> int:
    """Convert reloaded expert weights to the packed layout of vLLM's CPU kernels and return the
    number of layers.

    vLLM (0.30 to 0.32) packs experts for the CPU on the first load only; after a reload the kernels
    would read checkpoint layout as packed layout and give wrong outputs without an error. Returns 0
    on other devices.
    """
    repacked = 0
    for module in model.modules():
        if needs_cpu_repack(module):
            module.quant_method.moe_kernel.fused_experts.process_weights_after_loading(module)
            repacked += 1
    return repacked


def find_tied_modules(model: torch.nn.Module) -> list[torch.nn.Module]:
    """Return the modules that have only weights of an earlier module, such as an output layer tied
    to the embedding.

    A loader loads nothing into them.
    """
    seen: set[int] = set()
    tied = []
    for module in model.modules():
        own = [id(p) for p in module.parameters(recurse=False)]
        if own and seen.issuperset(own):
            tied.append(module)
        seen.update(own)
    return tied


def repack_cpu_tied_layers(model: torch.nn.Module) -> None:
    """Make tied layers compute with the current weights of the module that they are tied to.

    vLLM packs the weights that it loads, and it loads nothing into these layers. Does nothing on
    other devices than CPU.
    """
    from vllm.model_executor.layers import utils

    for module in find_tied_modules(model):
        if hasattr(module, "cpu_linear"):
            utils.dispatch_cpu_unquantized_gemm(module, remove_weight=False)


def needs_cpu_repack(module: torch.nn.Module) -> bool:
    """Return True if `repack_cpu_experts` must pack the experts of this module."""
    kernel = getattr(getattr(module, "quant_method", None), "moe_kernel", None)
    weight = getattr(module, "w13_weight", None)
    return kernel is not None and weight is not None and bool(weight.device.type == "cpu")


def is_unpacked_linear(module: torch.nn.Module) -> bool:
    """Return True if a linear layer on CPU computes with its `weight` itself, and not
    with a packed copy."""
    return getattr(module, "cpu_linear", None) is torch.nn.functional.linear


def patch_vllm_for_cpu() -> None:
    """Apply all patches for a process that runs vLLM on CPU. Call it before a model is
    loaded. Idempotent."""
    patch_packing()
    patch_rotary_embedding()
    patch_experts_beside_adapters()
    register_norm_kernels()
    limit_kv_cache()


def register_norm_kernels() -> None:
    """Register vLLM's RMSNorm kernels for the CPU, which vLLM (0.30) builds and does not use, with
    its operators. Idempotent.

    Its native form is five to eight operations of torch. `prefer_norm_kernels` puts kernels first.
    """
    from vllm import ir
    from vllm.platforms import current_platform

    norm = ir.ops.rms_norm
    add_and_norm = ir.ops.fused_add_rms_norm
    if not current_platform.is_cpu() or NORM_KERNELS in norm.impls:
        return

    # vLLM demands the signatures of its native forms.
    @norm.register_impl(
        NORM_KERNELS,
        supports_args=lambda x, weight, epsilon, variance_size=None: (
            variance_size is None and has_norm_kernel(x, weight)
        ),
    )
    @functools.wraps(norm.impls["native"].impl_fn)
    def compute_rms_norm(x: Any, weight: Any, epsilon: float, variance_size: Any = None) -> Any:
        rows = x.contiguous()
        out = torch.empty_like(rows)
        torch.ops._C.rms_norm(out, rows, weight, epsilon)
        return out

    @add_and_norm.register_impl(
        NORM_KERNELS,
        inplace=True,
        supports_args=lambda x, x_residual, weight, epsilon, variance_size=None: (
            variance_size is None
            and x.dtype == x_residual.dtype
            and x.is_contiguous()
            and x_residual.is_contiguous()
            and has_norm_kernel(x, weight)
        ),
    )
    @functools.wraps(add_and_norm.impls["native"].impl_fn)
    def add_and_compute_rms_norm(
        x: Any, x_residual: Any, weight: Any, epsilon: float, variance_size: Any = None
    ) -> Any:
        torch.ops._C.fused_add_rms_norm(x, x_residual, weight, epsilon)
        return x, x_residual


def prefer_norm_kernels(config: Any) -> None:
    """Put the kernels of `register_norm_kernels` first in the priorities of vLLM's `config`."""
    priority = config.kernel_config.ir_op_priority
    for providers in (priority.rms_norm, priority.fused_add_rms_norm):
        providers.insert(0, NORM_KERNELS)


def has_norm_kernel(x: torch.Tensor, weight: torch.Tensor | None) -> bool:
    """Return True if vLLM's kernels normalise such rows as its native forms do."""
    return (
        weight is not None
        and weight.dtype == x.dtype
        and x.shape[-1] % NORM_KERNEL_COLUMNS == 0
        and norm_kernels_equal_native(x.dtype)
    )


@functools.cache
def norm_kernels_equal_native(dtype: torch.dtype) -> bool:
    """Return True if both kernels give what vLLM's native forms give, to rounding; else log it. An
    engine asks first while it loads its model.

    Those for AVX2 do not in bfloat16: they cut off what they should round.
    """
    from vllm import ir

    rng = torch.Generator().manual_seed(0)
    x, residual = torch.randn(2, 4, 4 * NORM_KERNEL_COLUMNS, generator=rng).to(dtype)
    weight = torch.randn(x.shape[-1], generator=rng).to(dtype)
    try:
        native, kernel = (
            (
                ir.ops.rms_norm.impls[name].func_impl_fn(x, weight, 1e-6),
                *ir.ops.fused_add_rms_norm.impls[name].func_impl_fn(x, residual, weight, 1e-6),
            )
            for name in ("native", NORM_KERNELS)
        )
        torch.testing.assert_close(kernel, native, rtol=4 * torch.finfo(dtype).eps, atol=0)
        # A sum is rounded once in both.
        torch.testing.assert_close(kernel[-1], native[-1], rtol=0, atol=0)
    except (AssertionError, AttributeError, RuntimeError) as error:
        logger.info(
            "vLLM's norms stay in their native forms for %s, whose kernels round otherwise here: %s",
            dtype,
            str(error).partition("\n")[0],
        )
        return False
    return True


def limit_kv_cache() -> None:
    """Keep vLLM in this process from allocating, and filling with zeros, more KV cache on CPU than
    `KV_CACHE_FILLS` times what all requests that run at once can use, unless its size was chosen.
    Idempotent."""
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return
    from vllm.v1.core.kv_cache_utils import max_memory_usage_bytes
    from vllm.v1.worker.cpu_worker import CPUWorker

    determine = CPUWorker.determine_available_memory

    def determine_needed(self: Any) -> int:
        config = self.vllm_config
        available = determine(self)
        # A hybrid model's states have blocks too.
        if config.model_config.is_hybrid or config.additional_config.get(CHOSEN_CACHE_KEY):
            return available
        request = max_memory_usage_bytes(config, self.get_kv_cache_spec().values())
        return min(available, KV_CACHE_FILLS * config.scheduler_config.max_num_seqs * request)

    if determine.__module__ != __name__:
        CPUWorker.determine_available_memory = determine_needed


def patch_experts_beside_adapters() -> None:
    """Make vLLM in this process choose the experts' kernels for the CPU also where it serves
    adapters. Those are of other layers only. Idempotent.

    With adapters of any layer vLLM (0.30) chooses kernels that apply adapters of experts, which are
    Triton's, on every device.
    """
    from vllm.model_executor.layers.fused_moe import unquantized_fused_moe_method as method
    from vllm.platforms import current_platform

    select = method.select_unquantized_moe_backend

    def select_without_adapters(moe_config: Any) -> Any:
        if current_platform.is_cpu():
            moe_config = dataclasses.replace(moe_config, is_lora_enabled=False)
        return select(moe_config)

    if select.__module__ != __name__:
        method.select_unquantized_moe_backend = select_without_adapters


def patch_rotary_embedding() -> None:
    """Make vLLM in this process rotate all heads of a query that has a dimension for heads.

    Its kernel for the CPU (0.30) infers the number of heads from the last dimension: for queries
    `[tokens, heads, D]`, as latent attention passes them, it rotates only the first head, without
    an error. Only YaRN does not use that kernel.
    """
    from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding

    kernel = RotaryEmbedding.forward_cpu

    def forward(
        self: Any, positions: torch.Tensor, query: torch.Tensor, key: torch.Tensor | None = None
    ) -> Any:
        if query.dim() == 3:
            return self.forward_native(positions, query, key)
        return kernel(self, positions, query, key)

    if kernel.__module__ != __name__:
        RotaryEmbedding.forward_cpu = forward


def patch_packing() -> None:
    """Keep vLLM in this process from packing small float32 matrices, and from leaving behind the
    views of a convolution that it packs. Call it before a model is loaded. Idempotent.

    vLLM packs every matrix for oneDNN, which compiles a kernel for each number of rows that it
    meets, and evicts the oldest. For a small matrix this takes longer than all products with it
    between two versions of the weights; so does packing each version.
    """
    from vllm.model_executor.layers import utils

    pack = utils.dispatch_cpu_unquantized_gemm

    def dispatch(layer: Any, remove_weight: bool) -> None:
        if _is_small_matrix(layer.weight):
            layer.cpu_linear = torch.nn.functional.linear
            return
        if layer.weight.ndim == 3 and not layer.weight.is_meta:
            _refill_views(layer)
        pack(layer, remove_weight)

    if pack.__module__ != __name__:
        utils.dispatch_cpu_unquantized_gemm = dispatch


def _refill_views(convolution: Any) -> None:
    """Write the loaded weights of a convolution, `[channels, 1, width]`, to the storage into which
    they were loaded first.

    Mamba-2 (0.30) computes with a view of that storage. Packing gives `weight` another one, so
    after a reload the view would keep the old weights.
    """
    loaded = convolution.weight.detach()
    first = vars(convolution).setdefault("r3_first_loaded", loaded)
    if first.device == loaded.device and first.data_ptr() != loaded.data_ptr():
        first.copy_(loaded)


def _is_small_matrix(weight: torch.Tensor) -> bool:
    """Return True for a small float32 matrix; oneDNN multiplies other dtypes in either case."""
    return bool(
        weight.dtype == torch.float32
        and weight.ndim == 2
        and weight.numel() < SMALL_MATRIX_ELEMENTS
    )
