"""Patches that let megatron-core run without CUDA, and without TransformerEngine.

`patch_megatron` changes names inside `torch.cuda` and Megatron, once and for the whole process; on
a CUDA machine it only supplies the names that Megatron leaves unbound without TransformerEngine.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import torch
from torch.overrides import TorchFunctionMode


class _StubStream:
    """A stand-in for a CUDA stream or event: on CPU all work is done when the call returns."""

    def __init__(self, *args: Any, **kwargs: Any):
        pass

    def _do_nothing(self, *args: Any, **kwargs: Any) -> None:
        return None

    record = wait = synchronize = wait_stream = wait_event = _do_nothing

    def record_event(self, *args: Any, **kwargs: Any) -> _StubStream:
        return self


class _StubFp8State:
    @staticmethod
    def is_fp8_enabled() -> bool:
        return False


@contextlib.contextmanager
def light_megatron_import() -> Iterator[None]:
    """Keep unneeded modules out of Megatron's imports in this block: wandb, and without
    CUDA the compiler.

    Only Megatron's logging needs wandb. On two cores Megatron's import then takes 2.0 s of CPU
    instead of 5.8 s, in each process that trains.
    """
    compiler = torch.compile
    if not torch.cuda.is_available():
        # Megatron's small functions would be compiled; on CPU they recompile for every shape,
        # eight times slower.
        torch.compile = _skip_compilation
    unused = "wandb" not in sys.modules
    if unused:
        sys.modules["wandb"] = None  # type: ignore[assignment]  # importing it raises ImportError
    try:
        yield
    finally:
        torch.compile = compiler
        if unused:
            del sys.modules["wandb"]


def _skip_compilation(function: Callable[..., Any] | None = None, **settings: Any) -> Any:
    return _skip_compilation if function is None else function


@cache
def patch_megatron() -> None:
    """Make Megatron usable on this machine. Call before building a model; calling
    again does nothing."""
    _stub_transformer_engine()
    if not torch.cuda.is_available():
        _stub_cuda()


def _stub_transformer_engine() -> None:
    from megatron.core.tensor_parallel import random
    from megatron.core.transformer.moe import moe_utils

    # The router's gating function tests `te_general_gemm is not None`, a name bound only if
    # TransformerEngine imports.
    if not hasattr(moe_utils, "te_general_gemm"):
        moe_utils.te_general_gemm = None
    # Activation recompute of norms asks whether FP8 is on through names with the same defect.
    if not hasattr(random, "FP8GlobalStateManager"):
        random.FP8GlobalStateManager = _StubFp8State
        random.activation_recompute_forward = random.fp8_autocast = lambda *a, **k: (
            contextlib.nullcontext()
        )


def _stub_cuda() -> None:
    from megatron.core.tensor_parallel import random

    cuda = torch.cuda
    cpu = torch.device("cpu")
    # The router moves its weight to the current device; the tensor-parallel
    # mappings allocate on it.
    cuda.current_device = lambda: cpu
    # The all-to-all dispatcher makes a side stream when it is built.
    stream = _StubStream()
    cuda.Stream = cuda.Event = _StubStream
    cuda.current_stream = cuda.default_stream = lambda *a, **k: stream
    cuda.stream = lambda s: contextlib.nullcontext()
    # A stage that shares the embedding with another moves it to the device before they agree on it.
    torch.Tensor.cuda = lambda self, *a, **k: self
    # Pipeline communication synchronises the device after a batch of sends and receives.
    cuda.synchronize = lambda *a, **k: None
    # Activation recompute saves and restores the CUDA generator. Nothing here draws from it:
    # dropout must be 0.
    state = torch.zeros(16, dtype=torch.uint8)
    cuda.get_rng_state = cuda.random.get_rng_state = lambda *a, **k: state
    cuda.manual_seed = lambda seed: None
    random._set_cuda_rng_state = lambda *a, **k: None


class _CudaToCpuMode(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if kwargs.get("device") == "cuda":
            kwargs["device"] = "cpu"
        return func(*args, **kwargs)


def map_cuda_to_cpu() -> contextlib.AbstractContextManager[Any]:
    """Make `device="cuda"` mean the CPU in this block, where there is no CUDA.

    Megatron's schedules have it as a literal.
    """
    return contextlib.nullcontext() if torch.cuda.is_available() else _CudaToCpuMode()
