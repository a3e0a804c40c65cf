"""What runs inside vLLM's worker processes: installing published weights, and not outliving the engine's owner.

vLLM mixes `WorkerExtension` into its worker class (`worker_extension_cls`) and calls its methods by name. Everything
that crosses the process boundary is bytes, numbers or strings.
"""

from __future__ import annotations

import contextlib
import os
import select
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import msgspec
import torch

from r3async.rollout.engines.vllm_sender import check_group, published_names
from r3async.weights.nccl import ask
from r3async.weights.publish import Difference, WeightError, WeightManifest, read_verified

Tensors = Iterable[tuple[str, torch.Tensor]]
_BASE = 128
"""Tags are written in digits of this base: every floating-point dtype of weights has 1 to 128 exactly, but for float8."""


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


@contextlib.contextmanager
def all_loaded(model: torch.nn.Module, published: WeightManifest) -> Iterator[None]:
    """Inside, vLLM gives the model a published version, in one call of its `load_weights` or several. Raises `WeightError` at
    the end for a tensor that it was not given, or a module that was not filled."""
    load, given = model.load_weights, set()
    empty: list[str] = []

    def counted(weights: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in weights:
            given.add(name)
            yield name, tensor

    def checked(weights: Iterable[tuple[str, torch.Tensor]]) -> Any:
        loaded = load(counted(weights))
        empty[:] = modules_left_out(model)  # vLLM only logs that these keep what they have
        return loaded

    model.load_weights = checked
    try:
        yield
    finally:
        del model.load_weights
    where = f"weights version {published.version}"
    if missing := sorted(set(published.tensors) - given):
        raise WeightError(f"{where}: tensor {missing[0]!r} was not loaded ({len(missing)} in all)")
    if empty:
        raise WeightError(f"{where}: vLLM's loader left out {empty[0]!r} ({len(empty)} in all)")


def differences(model: torch.nn.Module, published: WeightManifest, load: Callable[[Tensors], None]) -> list[Difference]:
    """Published tensors that the model does not hold, in the manifest's order. Afterwards it holds what `load` makes of them.

    vLLM fuses, splits and re-packs what it loads, and the names are lost by then. So what the model holds is compared with what
    a load by the book makes of the same file; and to name the elements that differ, the loader is given tags instead of
    weights: whatever it does with the tensors, it does to the tags too.

    `load` gives tensors to the model the right way. Empty if the model holds just that: then either the weights are well, or
    every load goes wrong in the same way. Needs host memory for one copy of the model.
    """
    held = {name: tensor.to("cpu", copy=True) for name, tensor in _contents(model)}
    load(read_verified(published))
    wrong = {}
    for name, tensor in _contents(model):
        now, before = tensor.cpu(), held.pop(name)
        if before.shape != now.shape:
            wrong[name] = torch.ones(now.shape, dtype=torch.bool)
        elif (different := _bits(before) != _bits(now)).any():
            wrong[name] = different.reshape(now.shape)
    if not wrong:
        return []
    tags = {name: torch.zeros(different.shape, dtype=torch.int64) for name, different in wrong.items()}
    tagged = {name: torch.ones(different.shape, dtype=torch.bool) for name, different in wrong.items()}
    place = 1
    while place <= len(published.tensors):
        load(_tags(published, place))
        for name, tensor in _contents(model):
            if name not in wrong:
                continue
            digits = tensor.cpu().to(torch.int64)
            tagged[name] &= (digits >= 1) & (digits <= _BASE)  # not padding
            tags[name] += (digits - 1) * place
        place *= _BASE
    load(read_verified(published))
    names = list(published.tensors)
    found: dict[int, Difference] = {}
    for parameter_name, different in wrong.items():
        which, counts = tags[parameter_name][different & tagged[parameter_name]].unique(return_counts=True)
        for tag, count in zip(which.tolist(), counts.tolist(), strict=True):
            if tag < len(names):
                found[tag] = Difference(names[tag], parameter_name, count)
    return [found[tag] for tag in sorted(found)]


def _contents(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """What each parameter holds.

    On CPU vLLM hands the weights of dense layers to oneDNN and empties the parameter; the layer's output for the unit vectors
    is what oneDNN has, to the bit.
    """
    for owner, module in model.named_modules():
        for name, parameter in module.named_parameters(recurse=False):
            held = parameter.detach()
            if not held.numel() and hasattr(module, "cpu_linear"):
                widths = ("input_size_per_partition", "input_size", "embedding_dim")
                width = next(getattr(module, w) for w in widths if hasattr(module, w))
                held = module.cpu_linear(torch.eye(width, dtype=held.dtype), parameter, None).T
            yield f"{owner}.{name}", held


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """As integers, so that what is not a number equals itself."""
    sizes = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return tensor.contiguous().reshape(-1).view(sizes[tensor.element_size()])


def _tags(published: WeightManifest, place: int) -> Iterator[tuple[str, torch.Tensor]]:
    """Tensors of the published shapes, full of one digit (plus 1) of their index."""
    for index, (name, entry) in enumerate(published.tensors.items()):
        yield name, torch.full(entry.shape, index // place % _BASE + 1, dtype=getattr(torch, entry.dtype))


class WorkerExtension:
    """Methods that `VllmEngine` calls on every worker."""

    r3_holds = (-1, 0)
    """Version and digest of what was installed last."""
    r3_link = ""
    """The NCCL group that this worker has joined."""
    weight_transfer_engine: Any
    """The worker's own."""

    def r3_process(self) -> int:
        """Pid of the worker's process."""
        return os.getpid()

    def r3_gpu(self) -> str:
        """The uuid of the worker's GPU; empty on CPU."""
        device = self.device  # type: ignore[attr-defined]
        return str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else ""

    def r3_install(self, manifest: bytes) -> float:
        """Load the published weights of a msgpack-encoded `WeightManifest` in place; returns the seconds it took.

        The owner has verified the checksums of the very file before it paused the engine, so only names, shapes and
        dtypes are checked again; from a `source` there is no more than these. Raises `WeightError` for those, for a tensor
        that was not given to vLLM's loader and for a module that the loader did not fill, or whatever the loader raises; the
        model then holds neither version and must not be run.
        """
        started = time.perf_counter()
        published = msgspec.msgpack.decode(manifest, type=WeightManifest)
        self.r3_holds = (-1, 0)
        if published.source is None:
            self.r3_load(published, self.r3_tensors(published))
        else:
            self.r3_receive(published)
        self.r3_after_load()
        self.r3_holds = published.version, published.digest
        return time.perf_counter() - started

    def r3_tensors(self, published: WeightManifest) -> Iterator[tuple[str, torch.Tensor]]:
        """What is given to vLLM's loader."""
        return read_verified(published, checksums=False)

    def r3_load(self, published: WeightManifest, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Have vLLM load the tensors, in the layout of its first load, and check that nothing was left out."""
        runner = self.model_runner  # type: ignore[attr-defined]
        with all_loaded(runner.model, published):
            runner.reload_weights(weights_iterator=tensors)

    def r3_receive(self, published: WeightManifest) -> None:
        """The same with tensors that come over vLLM's NCCL group, which is joined first if it is new; see `weights.nccl`.

        Blocks until all of them are here. If the sender is lost on the way this never returns: the owner's wait times
        out after `weights.install_timeout`, and it ends the engine.
        """
        engine = self.r3_transfer_engine()
        p = engine.parallel_config
        workers = p.world_size * p.data_parallel_size
        offer = ask(published, p.data_parallel_index * p.world_size + p.rank, workers)
        if offer.link != self.r3_link:
            self.r3_link = ""
            self.init_weight_transfer_engine(  # type: ignore[attr-defined]
                {
                    "master_address": offer.host,
                    "master_port": offer.port,
                    "rank_offset": 1,
                    "world_size": workers + 1,
                    "packed": True,
                    "packed_buffer_size_bytes": offer.bucket_bytes,
                }
            )
            check_group(engine)
            self.r3_link = offer.link
        entries = [(name, published.tensors[name]) for name in published_names(published.tensors)]
        with all_loaded(engine.model, published):
            self.start_weight_update()  # type: ignore[attr-defined]
            self.update_weights(  # type: ignore[attr-defined]
                {
                    "names": [name for name, _ in entries],
                    "dtype_names": [entry.dtype for _, entry in entries],
                    "shapes": [list(entry.shape) for _, entry in entries],
                }
            )
            self.finish_weight_update()  # type: ignore[attr-defined]

    def r3_transfer_engine(self) -> Any:
        """vLLM's receiving end, as `weight_transfer_config` would have made it at the start."""
        if self.weight_transfer_engine is None:
            from vllm.config import WeightTransferConfig
            from vllm.distributed.weight_transfer import WeightTransferEngineFactory

            self.weight_transfer_engine = WeightTransferEngineFactory.create_engine(
                WeightTransferConfig(backend="nccl"),
                self.vllm_config,  # type: ignore[attr-defined]
                self.device,  # type: ignore[attr-defined]
                self.model_runner.get_model(),  # type: ignore[attr-defined]
            )
        return self.weight_transfer_engine

    def r3_after_load(self) -> None:
        """Whatever vLLM itself leaves undone after a reload."""
        repack_cpu_experts(self.model_runner.model)  # type: ignore[attr-defined]

    def r3_installed(self) -> tuple[int, int]:
        """Version and digest of the contents that this worker has loaded completely; (-1, 0) if it has not."""
        return self.r3_holds

    def r3_differences(self, manifest: bytes) -> bytes:
        """See `differences`; msgpack."""
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

    A worker sits in a subprocess of its own; if its owner is killed before it can clean up, nobody else would
    ever end the worker.
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
