"""Installing weights by a plan: which bytes of a published file go where in an engine's parameters.

vLLM's loader finds the place of each tensor by its name, and does so twice: a fraction of a millisecond a tensor, and an expert
has three. Files with equal headers all load alike. So the loader is watched once, and what it copied is copied again for every
later version: tensors that lie side by side, or at equal distances, at once. What vLLM does with a module that has been filled
(padding, packing, handing weights to a kernel) it does as ever.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import xxhash
from torch.utils._python_dispatch import TorchDispatchMode

from r3async.rollout.engines.vllm_contents import bits, contents
from r3async.rollout.engines.vllm_cpu import is_repacked, multiplied_as_it_is

_POISON = 87
"""What is in a parameter before it is filled for a comparison."""


@dataclass(frozen=True)
class Copy:
    """A part of the file's data into a part of `parameter`. `start` is in bytes of the data, `offset` in elements of the
    parameter. `steps`: for each dimension its size, and the strides in the file and in the parameter, in elements."""

    parameter: str
    dtype: torch.dtype
    start: int
    offset: int
    steps: tuple[tuple[int, int, int], ...]

    def source(self, data: torch.Tensor) -> torch.Tensor:
        """A view of the file's data, uint8 `[n]`."""
        width = self.dtype.itemsize
        whole = data[: data.numel() // width * width].view(self.dtype)
        return self._view(whole, 1, whole.storage_offset() + self.start // width)

    def target(self, parameter: torch.Tensor) -> torch.Tensor:
        """A view of the parameter."""
        return self._view(parameter, 2, parameter.storage_offset() + self.offset)

    def _view(self, tensor: torch.Tensor, which: int, offset: int) -> torch.Tensor:
        return tensor.as_strided([s[0] for s in self.steps], [s[which] for s in self.steps], offset)


@dataclass(frozen=True)
class Fill:
    """A part of `parameter` that the loader sets to a number: padding."""

    parameter: str
    offset: int
    size: tuple[int, ...]
    stride: tuple[int, ...]
    value: float

    def do(self, parameter: torch.Tensor) -> None:
        parameter.as_strided(self.size, self.stride, parameter.storage_offset() + self.offset).fill_(self.value)


@dataclass
class Filling:
    """What a module's parameters get."""

    copies: list[Copy] = field(default_factory=list)
    fills: list[Fill] = field(default_factory=list)

    def do(self, module: torch.nn.Module, data: torch.Tensor, poison: bool) -> None:
        """Fill the module's parameters. `poison`: set all bytes first, to see later whether each was filled."""
        fill_all([(module, self)], data, poison)


def fill_all(filled: Iterable[tuple[torch.nn.Module, Filling]], data: torch.Tensor, poison: bool) -> None:
    """`Filling.do` of several modules, with one call for all copies."""
    targets, sources = [], []
    for module, filling in filled:
        held = module._parameters
        if poison:
            for parameter in held.values():
                if parameter is not None and parameter.numel():
                    parameter.data.fill_(_POISON)
        for fill in filling.fills:
            fill.do(held[fill.parameter].data)
        targets += [copy.target(held[copy.parameter].data) for copy in filling.copies]
        sources += [copy.source(data) for copy in filling.copies]
    if targets:
        torch._foreach_copy_(targets, sources)


def merged(copies: Iterable[Copy]) -> list[Copy]:
    """The same copies, as few as they can be made of."""
    found = sorted(map(_collapsed, copies), key=lambda c: (c.parameter, c.start))
    before = len(found) + 1
    while len(found) < before:
        before = len(found)
        found = list(_progressions(list(_runs(found))))
    return found


def _collapsed(copy: Copy) -> Copy:
    """Without dimensions that go on where the next one ends."""
    steps: list[tuple[int, int, int]] = []
    for size, near, far in reversed(copy.steps):
        if size == 1:
            continue
        if steps and (near, far) == (steps[-1][0] * steps[-1][1], steps[-1][0] * steps[-1][2]):
            steps[-1] = (size * steps[-1][0], *steps[-1][1:])
        else:
            steps.append((size, near, far))
    return replace(copy, steps=tuple(reversed(steps)) or ((1, 1, 1),))


def _runs(copies: list[Copy]) -> Iterator[Copy]:
    """Those that lie one behind the other, in file and parameter, joined."""
    open_: Copy | None = None
    for copy in copies:
        if open_ is not None:
            ((size, *dense),) = open_.steps if len(open_.steps) == 1 else ((0, 0, 0),)
            if (
                dense == [1, 1]
                and len(copy.steps) == 1
                and copy.steps[0][1:] == (1, 1)
                and (copy.parameter, copy.dtype) == (open_.parameter, open_.dtype)
                and (copy.start, copy.offset) == (open_.start + size * copy.dtype.itemsize, open_.offset + size)
            ):
                open_ = replace(open_, steps=((size + copy.steps[0][0], 1, 1),))
                continue
            yield open_
        open_ = copy
    if open_ is not None:
        yield open_


def _progressions(copies: list[Copy]) -> Iterator[Copy]:
    """Those of one shape at equal distances joined."""
    at = 0
    while at < len(copies):
        first, stop = copies[at], at + 1
        gap = _gap(first, copies[stop]) if stop < len(copies) else None
        while gap is not None and stop < len(copies) and _gap(copies[stop - 1], copies[stop]) == gap:
            stop += 1
        if gap is None:
            yield first
        else:
            yield _collapsed(replace(first, steps=((stop - at, *gap), *first.steps)))
        at = stop


def _gap(one: Copy, other: Copy) -> tuple[int, int] | None:
    """How far the second is from the first, in elements of the file and of the parameter, if it could be the next step."""
    if (one.parameter, one.dtype, one.steps) != (other.parameter, other.dtype, other.steps):
        return None
    near, rest = divmod(other.start - one.start, one.dtype.itemsize)
    far = other.offset - one.offset
    return (near, far) if not rest and far > 0 else None


class Watch(TorchDispatchMode):
    """Sees, while it is entered, what a load copies out of `data` (a file's, uint8 `[n]`) into the modules that vLLM fills."""

    def __init__(self, data: torch.Tensor):
        super().__init__()
        self._storage, self._begin = data.untyped_storage().data_ptr(), data.storage_offset()
        self._filling, self._parameters = Filling(), dict[int, tuple[str, torch.Tensor]]()
        self.found: dict[torch.nn.Module, Filling] = {}
        """In the order in which vLLM filled them."""

    def repeatable(self, model: torch.nn.Module) -> bool:
        """Something of `model` was filled, and nothing that vLLM fills in another way."""
        return bool(self.found) and self.found.keys().isdisjoint(_attention(model))

    def __enter__(self) -> Watch:
        self._hook = contextlib.ExitStack()
        self._hook.enter_context(materialized(self._made))
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._hook.close()

    def _made(self, module: torch.nn.Module) -> None:
        self._filling = self.found[module] = Filling()
        held = {name: p for name, p in module._parameters.items() if p is not None and p.numel()}
        self._parameters = {p.untyped_storage().data_ptr(): (name, p.data) for name, p in held.items()}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _WRITES and (known := self._parameters.get(args[0].untyped_storage().data_ptr())):
            name, parameter = known
            to, value = args[0], args[1] if len(args) > 1 else 0
            offset = to.storage_offset() - parameter.storage_offset()
            if not isinstance(value, torch.Tensor):
                self._filling.fills.append(Fill(name, offset, tuple(to.shape), to.stride(), value))
            elif value.untyped_storage().data_ptr() == self._storage and value.shape == to.shape and to.numel():
                start = value.storage_offset() * value.itemsize - self._begin
                steps = tuple(zip(to.shape, value.stride(), to.stride(), strict=True))
                self._filling.copies.append(Copy(name, value.dtype, start, offset, steps))
        return func(*args, **(kwargs or {}))


_WRITES = {torch.ops.aten.copy_.default, torch.ops.aten.fill_.Scalar, torch.ops.aten.zero_.default}


def _attention(model: torch.nn.Module) -> list[torch.nn.Module]:
    """Modules that vLLM finishes after all others; scales are all that they load."""
    from vllm.model_executor.layers.attention import is_deferred_attention_layer

    return [module for module in model.modules() if is_deferred_attention_layer(module)]


@contextlib.contextmanager
def materialized(then: Callable[[torch.nn.Module], None]) -> Iterator[None]:
    """Inside, `then` is called with each module that vLLM has made room in, and is about to fill."""
    from vllm.model_executor.model_loader.reload import layerwise

    make = layerwise.materialize_layer

    def made(layer: torch.nn.Module, info: Any) -> None:
        make(layer, info)
        then(layer)

    layerwise.materialize_layer = made
    try:
        yield
    finally:
        layerwise.materialize_layer = make


class Plan:
    """What loads `model`, whose dtype is `dtype`, from any file that has `header`, as vLLM's loader did when it was watched."""

    def __init__(
        self, model: torch.nn.Module, dtype: torch.dtype, header: bytes, found: dict[torch.nn.Module, Filling]
    ):
        self._header, self._dtype = header, dtype
        self._attention = _attention(model)
        self._plain: list[tuple[torch.nn.Module, Filling]] = []
        """Parameters that vLLM leaves as they are loaded."""
        self._worked: list[tuple[torch.nn.Module, Filling]] = []
        for module, filling in found.items():
            filling = Filling(merged(filling.copies), filling.fills)
            plain = _left_as_loaded(module) and _laid_out_as_loaded(module)
            (self._plain if plain else self._worked).append((module, filling))

    @property
    def copies(self) -> int:
        """How many an installation makes."""
        return sum(len(filling.copies) for _, filling in (*self._plain, *self._worked))

    def fits(self, content: torch.Tensor) -> bool:
        """A file's bytes, uint8 `[n]`, begin with the header."""
        return content[: len(self._header)].numpy().tobytes() == self._header

    def install(self, content: torch.Tensor, poison: bool = False) -> None:
        """Load a file that `fits`."""
        from vllm.model_executor.model_loader.reload import layerwise, meta, utils

        data = content[len(self._header) :]
        with torch.no_grad():
            fill_all(self._plain, data, poison)
            worked = dict(self._worked)
            with materialized(lambda module: worked[module].do(module, data, poison)):
                for module in worked:
                    info = layerwise.get_layerwise_info(module)
                    info.kernel_tensors = utils.get_layer_params_buffers(module)
                    info.kernel_non_persistent_buffers = set(module._non_persistent_buffers_set)
                    meta.restore_layer_on_meta(module, info)
                    layerwise._layerwise_process(module, info)
            for module in self._attention:
                module.process_weights_after_loading(self._dtype)


def _left_as_loaded(module: torch.nn.Module) -> bool:
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
        return on_cpu and multiplied_as_it_is(module)
    return on_cpu and isinstance(method, UnquantizedFusedMoEMethod) and is_repacked(module)


def _laid_out_as_loaded(module: torch.nn.Module) -> bool:
    from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

    loaded, _ = get_layerwise_info(module).restore_metadata
    held = {name: p for name, p in module._parameters.items() if p is not None}
    return loaded.keys() == held.keys() and all(
        (loaded[name].shape, loaded[name].stride(), loaded[name].dtype) == (p.shape, p.stride(), p.dtype)
        for name, p in held.items()
    )


def digests(model: torch.nn.Module) -> dict[str, int]:
    """XXH3 of what each parameter holds."""
    return {name: xxhash.xxh3_64_intdigest(bits(held.cpu()).numpy()) for name, held in contents(model)}
