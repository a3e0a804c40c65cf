"""Installing weights by a plan: the bytes of a published file that go to each of an
engine's parameters.

vLLM's loader looks up the place of each tensor by its name, and does so twice: a fraction of a
millisecond per tensor, and an expert has three. Files with equal headers all load in the same way.
So the loader is recorded once, and its copies are repeated for every later version; tensors that
lie side by side, or at equal distances, are copied at once. vLLM processes a module that has been
filled (padding, packing, handing weights to a kernel) as usual.
"""

from __future__ import annotations

import collections
import contextlib
import itertools
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode

_POISON_BYTE = 87
"""Byte with which a parameter is overwritten before it is filled for a comparison."""
_UPLOAD_BYTES = 64 * 2**20
"""Size of each of the two pinned buffers of an upload."""
_UPLOAD_THREADS = 4
_ALIGNMENT = 16
"""Bytes; a multiple of every dtype's size."""

CopyTensors = Callable[[list[torch.Tensor], list[torch.Tensor]], object]
"""Copies each source, in host memory, to its target: `copy_tensors(targets, sources)`."""


@dataclass(frozen=True)
class TensorCopy:
    """A copy of a part of the file's data to a part of a parameter.

    Attributes:
        parameter: Name of the parameter.
        dtype: Dtype of the elements in the file.
        byte_offset: Offset in the data, in bytes.
        element_offset: Offset in the parameter, in elements.
        dimensions: Size of each dimension, and its strides in the file and in the
            parameter, in elements.
    """

    parameter: str
    dtype: torch.dtype
    byte_offset: int
    element_offset: int
    dimensions: tuple[tuple[int, int, int], ...]

    def view_source(self, data: torch.Tensor) -> torch.Tensor:
        """Return the view of the file's data, uint8 `[n]`, that is copied."""
        width = self.dtype.itemsize
        whole = data[: data.numel() // width * width].view(self.dtype)
        return self._view_strided(whole, 1, whole.storage_offset() + self.byte_offset // width)

    def view_target(self, parameter: torch.Tensor) -> torch.Tensor:
        """Return the view of the parameter that is written."""
        return self._view_strided(parameter, 2, parameter.storage_offset() + self.element_offset)

    def _view_strided(self, tensor: torch.Tensor, stride_index: int, offset: int) -> torch.Tensor:
        return tensor.as_strided(
            [s[0] for s in self.dimensions], [s[stride_index] for s in self.dimensions], offset
        )


@dataclass(frozen=True)
class TensorFill:
    """A part of `parameter` that the loader sets to a number, such as padding."""

    parameter: str
    offset: int
    size: tuple[int, ...]
    stride: tuple[int, ...]
    value: float

    def fill_parameter(self, parameter: torch.Tensor) -> None:
        parameter.as_strided(
            self.size, self.stride, parameter.storage_offset() + self.offset
        ).fill_(self.value)


@dataclass
class ModuleLoad:
    """The copies and fills that load a module's parameters."""

    copies: list[TensorCopy] = field(default_factory=list)
    fills: list[TensorFill] = field(default_factory=list)

    def fill_module(
        self,
        module: torch.nn.Module,
        data: torch.Tensor,
        poison: bool,
        copy_tensors: CopyTensors,
    ) -> None:
        """Fill the module's parameters. `poison` overwrites all bytes first, to show later whether
        each was filled."""
        fill_modules([(module, self)], data, poison, copy_tensors)


def fill_modules(
    module_loads: Iterable[tuple[torch.nn.Module, ModuleLoad]],
    data: torch.Tensor,
    poison: bool,
    copy_tensors: CopyTensors,
) -> None:
    """Fill several modules as `ModuleLoad.fill_module` does, with one call of
    `copy_tensors` for all copies."""
    targets = []
    sources = []
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
        copy_tensors(targets, sources)


@contextlib.contextmanager
def open_copier(device: torch.device) -> Iterator[CopyTensors]:
    """Open what copies a file's tensors to parameters on `device`: a `PinnedUploader`
    if that is a GPU."""
    if device.type != "cuda":
        yield torch._foreach_copy_
        return
    buffers = [
        PinnedBuffer(
            torch.empty(_UPLOAD_BYTES, dtype=torch.uint8, pin_memory=True), torch.cuda.Event()
        )
        for _ in range(2)
    ]
    with ThreadPoolExecutor(_UPLOAD_THREADS) as pool:
        yield PinnedUploader(pool, buffers, _UPLOAD_BYTES // _UPLOAD_THREADS).copy_tensors


class PinnedBuffer(NamedTuple):
    """Pinned memory of the host, uint8 `[n]`, and the event that its last upload has ended."""

    memory: torch.Tensor
    uploaded: torch.cuda.Event


class PinnedUploader:
    """An upload of tensors in pageable host memory, such as a mapped file, to tensors on a GPU.

    A plain copy makes the host wait, is as fast as one core, and packs what is strided in memory of
    its whole size. Here the threads of `pool` pack pieces, of at most `piece_bytes`, into one of
    `buffers` while the others are uploaded. So a strided target needs no more than `piece_bytes` of
    the GPU's memory besides its own.
    """

    def __init__(self, pool: Executor, buffers: Iterable[PinnedBuffer], piece_bytes: int):
        self._pool = pool
        self._buffers = itertools.cycle(buffers)
        self._piece_bytes = piece_bytes

    def copy_tensors(self, targets: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
        """Copy each source to its target, in the order of the current stream. The sources may
        change afterwards."""
        pairs = zip(targets, sources, strict=True)
        pieces = collections.deque(
            piece for pair in pairs for piece in split_copy(*pair, self._piece_bytes)
        )
        while pieces:
            memory, uploaded = next(self._buffers)
            uploaded.synchronize()  # the host may not write what is still read
            packing = []
            offset = 0
            while pieces and offset + pieces[0][0].nbytes <= len(memory):
                target, source = pieces.popleft()
                packed = (
                    memory[offset : offset + target.nbytes].view(target.dtype).view(target.shape)
                )
                packing.append((target, packed, self._pool.submit(packed.copy_, source)))
                offset += -(-target.nbytes // _ALIGNMENT) * _ALIGNMENT
            for target, packed, done in packing:
                done.result()
                target.copy_(packed, non_blocking=True)
            uploaded.record()


def split_copy(
    target: torch.Tensor, source: torch.Tensor, piece_bytes: int
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Divide a copy of `source`, of any strides, to `target`, of the same shape, into copies of at
    most `piece_bytes`."""
    if target.nbytes <= piece_bytes:
        yield target, source
        return
    rows = piece_bytes * len(target) // target.nbytes
    if rows:
        yield from zip(target.split(rows), source.split(rows), strict=True)
        return
    for target_row, source_row in zip(target, source, strict=True):
        yield from split_copy(target_row, source_row, piece_bytes)


def merge_copies(copies: Iterable[TensorCopy]) -> list[TensorCopy]:
    """Merge copies into as few as possible with the same effect."""
    found = sorted(map(_collapse_dimensions, copies), key=lambda c: (c.parameter, c.byte_offset))
    before = len(found) + 1
    while len(found) < before:
        before = len(found)
        found = list(_join_equidistant(list(_join_adjacent(found))))
    return found


def _collapse_dimensions(copy: TensorCopy) -> TensorCopy:
    """Return the copy with contiguous dimensions merged and dimensions of size 1 removed."""
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
    """Yield the copies, joining those that follow each other without a gap in both
    file and parameter."""
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
    """Yield the copies, joining those of one shape at equal distances."""
    at = 0
    while at < len(copies):
        first = copies[at]
        stop = at + 1
        gap = _measure_gap(first, copies[stop]) if stop < len(copies) else None
        while (
            gap is not None
            and stop < len(copies)
            and _measure_gap(copies[stop - 1], copies[stop]) == gap
        ):
            stop += 1
        if gap is None:
            yield first
        else:
            yield _collapse_dimensions(
                replace(first, dimensions=((stop - at, *gap), *first.dimensions))
            )
        at = stop


def _measure_gap(one: TensorCopy, other: TensorCopy) -> tuple[int, int] | None:
    """Return the distance of two copies, in elements of the file and of the parameter.

    Returns None if `other` cannot be the next copy of a series at equal distances.
    """
    if (one.parameter, one.dtype, one.dimensions) != (
        other.parameter,
        other.dtype,
        other.dimensions,
    ):
        return None
    near, rest = divmod(other.byte_offset - one.byte_offset, one.dtype.itemsize)
    far = other.element_offset - one.element_offset
    return (near, far) if not rest and far > 0 else None


class LoadRecorder(TorchDispatchMode):
    """A recorder of a load, which is active while entered.

    It records what the load copies from a file's `data` (uint8 `[n]`) to the modules
    that vLLM fills.
    """

    def __init__(self, data: torch.Tensor):
        super().__init__()
        self._storage = data.untyped_storage().data_ptr()
        self._data_offset = data.storage_offset()
        self._module_load = ModuleLoad()
        self._parameters_by_storage = dict[int, tuple[str, torch.Tensor]]()
        self.module_loads: dict[torch.nn.Module, ModuleLoad] = {}
        """Recorded load of each module, in the order in which vLLM filled them."""

    def is_repeatable(self, model: torch.nn.Module) -> bool:
        """Return True if every module of `model` with weights of its own was filled, and none that
        vLLM fills in another way."""
        from r3async.rollout.vllm.cpu_patches import find_tied_modules

        deferred = set(_find_deferred_attention(model))
        owners = {
            module
            for module in model.modules()
            if any(True for _ in module.parameters(recurse=False))
        }
        return (
            self.module_loads.keys().isdisjoint(deferred)
            and owners - deferred - set(find_tied_modules(model)) <= self.module_loads.keys()
        )

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
        self._parameters_by_storage = {
            p.untyped_storage().data_ptr(): (name, p.data) for name, p in held.items()
        }

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _WRITE_OPS:
            known = self._parameters_by_storage.get(args[0].untyped_storage().data_ptr())
            if known:
                name, parameter = known
                to = args[0]
                value = args[1] if len(args) > 1 else 0
                offset = to.storage_offset() - parameter.storage_offset()
                if not isinstance(value, torch.Tensor):
                    self._module_load.fills.append(
                        TensorFill(name, offset, tuple(to.shape), to.stride(), value)
                    )
                elif (
                    value.untyped_storage().data_ptr() == self._storage
                    and value.shape == to.shape
                    and to.numel()
                ):
                    start = value.storage_offset() * value.itemsize - self._data_offset
                    steps = tuple(zip(to.shape, value.stride(), to.stride(), strict=True))
                    self._module_load.copies.append(
                        TensorCopy(name, value.dtype, start, offset, steps)
                    )
        return func(*args, **(kwargs or {}))


_WRITE_OPS = {
    torch.ops.aten.copy_.default,
    torch.ops.aten.fill_.Scalar,
    torch.ops.aten.zero_.default,
}


def _find_deferred_attention(model: torch.nn.Module) -> list[torch.nn.Module]:
    """Return the attention modules that vLLM finishes after all others; they load
    nothing but scales."""
    from vllm.model_executor.layers.attention import is_deferred_attention_layer

    return [module for module in model.modules() if is_deferred_attention_layer(module)]


@contextlib.contextmanager
def on_materialize(callback: Callable[[torch.nn.Module], None]) -> Iterator[None]:
    """Call `callback`, inside the block, with each module that vLLM has allocated and
    is about to fill."""
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
    """A plan that loads any file with `header` by repeating a recorded load. `dtype` is the
    dtype of `model`."""

    def __init__(
        self,
        model: torch.nn.Module,
        dtype: torch.dtype,
        header: bytes,
        module_loads: dict[torch.nn.Module, ModuleLoad],
    ):
        self._header = header
        self._dtype = dtype
        self._device = next(model.parameters()).device
        self._deferred_attention = _find_deferred_attention(model)
        self._unprocessed_loads: list[tuple[torch.nn.Module, ModuleLoad]] = []
        """Loads of the modules that vLLM does not process after loading."""
        self._processed_loads: list[tuple[torch.nn.Module, ModuleLoad]] = []
        for module, filling in module_loads.items():
            filling = ModuleLoad(merge_copies(filling.copies), filling.fills)
            plain = _is_unprocessed(module) and _has_loaded_layout(module)
            (self._unprocessed_loads if plain else self._processed_loads).append((module, filling))

    @property
    def copy_count(self) -> int:
        """The number of copies per installation."""
        return sum(
            len(filling.copies) for _, filling in (*self._unprocessed_loads, *self._processed_loads)
        )

    def can_load(self, content: torch.Tensor) -> bool:
        """Return True if a file's bytes, uint8 `[n]`, begin with the header."""
        return content[: len(self._header)].numpy().tobytes() == self._header

    def load_file(self, content: torch.Tensor, poison: bool = False) -> None:
        """Load a file for which `can_load` is True. `poison` is as in `ModuleLoad.fill_module`."""
        from vllm.model_executor.model_loader.reload import layerwise, meta, utils

        data = content[len(self._header) :]
        with torch.no_grad(), open_copier(self._device) as copy_tensors:
            fill_modules(self._unprocessed_loads, data, poison, copy_tensors)
            worked = dict(self._processed_loads)
            with on_materialize(
                lambda module: worked[module].fill_module(module, data, poison, copy_tensors)
            ):
                for module in worked:
                    info = layerwise.get_layerwise_info(module)
                    info.kernel_tensors = utils.get_layer_params_buffers(module)
                    info.kernel_non_persistent_buffers = set(module._non_persistent_buffers_set)
                    meta.restore_layer_on_meta(module, info)
                    layerwise._layerwise_process(module, info)
            for module in self._deferred_attention:
                module.process_weights_after_loading(self._dtype)


def _is_unprocessed(module: torch.nn.Module) -> bool:
    """Return True if vLLM does not process the module after loading. `repack_cpu_experts`
    packs experts on CPU."""
    from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import (
        UnquantizedFusedMoEMethod,
    )
    from vllm.model_executor.layers.linear import UnquantizedLinearMethod
    from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase
    from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod

    from r3async.rollout.vllm.cpu_patches import is_unpacked_linear, needs_cpu_repack

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
        (loaded[name].shape, loaded[name].stride(), loaded[name].dtype)
        == (p.shape, p.stride(), p.dtype)
        for name, p in held.items()
    )
