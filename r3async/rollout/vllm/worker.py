"""Inside vLLM's worker: what a model holds, how new weights are loaded, what was sampled, and what was sent."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec
import torch
import xxhash
import zmq
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from vllm.v1.outputs import SamplerOutput
from vllm.v1.sample.sampler import Sampler

from r3async.rollout.activations import ActivationRecorder
from r3async.rollout.vllm.core import (
    find_tied_modules,
    is_unpacked_linear,
    needs_cpu_repack,
    repack_cpu_experts,
    repack_cpu_tied_layers,
)
from r3async.untrusted import decode_msgpack
from r3async.weights.fetch import VersionFile, iter_verified_tensors, map_file_privately
from r3async.weights.manifest import TensorMismatch, WeightError, WeightManifest
from r3async.weights.nccl import Send, Sent, Up, decode_nccl_message, encode_nccl_message, request_receive_offer

# What runs inside vLLM's worker processes: installing published weights.
#
# vLLM mixes `WorkerExtension` into its worker class (`worker_extension_cls`) and calls its methods by name. Everything
# that crosses the process boundary is bytes, numbers or strings.


logger = logging.getLogger(__name__)


def find_unfilled_modules(model: torch.nn.Module) -> list[str]:
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
def check_all_loaded(model: torch.nn.Module, published: WeightManifest) -> Iterator[None]:
    """Inside, vLLM gives the model a published version, in one call of its `load_weights` or several. Raises `WeightError` at
    the end for a tensor that it was not given, or a module that was not filled."""
    load, given = model.load_weights, set()
    empty: list[str] = []
    tied = {id(module) for module in find_tied_modules(model)}

    def record_names(weights: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in weights:
            given.add(name)
            yield name, tensor

    def load_and_check(weights: Iterable[tuple[str, torch.Tensor]]) -> Any:
        loaded = load(record_names(weights))
        # vLLM only logs that these keep what they have.
        modules = dict(model.named_modules(remove_duplicate=False))
        empty[:] = [name for name in find_unfilled_modules(model) if id(modules.get(name)) not in tied]
        return loaded

    model.load_weights = load_and_check
    try:
        yield
    finally:
        del model.load_weights
    where = f"weights version {published.version}"
    if missing := sorted(set(published.tensors) - given):
        raise WeightError(f"{where}: tensor {missing[0]!r} was not loaded ({len(missing)} in all)")
    if empty:
        raise WeightError(f"{where}: vLLM's loader left out {empty[0]!r} ({len(empty)} in all)")


class WorkerExtension:
    """Methods that `VllmEngine` calls on every worker."""

    r3_installed = (-1, 0)
    """Version and digest of the contents that were installed last, and completely; (-1, 0) if there are none."""
    r3_nccl_link = ""
    """The NCCL group that this worker has joined."""
    r3_load_plan: LoadPlan | None = None
    """What loads files like the one that was loaded last."""
    r3_activations: ActivationRecorder | None = None
    """What the model computes is seen."""
    weight_transfer_engine: Any
    """The worker's own."""

    def r3_process_id(self) -> int:
        """Pid of the worker's process."""
        return os.getpid()

    def r3_gpu_uuid(self) -> str:
        """The uuid of the worker's GPU; empty on CPU."""
        device = self.device  # type: ignore[attr-defined]
        return str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else ""

    def r3_record_sampling_masks(self) -> None:
        """From now on the sampler records which tokens could be sampled."""
        record_sampling_masks(self.model_runner)  # type: ignore[attr-defined]

    def r3_install_version(self, manifest: bytes) -> tuple[int, int]:
        """Load the published weights of a msgpack-encoded `WeightManifest` in place; returns `r3_installed`.

        The owner has verified the very file before it paused the engine, so only its header is compared again, with that of the
        plan; from a `source` names, shapes and dtypes are. Raises `WeightError` for those, for a tensor that was not given to
        vLLM's loader and for a module that the loader did not fill, or whatever the loader raises; the model then holds neither
        version and must not be run.
        """
        published = decode_msgpack(manifest, WeightManifest)
        self.r3_installed = (-1, 0)
        if published.source is None:
            self.r3_load_file(published)
        else:
            self.r3_receive_tensors(published)
            self.r3_finish_load()
        self.r3_installed = published.version, published.digest
        return self.r3_installed

    def r3_map_file(self, published: WeightManifest) -> torch.Tensor:
        """The file of a version, uint8 `[n]`, mapped."""
        return map_file_privately(published.path)

    def r3_load_file(self, published: WeightManifest) -> None:
        """Load a published file: by the plan, or if there is none for such a file, as vLLM does it, which makes the plan."""
        content = self.r3_map_file(published)
        if self.r3_load_plan is not None and self.r3_load_plan.can_load(content):
            self.r3_load_plan.load_file(content)
            self.r3_finish_load()
            return
        self.r3_load_plan = None
        file = VersionFile(published, content)
        watch = LoadRecorder(file.data)
        with watch:
            self.r3_reload_tensors(published, file.iter_tensors())
        model = self.model_runner.model  # type: ignore[attr-defined]
        if not watch.is_repeatable(model):
            return
        plan = LoadPlan(model, self.model_config.dtype, file.header, watch.module_loads)  # type: ignore[attr-defined]
        if self.r3_is_plan_exact(plan, content):
            self.r3_load_plan = plan
        else:
            self.r3_reload_tensors(published, file.iter_tensors())

    def r3_is_plan_exact(self, plan: LoadPlan, content: torch.Tensor) -> bool:
        """Whether the plan gives what vLLM's loader just gave, to the bit: padding and packed weights too."""
        model = self.model_runner.model  # type: ignore[attr-defined]
        before = digest_parameters(model)
        plan.load_file(content, poison=True)
        self.r3_finish_load()
        wrong = sorted(name for name, digest in digest_parameters(model).items() if before.get(name) != digest)
        if wrong:
            logger.warning("every version is loaded as vLLM does it: the plan gives another %s", wrong[0])
        return not wrong

    def r3_reload_tensors(self, published: WeightManifest, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Have vLLM load the tensors, in the layout of its first load, and check that nothing was left out."""
        runner = self.model_runner  # type: ignore[attr-defined]
        with check_all_loaded(runner.model, published):
            runner.reload_weights(weights_iterator=tensors)
        self.r3_finish_load()

    def r3_receive_tensors(self, published: WeightManifest) -> None:
        """The same with tensors that come over vLLM's NCCL group, which is joined first if it is new; see `weights.nccl`.

        Blocks until all of them are here. If the sender is lost on the way this never returns: the owner's wait times
        out after `weights.install_timeout`, and it ends the engine.
        """
        engine = self.r3_get_transfer_engine()
        p = engine.parallel_config
        workers = p.world_size * p.data_parallel_size
        offer = request_receive_offer(published, p.data_parallel_index * p.world_size + p.rank, workers)
        if offer.link != self.r3_nccl_link:
            self.r3_nccl_link = ""
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
            check_nccl_group(engine)
            self.r3_nccl_link = offer.link
        widths = {name: getattr(torch, entry.dtype).itemsize for name, entry in published.tensors.items()}
        entries = [(name, published.tensors[name]) for name in order_tensor_names(widths)]
        with check_all_loaded(engine.model, published):
            self.start_weight_update()  # type: ignore[attr-defined]
            self.update_weights(  # type: ignore[attr-defined]
                {
                    "names": [name for name, _ in entries],
                    "dtype_names": [entry.dtype for _, entry in entries],
                    "shapes": [list(entry.shape) for _, entry in entries],
                }
            )
            self.finish_weight_update()  # type: ignore[attr-defined]

    def r3_get_transfer_engine(self) -> Any:
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

    def r3_finish_load(self) -> None:
        """Whatever vLLM itself leaves undone after a reload."""
        model = self.model_runner.model  # type: ignore[attr-defined]
        repack_cpu_experts(model)
        repack_cpu_tied_layers(model)

    def r3_find_weight_differences(self, manifest: bytes) -> bytes:
        """See `find_model_differences`; msgpack."""
        published = decode_msgpack(manifest, WeightManifest)
        runner = self.model_runner  # type: ignore[attr-defined]

        def load(tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
            runner.reload_weights(weights_iterator=tensors)
            self.r3_finish_load()

        return msgspec.msgpack.encode(find_model_differences(runner.model, published, load))

    def r3_record_activations(self) -> None:
        """From now on, see what the model computes, stage by stage; until `r3_save_activations`."""
        self.r3_activations = ActivationRecorder(self.model_runner.model)  # type: ignore[attr-defined]

    def r3_save_activations(self, path: str) -> str:
        """Write what was seen to a safetensors file, if this is the first worker; returns the dtype that it computes in."""
        from safetensors.torch import save_file

        stages, self.r3_activations = self.r3_activations, None
        if stages is None:
            return ""
        seen = stages.finish_recording()
        if self.rank == 0:  # type: ignore[attr-defined]
            save_file(seen, path)
        return stages.dtype


# Installing weights by a plan: which bytes of a published file go where in an engine's parameters.
#
# vLLM's loader finds the place of each tensor by its name, and does so twice: a fraction of a millisecond a tensor, and an expert
# has three. Files with equal headers all load alike. So the loader is watched once, and what it copied is copied again for every
# later version: tensors that lie side by side, or at equal distances, at once. What vLLM does with a module that has been filled
# (padding, packing, handing weights to a kernel) it does as ever.


_POISON_BYTE = 87
"""What is in a parameter before it is filled for a comparison."""


@dataclass(frozen=True)
class TensorCopy:
    """A part of the file's data into a part of `parameter`. `byte_offset` is in bytes of the data, `element_offset` in
    elements of the parameter. `dimensions`: for each dimension its size, and the strides in the file and in the parameter, in
    elements."""

    parameter: str
    dtype: torch.dtype
    byte_offset: int
    element_offset: int
    dimensions: tuple[tuple[int, int, int], ...]

    def view_source(self, data: torch.Tensor) -> torch.Tensor:
        """A view of the file's data, uint8 `[n]`."""
        width = self.dtype.itemsize
        whole = data[: data.numel() // width * width].view(self.dtype)
        return self._view_strided(whole, 1, whole.storage_offset() + self.byte_offset // width)

    def view_target(self, parameter: torch.Tensor) -> torch.Tensor:
        """A view of the parameter."""
        return self._view_strided(parameter, 2, parameter.storage_offset() + self.element_offset)

    def _view_strided(self, tensor: torch.Tensor, stride_index: int, offset: int) -> torch.Tensor:
        return tensor.as_strided([s[0] for s in self.dimensions], [s[stride_index] for s in self.dimensions], offset)


@dataclass(frozen=True)
class TensorFill:
    """A part of `parameter` that the loader sets to a number: padding."""

    parameter: str
    offset: int
    size: tuple[int, ...]
    stride: tuple[int, ...]
    value: float

    def fill_parameter(self, parameter: torch.Tensor) -> None:
        parameter.as_strided(self.size, self.stride, parameter.storage_offset() + self.offset).fill_(self.value)


@dataclass
class ModuleLoad:
    """What a module's parameters get."""

    copies: list[TensorCopy] = field(default_factory=list)
    fills: list[TensorFill] = field(default_factory=list)

    def fill_module(self, module: torch.nn.Module, data: torch.Tensor, poison: bool) -> None:
        """Fill the module's parameters. `poison`: set all bytes first, to see later whether each was filled."""
        fill_modules([(module, self)], data, poison)


def fill_modules(module_loads: Iterable[tuple[torch.nn.Module, ModuleLoad]], data: torch.Tensor, poison: bool) -> None:
    """`ModuleLoad.fill_module` of several modules, with one call for all copies."""
    targets, sources = [], []
    for module, filling in module_loads:
        held = module._parameters
        if poison:
            for parameter in held.values():
                if parameter is not None and parameter.numel():
                    parameter.data.fill_(_POISON_BYTE)
        for fill in filling.fills:
            fill.fill_parameter(held[fill.parameter].data)
        targets += [copy.view_target(held[copy.parameter].data) for copy in filling.copies]
        sources += [copy.view_source(data) for copy in filling.copies]
    if targets:
        torch._foreach_copy_(targets, sources)


def merge_copies(copies: Iterable[TensorCopy]) -> list[TensorCopy]:
    """The same copies, as few as they can be made of."""
    found = sorted(map(_collapse_dimensions, copies), key=lambda c: (c.parameter, c.byte_offset))
    before = len(found) + 1
    while len(found) < before:
        before = len(found)
        found = list(_join_equidistant(list(_join_adjacent(found))))
    return found


def _collapse_dimensions(copy: TensorCopy) -> TensorCopy:
    """Without dimensions that go on where the next one ends."""
    steps: list[tuple[int, int, int]] = []
    for size, near, far in reversed(copy.dimensions):
        if size == 1:
            continue
        if steps and (near, far) == (steps[-1][0] * steps[-1][1], steps[-1][0] * steps[-1][2]):
            steps[-1] = (size * steps[-1][0], *steps[-1][1:])
        else:
            steps.append((size, near, far))
    return replace(copy, dimensions=tuple(reversed(steps)) or ((1, 1, 1),))


def _join_adjacent(copies: list[TensorCopy]) -> Iterator[TensorCopy]:
    """Those that lie one behind the other, in file and parameter, joined."""
    open_: TensorCopy | None = None
    for copy in copies:
        if open_ is not None:
            ((size, *dense),) = open_.dimensions if len(open_.dimensions) == 1 else ((0, 0, 0),)
            if (
                dense == [1, 1]
                and len(copy.dimensions) == 1
                and copy.dimensions[0][1:] == (1, 1)
                and (copy.parameter, copy.dtype) == (open_.parameter, open_.dtype)
                and (copy.byte_offset, copy.element_offset)
                == (open_.byte_offset + size * copy.dtype.itemsize, open_.element_offset + size)
            ):
                open_ = replace(open_, dimensions=((size + copy.dimensions[0][0], 1, 1),))
                continue
            yield open_
        open_ = copy
    if open_ is not None:
        yield open_


def _join_equidistant(copies: list[TensorCopy]) -> Iterator[TensorCopy]:
    """Those of one shape at equal distances joined."""
    at = 0
    while at < len(copies):
        first, stop = copies[at], at + 1
        gap = _measure_gap(first, copies[stop]) if stop < len(copies) else None
        while gap is not None and stop < len(copies) and _measure_gap(copies[stop - 1], copies[stop]) == gap:
            stop += 1
        if gap is None:
            yield first
        else:
            yield _collapse_dimensions(replace(first, dimensions=((stop - at, *gap), *first.dimensions)))
        at = stop


def _measure_gap(one: TensorCopy, other: TensorCopy) -> tuple[int, int] | None:
    """How far the second is from the first, in elements of the file and of the parameter, if it could be the next step."""
    if (one.parameter, one.dtype, one.dimensions) != (other.parameter, other.dtype, other.dimensions):
        return None
    near, rest = divmod(other.byte_offset - one.byte_offset, one.dtype.itemsize)
    far = other.element_offset - one.element_offset
    return (near, far) if not rest and far > 0 else None


class LoadRecorder(TorchDispatchMode):
    """Sees, while it is entered, what a load copies out of `data` (a file's, uint8 `[n]`) into the modules that vLLM fills."""

    def __init__(self, data: torch.Tensor):
        super().__init__()
        self._storage, self._data_offset = data.untyped_storage().data_ptr(), data.storage_offset()
        self._module_load, self._parameters_by_storage = ModuleLoad(), dict[int, tuple[str, torch.Tensor]]()
        self.module_loads: dict[torch.nn.Module, ModuleLoad] = {}
        """In the order in which vLLM filled them."""

    def is_repeatable(self, model: torch.nn.Module) -> bool:
        """Something of `model` was filled, and nothing that vLLM fills in another way."""
        return bool(self.module_loads) and self.module_loads.keys().isdisjoint(_find_deferred_attention(model))

    def __enter__(self) -> LoadRecorder:
        self._hook = contextlib.ExitStack()
        self._hook.enter_context(on_materialize(self._begin_module))
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._hook.close()

    def _begin_module(self, module: torch.nn.Module) -> None:
        self._module_load = self.module_loads[module] = ModuleLoad()
        held = {name: p for name, p in module._parameters.items() if p is not None and p.numel()}
        self._parameters_by_storage = {p.untyped_storage().data_ptr(): (name, p.data) for name, p in held.items()}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _WRITE_OPS and (known := self._parameters_by_storage.get(args[0].untyped_storage().data_ptr())):
            name, parameter = known
            to, value = args[0], args[1] if len(args) > 1 else 0
            offset = to.storage_offset() - parameter.storage_offset()
            if not isinstance(value, torch.Tensor):
                self._module_load.fills.append(TensorFill(name, offset, tuple(to.shape), to.stride(), value))
            elif value.untyped_storage().data_ptr() == self._storage and value.shape == to.shape and to.numel():
                start = value.storage_offset() * value.itemsize - self._data_offset
                steps = tuple(zip(to.shape, value.stride(), to.stride(), strict=True))
                self._module_load.copies.append(TensorCopy(name, value.dtype, start, offset, steps))
        return func(*args, **(kwargs or {}))


_WRITE_OPS = {torch.ops.aten.copy_.default, torch.ops.aten.fill_.Scalar, torch.ops.aten.zero_.default}


def _find_deferred_attention(model: torch.nn.Module) -> list[torch.nn.Module]:
    """Modules that vLLM finishes after all others; scales are all that they load."""
    from vllm.model_executor.layers.attention import is_deferred_attention_layer

    return [module for module in model.modules() if is_deferred_attention_layer(module)]


@contextlib.contextmanager
def on_materialize(callback: Callable[[torch.nn.Module], None]) -> Iterator[None]:
    """Inside, `callback` is called with each module that vLLM has made room in, and is about to fill."""
    from vllm.model_executor.model_loader.reload import layerwise

    make = layerwise.materialize_layer

    def materialize_and_call(layer: torch.nn.Module, info: Any) -> None:
        make(layer, info)
        callback(layer)

    layerwise.materialize_layer = materialize_and_call
    try:
        yield
    finally:
        layerwise.materialize_layer = make


class LoadPlan:
    """What loads `model`, whose dtype is `dtype`, from any file that has `header`, as vLLM's loader did when it was watched."""

    def __init__(
        self, model: torch.nn.Module, dtype: torch.dtype, header: bytes, module_loads: dict[torch.nn.Module, ModuleLoad]
    ):
        self._header, self._dtype = header, dtype
        self._deferred_attention = _find_deferred_attention(model)
        self._unprocessed_loads: list[tuple[torch.nn.Module, ModuleLoad]] = []
        """Parameters that vLLM leaves as they are loaded."""
        self._processed_loads: list[tuple[torch.nn.Module, ModuleLoad]] = []
        for module, filling in module_loads.items():
            filling = ModuleLoad(merge_copies(filling.copies), filling.fills)
            plain = _is_unprocessed(module) and _has_loaded_layout(module)
            (self._unprocessed_loads if plain else self._processed_loads).append((module, filling))

    @property
    def copy_count(self) -> int:
        """How many an installation makes."""
        return sum(len(filling.copies) for _, filling in (*self._unprocessed_loads, *self._processed_loads))

    def can_load(self, content: torch.Tensor) -> bool:
        """A file's bytes, uint8 `[n]`, begin with the header."""
        return content[: len(self._header)].numpy().tobytes() == self._header

    def load_file(self, content: torch.Tensor, poison: bool = False) -> None:
        """Load a file that `can_load`."""
        from vllm.model_executor.model_loader.reload import layerwise, meta, utils

        data = content[len(self._header) :]
        with torch.no_grad():
            fill_modules(self._unprocessed_loads, data, poison)
            worked = dict(self._processed_loads)
            with on_materialize(lambda module: worked[module].fill_module(module, data, poison)):
                for module in worked:
                    info = layerwise.get_layerwise_info(module)
                    info.kernel_tensors = utils.get_layer_params_buffers(module)
                    info.kernel_non_persistent_buffers = set(module._non_persistent_buffers_set)
                    meta.restore_layer_on_meta(module, info)
                    layerwise._layerwise_process(module, info)
            for module in self._deferred_attention:
                module.process_weights_after_loading(self._dtype)


def _is_unprocessed(module: torch.nn.Module) -> bool:
    """vLLM does nothing with what it has loaded into the module; experts on CPU are packed by `repack_cpu_experts`."""
    from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod
    from vllm.model_executor.layers.linear import UnquantizedLinearMethod
    from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase
    from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod

    method = getattr(module, "quant_method", None)
    if not isinstance(method, QuantizeMethodBase):
        return True
    on_cpu = all(p is None or p.device.type == "cpu" for p in module._parameters.values())
    if type(method) in (UnquantizedLinearMethod, UnquantizedEmbeddingMethod):
        return on_cpu and is_unpacked_linear(module)
    return on_cpu and isinstance(method, UnquantizedFusedMoEMethod) and needs_cpu_repack(module)


def _has_loaded_layout(module: torch.nn.Module) -> bool:
    from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

    loaded, _ = get_layerwise_info(module).restore_metadata
    held = {name: p for name, p in module._parameters.items() if p is not None}
    return loaded.keys() == held.keys() and all(
        (loaded[name].shape, loaded[name].stride(), loaded[name].dtype) == (p.shape, p.stride(), p.dtype)
        for name, p in held.items()
    )


def digest_parameters(model: torch.nn.Module) -> dict[str, int]:
    """XXH3 of what each parameter holds."""
    return {
        name: xxhash.xxh3_64_intdigest(view_as_integers(held.cpu()).numpy())
        for name, held in iter_parameter_contents(model)
    }


# Which tokens vLLM could sample: recorded by the sampler of its first model runner, as bits beside the sampled token.
#
# The second model runner records ids by itself, and it wants Triton. Log-probs after top-k, top-p and min-p are minus infinity
# where nothing can be sampled. So a row of `logprob_token_ids`, which has the sampled token first, gets a bit for each token
# of the vocabulary behind it: of one shape for all rows, without a wait for the device, and carried wherever log-probs are.


WORD_BITS = 32


def pack_bits(allowed: Tensor) -> Tensor:
    """int32 `[B, ceil(V / 32)]` of bool `[B, V]`: the lowest bit of the lowest byte first."""
    extra = -allowed.shape[1] % WORD_BITS
    lanes = torch.nn.functional.pad(allowed, (0, extra)).view(len(allowed), -1, 8).to(torch.uint8)
    shifts = torch.arange(8, dtype=torch.uint8, device=allowed.device)
    return (lanes << shifts).sum(dim=-1, dtype=torch.uint8).view(torch.int32)


class MaskRecordingSampler(Sampler):
    """Gives what vLLM's gives, and the bits."""

    _processed_logprobs: Tensor | None = None

    def sample(self, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
        sampled, self._processed_logprobs = super().sample(*args, **kwargs)
        return sampled, self._processed_logprobs

    def forward(self, *args: Any, **kwargs: Any) -> SamplerOutput:
        output = super().forward(*args, **kwargs)
        processed, self._processed_logprobs = self._processed_logprobs, None
        tensors = output.logprobs_tensors
        if processed is not None and tensors is not None:
            ids = torch.cat([tensors.logprob_token_ids, pack_bits(processed > -torch.inf)], dim=1)
            output.logprobs_tensors = tensors._replace(logprob_token_ids=ids)
        return output


def record_sampling_masks(runner: Any) -> None:
    """Give a first model runner this sampler. The second one has had its own from the start."""
    old = runner.sampler
    if isinstance(old, Sampler):
        runner.sampler = MaskRecordingSampler(old.logprobs_mode, old.use_fp64_gumbel)


# What a vLLM model holds, and which published tensors it does not hold as they were published.


NamedTensors = Iterable[tuple[str, torch.Tensor]]
_TAG_BASE = 128
"""Tags are written in digits of this base: every floating-point dtype of weights has 1 to 128 exactly, but for float8."""


def find_model_differences(
    model: torch.nn.Module, published: WeightManifest, load_tensors: Callable[[NamedTensors], None]
) -> list[TensorMismatch]:
    """Published tensors that the model does not hold, in the manifest's order. Afterwards it holds what `load_tensors` makes
    of them.

    vLLM fuses, splits and re-packs what it loads, and the names are lost by then. So what the model holds is compared with what
    a load by the book makes of the same file; and to name the elements that differ, the loader is given tags instead of
    weights: whatever it does with the tensors, it does to the tags too.

    `load_tensors` gives tensors to the model the right way. Empty if the model holds just that: then either the weights are
    well, or every load goes wrong in the same way. Needs host memory for one copy of the model.
    """
    held = {name: tensor.to("cpu", copy=True) for name, tensor in iter_parameter_contents(model)}
    load_tensors(iter_verified_tensors(published))
    wrong = {}
    for name, tensor in iter_parameter_contents(model):
        now, before = tensor.cpu(), held.pop(name)
        if before.shape != now.shape:
            wrong[name] = torch.ones(now.shape, dtype=torch.bool)
        elif (different := view_as_integers(before) != view_as_integers(now)).any():
            wrong[name] = different.reshape(now.shape)
    if not wrong:
        return []
    tags = {name: torch.zeros(different.shape, dtype=torch.int64) for name, different in wrong.items()}
    tagged = {name: torch.ones(different.shape, dtype=torch.bool) for name, different in wrong.items()}
    place = 1
    while place <= len(published.tensors):
        load_tensors(_iter_tag_tensors(published, place))
        for name, tensor in iter_parameter_contents(model):
            if name not in wrong:
                continue
            digits = tensor.cpu().to(torch.int64)
            tagged[name] &= (digits >= 1) & (digits <= _TAG_BASE)  # not padding
            tags[name] += (digits - 1) * place
        place *= _TAG_BASE
    load_tensors(iter_verified_tensors(published))
    names = list(published.tensors)
    found: dict[int, TensorMismatch] = {}
    for parameter_name, different in wrong.items():
        which, counts = tags[parameter_name][different & tagged[parameter_name]].unique(return_counts=True)
        for tag, count in zip(which.tolist(), counts.tolist(), strict=True):
            if tag < len(names):
                found[tag] = TensorMismatch(names[tag], parameter_name, count)
    return [found[tag] for tag in sorted(found)]


def iter_parameter_contents(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
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


def view_as_integers(tensor: torch.Tensor) -> torch.Tensor:
    """As integers, so that what is not a number equals itself."""
    sizes = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return tensor.contiguous().reshape(-1).view(sizes[tensor.element_size()])


def _iter_tag_tensors(published: WeightManifest, place: int) -> Iterator[tuple[str, torch.Tensor]]:
    """Tensors of the published shapes, full of one digit (plus 1) of their index."""
    for index, (name, entry) in enumerate(published.tensors.items()):
        yield name, torch.full(entry.shape, index // place % _TAG_BASE + 1, dtype=getattr(torch, entry.dtype))


# The process that sends weights from the learner's GPU to one generator's workers; see `weights.nccl`.
#
# vLLM's own trainer engine does the sending: its wire format is the one that vLLM's workers receive. It would also drive the
# workers, but here the generator does that, between pause and resume.


POLL_MILLISECONDS = 60_000

SendVersion = Callable[[Send], None]
"""Sends one version; returns when all workers have it."""


def main() -> None:
    """Arguments, after `sys.path`: where to ask for work, the link's name, the owner's process id."""
    from r3async.rollout.vllm.client import exit_with_owner

    endpoint, link, owner = sys.argv[2:]
    exit_with_owner(int(owner))
    serve_sends(endpoint, link, make_nccl_sender())


def serve_sends(endpoint: str, link: str, send_version: SendVersion, stop: Callable[[], bool] = lambda: False) -> None:
    """Send what is asked for, until `stop` or an error; a failed operation leaves no group that could be used again."""
    with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
        dealer.linger = 1000
        dealer.connect(endpoint)
        dealer.send(encode_nccl_message(Up(link)))
        while not stop():
            if dealer.poll(POLL_MILLISECONDS):
                job = decode_nccl_message(dealer.recv())
                assert isinstance(job, Send)
                send_version(job)
                dealer.send(encode_nccl_message(Sent(link, job.version)))


def order_tensor_names(widths: Mapping[str, int]) -> list[str]:
    """The order in which tensors travel: sender and workers know the names, but not in one order. `widths`: bytes of an element.

    The widest come first: vLLM packs tensors one behind the other, and none may begin where its elements cannot.
    """
    return sorted(widths, key=lambda name: (-widths[name], name))


def make_nccl_sender() -> SendVersion:
    """Over vLLM's NCCL group, on this process's first GPU. The group is made by the first `Send`, and meets all workers then.

    Raises `RuntimeError` without CUDA."""
    if not torch.cuda.is_available():
        raise RuntimeError('weights.backend="nccl" needs CUDA where the learner is')
    from vllm.distributed.weight_transfer.base import ParamMeta, WeightSource
    from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerInitInfo, NCCLTrainerWeightTransferEngine

    class MappedWeights(WeightSource):
        """A file of published weights."""

        def __init__(self) -> None:
            self.tensors: dict[str, torch.Tensor] = {}

        def metadata(self) -> list[ParamMeta]:
            return [ParamMeta(name, t.dtype, tuple(t.shape)) for name, t in self.tensors.items()]

        def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
            for name, tensor in self.tensors.items():
                yield name, tensor.to("cuda")

    source, trainers = MappedWeights(), list[NCCLTrainerWeightTransferEngine]()

    def send_version(job: Send) -> None:
        source.tensors = read_tensors(job.path)
        if not trainers:
            info = NCCLTrainerInitInfo(
                rank=0,
                master_address=job.host,
                master_port=job.port,
                world_size=job.workers + 1,
                packed_buffer_size_bytes=job.bucket_bytes,
            )
            trainers.append(
                NCCLTrainerWeightTransferEngine.trainer_init(info, client=_PassiveWorkerClient(), source=source)
            )
            check_nccl_group(trainers[0])
        trainers[0].send_weights()
        source.tensors = {}

    return send_version


def check_nccl_group(engine: Any) -> None:
    """vLLM's broadcasts do nothing at all, and raise nothing, if it could not load NCCL: `WeightError` then."""
    if getattr(engine.model_update_group, "disabled", True):
        raise WeightError('weights.backend="nccl": vLLM cannot use NCCL here (is VLLM_DISABLE_PYNCCL set?)')


def read_tensors(path: str) -> dict[str, torch.Tensor]:
    """All tensors of a file, mapped, in the order in which they travel."""
    from safetensors import safe_open

    with safe_open(path, framework="pt", device="cpu") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    return {name: tensors[name] for name in order_tensor_names({name: t.itemsize for name, t in tensors.items()})}


class _PassiveWorkerClient:
    """The workers are driven by their generator, and not by this process."""

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        pass

    def start_weight_update(self) -> None:
        pass

    def update_weights(self, update_info: Any) -> None:
        pass

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        pass
