"""What runs inside vLLM's worker processes: installing published weights, and not outliving the engine's owner.

vLLM mixes `WorkerExtension` into its worker class (`worker_extension_cls`) and calls its methods by name. Everything
that crosses the process boundary is bytes, numbers or strings.
"""

from __future__ import annotations

import os
import select
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import msgspec
import torch

from r3async.engines.vllm_compare import differences
from r3async.weights.manifest import WeightManifest
from r3async.weights.publish import WeightError, read_verified


def repack_cpu_experts(model: torch.nn.Module) -> int:
    """Bring reloaded expert weights into the layout that vLLM's CPU kernels compute with; returns how many layers.

    vLLM (0.30 to 0.32) packs experts for the CPU on the first load only; after a reload the kernels would read
    checkpoint layout as packed layout and give wrong outputs without an error. No layers on other devices.
    """
    repacked = 0
    for module in model.modules():
        kernel = getattr(getattr(module, "quant_method", None), "moe_kernel", None)
        weight = getattr(module, "w13_weight", None)
        if kernel is not None and weight is not None and weight.device.type == "cpu":
            kernel.fused_experts.process_weights_after_loading(module)
            repacked += 1
    return repacked


def modules_left_out(model: torch.nn.Module) -> list[str]:
    """Modules with weights that vLLM's loader, in the middle of a reload, was given nothing for."""
    from vllm.model_executor.layers.attention import is_deferred_attention_layer
    from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

    return [
        name
        for name, module in model.named_modules()
        if (info := get_layerwise_info(module)).can_load()
        and not is_deferred_attention_layer(module)
        and any(True for _ in module.parameters(recurse=False))
        and info.load_numel <= 0
    ]


class WorkerExtension:
    """Methods that `VllmEngine` calls on every worker."""

    r3_holds = (-1, 0)
    """Version and digest of what was installed last."""

    def r3_process(self) -> int:
        """Pid of the worker's process."""
        return os.getpid()

    def r3_install(self, manifest: bytes) -> float:
        """Load the published weights of a msgpack-encoded `WeightManifest` in place; returns the seconds it took.

        The owner has verified the checksums of the very file before it paused the engine, so only names, shapes and
        dtypes are checked again. Raises `WeightError` for those, for a tensor that was not given to vLLM's loader and for a
        module that the loader did not fill, or whatever the loader raises; the model then holds neither version and must
        not be run.
        """
        started = time.perf_counter()
        published = msgspec.msgpack.decode(manifest, type=WeightManifest)
        self.r3_holds = (-1, 0)
        self.r3_load(published, self.r3_tensors(published))
        self.r3_after_load()
        self.r3_holds = published.version, published.digest
        return time.perf_counter() - started

    def r3_tensors(self, published: WeightManifest) -> Iterator[tuple[str, torch.Tensor]]:
        """What is given to vLLM's loader."""
        return read_verified(published, checksums=False)

    def r3_load(self, published: WeightManifest, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Have vLLM load the tensors, in the layout of its first load, and check that nothing was left out."""
        runner = self.model_runner  # type: ignore[attr-defined]
        model = runner.model
        load, given, empty = model.load_weights, set(), []

        def counted() -> Iterator[tuple[str, torch.Tensor]]:
            for name, tensor in tensors:
                given.add(name)
                yield name, tensor

        def checked(weights: Iterable[tuple[str, torch.Tensor]]) -> Any:
            loaded = load(weights)
            empty.extend(modules_left_out(model))  # vLLM only logs that these keep what they have
            return loaded

        model.load_weights = checked
        try:
            runner.reload_weights(weights_iterator=counted())
        finally:
            del model.load_weights
        where = f"weights version {published.version}"
        if missing := sorted(set(published.tensors) - given):
            raise WeightError(f"{where}: tensor {missing[0]!r} was not loaded ({len(missing)} in all)")
        if empty:
            raise WeightError(f"{where}: vLLM's loader left out {empty[0]!r} ({len(empty)} in all)")

    def r3_after_load(self) -> None:
        """Whatever vLLM itself leaves undone after a reload."""
        repack_cpu_experts(self.model_runner.model)  # type: ignore[attr-defined]

    def r3_installed(self) -> tuple[int, int]:
        """Version and digest of the contents that this worker has loaded completely; (-1, 0) if it has not."""
        return self.r3_holds

    def r3_differences(self, manifest: bytes) -> bytes:
        """See `vllm_compare.differences`; msgpack."""
        published = msgspec.msgpack.decode(manifest, type=WeightManifest)
        runner = self.model_runner  # type: ignore[attr-defined]

        def load(tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
            runner.reload_weights(weights_iterator=tensors)
            repack_cpu_experts(runner.model)

        return msgspec.msgpack.encode(differences(runner.model, published, load))


class OwnedConfig(dict[str, Any]):
    """vLLM's `additional_config`; every process that it is unpickled in ends with process `owner`.

    vLLM hands its whole configuration to each process it spawns, before that process does anything else. A hook in
    the worker would come too late: an owner that is killed during the start would leave its engine waiting.
    """

    def __init__(self, owner: int, values: Mapping[str, Any]):
        super().__init__(values)
        self.owner = owner

    def __reduce__(self) -> tuple[Any, ...]:
        return _owned_config, (self.owner, dict(self))


def _owned_config(owner: int, values: dict[str, Any]) -> OwnedConfig:
    if owner != os.getpid():
        exit_with(owner)
    return OwnedConfig(owner, values)


def exit_with(owner: int) -> None:
    """Start a daemon thread that ends this process as soon as process `owner` has ended, however that happened.

    A worker sits in a subprocess of its own; if its owner is killed without a chance to clean up, nobody else would
    ever tell the worker to leave.
    """

    def watch() -> None:
        _wait_for_exit(owner)
        os._exit(1)

    threading.Thread(target=watch, name="r3async-owner-watch", daemon=True).start()


def _wait_for_exit(pid: int) -> None:
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    except (AttributeError, OSError):  # not Linux, or an old kernel or sandbox
        while _exists(pid):
            time.sleep(1.0)
        return
    poller = select.poll()
    poller.register(descriptor, select.POLLIN)
    while not poller.poll(60_000):
        pass


def _exists(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True
