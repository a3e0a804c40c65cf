"""A CUDA device on a machine without one: tensors say `cuda:0` and hold real
numbers, in host memory.

Operations on them are computed by torch's CPU kernels, so a learner on this device can be
compared with one on the CPU, bit by bit. An operation that mixes devices raises where CUDA would,
and what a CUDA device would have to do is counted: launches, waits of the host, copies,
collectives. `nccl` is gloo.

What it cannot know: the limits of kernels, memory, NCCL itself, and speed. Streams are not
concurrent, so a race between them is not seen either.
"""

from __future__ import annotations

import collections
import contextlib
import importlib
import itertools
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map

from dev.gpu.library import load_library

DEVICE = torch.device("cuda", 0)
CPU = torch.device("cpu")
COMPUTE_CAPABILITY = (9, 0)
MEMORY_BYTES = 80 * 2**30

counts: collections.Counter[str] = collections.Counter()
"""What the device had to do since `counts.clear()`:

* `launches`: operators that launch at least one kernel; some launch several.
* `bytes`: bytes of device memory that those operators read and write, each tensor once; of a table
  from which rows are taken, what is taken. Attention over padded samples is left out.
* `allocations`: tensors that operators made.
* `waits`: times that the host waited for the device.
* `uploads`, `downloads`: copies from the host, and to it.
* `collectives`: collective operations on its tensors.
* `groups`: process groups that would be NCCL's.
"""
wait_sites: collections.Counter[str] = collections.Counter()
"""Where the host waited, as file:line of the innermost frame outside of torch and of this file."""


def _count_wait() -> None:
    counts["waits"] += 1
    for frame in reversed(traceback.extract_stack(limit=60)):
        if "/torch/" not in frame.filename and frame.filename != __file__:
            wait_sites[f"{frame.filename.rpartition('site-packages/')[2]}:{frame.lineno}"] += 1
            return


class EmulatedTensor(Tensor):
    """A tensor of the emulated device, whose values are those of the CPU tensor `inner`."""

    inner: Tensor

    @staticmethod
    def __new__(cls, inner: Tensor) -> EmulatedTensor:
        made: EmulatedTensor = torch.Tensor._make_wrapper_subclass(
            cls,
            inner.shape,
            strides=inner.stride(),
            storage_offset=inner.storage_offset(),
            dtype=inner.dtype,
            layout=inner.layout,
            device=DEVICE,
        )
        made.inner = inner
        return made

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        return run_operation(func, args, kwargs or {})

    def __repr__(self, **_: Any) -> str:
        return f"EmulatedTensor({self.inner!r})"

    def untyped_storage(self) -> torch.UntypedStorage:
        return self.inner.untyped_storage()

    def data_ptr(self) -> int:
        return self.inner.data_ptr()

    def record_stream(self, stream: Any) -> None:
        """Do nothing: all work is done when a call returns."""

    def tolist(self) -> Any:
        counts["downloads"] += 1
        _count_wait()
        return self.inner.tolist()

    def numpy(self, **_: Any) -> Any:
        raise TypeError(
            "can't convert cuda:0 device type tensor to numpy. Use Tensor.cpu() to copy it to "
            "host memory first"
        )

    __array__ = numpy

    @property
    def is_cuda(self) -> bool:
        return True


def _unwrap(value: Any) -> Any:
    return value.inner if isinstance(value, EmulatedTensor) else value


def _wrap(value: Any) -> Any:
    return (
        EmulatedTensor(value)
        if isinstance(value, Tensor) and not isinstance(value, EmulatedTensor)
        else value
    )


_TENSOR_DATA = torch.Tensor.data


def _get_data(tensor: Tensor) -> Tensor:
    return (
        EmulatedTensor(tensor.inner)
        if isinstance(tensor, EmulatedTensor)
        else _TENSOR_DATA.__get__(tensor)
    )


def _set_data(tensor: Tensor, new: Tensor) -> None:
    """Set a tensor's data, as modules do that move to the device: a tensor of the CPU then becomes
    one of the device."""
    if not isinstance(new, EmulatedTensor):
        if isinstance(tensor, EmulatedTensor):
            raise RuntimeError("the data of a cuda tensor was set to that of a cpu tensor")
        _TENSOR_DATA.__set__(tensor, new)
    elif isinstance(tensor, EmulatedTensor):
        tensor.inner = new.inner
        _TENSOR_DATA.__set__(tensor, new)
    else:
        made: Tensor = EmulatedTensor(new.inner)
        if isinstance(tensor, torch.nn.Parameter):
            made = torch.nn.Parameter(made, requires_grad=tensor.requires_grad)
        torch.utils.swap_tensors(tensor, made)


# Operations: what happens where, by the rules of CUDA.


aten = torch.ops.aten
WITHOUT_KERNEL = (
    "aten._local_scalar_dense",
    "aten._reshape_alias",
    "aten._unsafe_view",
    "aten.empty",
    "aten.is_",
    "aten.lift_fresh",
    "aten.new_empty",
    "aten.record_stream",
    "aten.resize_",
    "aten.set_",
    "aten.sym_",
    "prim.",
)
"""Beginnings of operators that launch nothing. Views, which do not either, are told
from their schema."""
WAITING = (
    "aten._local_scalar_dense",
    "aten._unique",
    "aten.bincount",
    "aten.equal.default",
    "aten.is_nonzero",
    "aten.masked_select",
    "aten.nonzero.default",
    "aten.repeat_interleave.Tensor",
    "aten.unique",
)
"""Beginnings of operators whose result, or its size, the host has to know."""
INDEXING = ("aten.index.Tensor", "aten.index_put", "aten._index_put")
TAKING_ROWS = ("aten.embedding.", "aten.gather.", "aten.index.Tensor", "aten.index_select.")
"""Beginnings of operators that read few rows of a table."""
NO_HOST_SCALAR = (
    "_foreach_copy",
    "_fused_adam",
    "cat",
    "embedding",
    "gather",
    "index_select",
    "mm",
    "scatter",
    "stack",
)
"""Parts of names of operators that take no scalar of the CPU among tensors of the device."""


def run_operation(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Run an operator on tensors of either device, and count what CUDA would do.

    Raises `RuntimeError` where CUDA would for tensors of two devices.
    """
    name = str(func)
    given = [x for x in tree_flatten((args, kwargs))[0] if isinstance(x, Tensor)]
    on_device = [t for t in given if isinstance(t, EmulatedTensor)]
    on_host = [t for t in given if not isinstance(t, EmulatedTensor)]
    target = torch.device(kwargs["device"]).type if kwargs.get("device") is not None else ""
    if func is aten.is_pinned.default:
        return _is_pinned(args[0])
    if func is aten._pin_memory.default:
        return _mark_pinned(args[0].clone())
    if kwargs.get("pin_memory"):
        return _mark_pinned(func(*args, **{**kwargs, "pin_memory": False}))
    if func is aten._to_copy.default and target and bool(on_device) != (target == "cuda"):
        return _copy_between(args[0], kwargs)
    if func is aten.copy_.default and on_device and on_host:
        _count_copy(
            args[0], args[1], (len(args) > 2 and args[2]) or kwargs.get("non_blocking", False)
        )
        _unwrap(args[0]).copy_(_unwrap(args[1]))
        return args[0]
    # Without a kernel for both: one by one.
    if func is aten._foreach_copy_.default and on_device and on_host:
        for target_tensor, source in zip(args[0], args[1], strict=True):
            target_tensor.copy_(source, *args[2:], **kwargs)
        return None
    if not on_device and target != "cuda":
        return func(*args, **kwargs)
    if name.startswith("c10d."):
        return _run_collective(func, name, args, kwargs, mixed=bool(on_host))
    if on_device:  # a tensor that is made for the device may be made like one of any other
        _check_devices(func, name, args, given, on_host)
    if _waits_for_result(name, args, kwargs):
        _count_wait()
    launches = not name.startswith(WITHOUT_KERNEL) and not _is_view(func)
    if launches:
        counts["launches"] += KERNELS.get(name, 1)
    kwargs = {k: CPU if k == "device" else _unwrap_tree(v) for k, v in kwargs.items()}
    out = ONLY_ON_CUDA.get(name, func)(*_unwrap_tree(args), **kwargs)
    # An operation in place, or with `out`, returns what it was given.
    known = {id(t.inner): t for t in on_device}
    made = [x for x in tree_flatten(out)[0] if isinstance(x, Tensor) and id(x) not in known]
    if launches:
        counts["bytes"] += _count_bytes(func, name, args, kwargs, made)
    if not _is_view(func):
        counts["allocations"] += len(made)
    return tree_map(lambda x: known.get(id(x), _wrap(x)) if isinstance(x, Tensor) else x, out)


def _count_bytes(
    func: Any, name: str, args: Sequence[Any], kwargs: Mapping[str, Any], made: Sequence[Tensor]
) -> int:
    """Return the bytes of device memory that an operator reads and writes."""
    named = dict(zip((a.name for a in func._schema.arguments), args, strict=False)) | dict(kwargs)
    written = {a.name for a in func._schema.arguments if a.alias_info and a.alias_info.is_write}
    changed = _list_tensors([named[each] for each in written if each in named])
    read = _list_tensors([*named.values()])
    if name.startswith(TAKING_ROWS):
        read = [t for t in read if not t.is_floating_point()]
        changed = [*changed, *made]  # as much is read of the table
    return sum(map(_count_tensor_bytes, [*read, *changed, *made]))


def _list_tensors(tree: Any) -> list[Tensor]:
    found = (_unwrap(x) for x in tree_flatten(tree)[0] if isinstance(x, Tensor))
    return [*{id(t): t for t in found}.values()]


def _count_tensor_bytes(tensor: Tensor) -> int:
    """Return the bytes of a tensor; of one that repeats values, those that there are."""
    return min(tensor.nbytes, tensor.untyped_storage().nbytes())


def _unwrap_tree(tree: Any) -> Any:
    return tree_map(_unwrap, tree)


def _copy_between(source: Tensor, kwargs: Mapping[str, Any]) -> Tensor:
    """Copy a tensor to the other device, never sharing its memory."""
    uploaded = not isinstance(source, EmulatedTensor)
    out = aten._to_copy.default(_unwrap(source), **{**kwargs, "device": CPU})
    if out.data_ptr() == source.data_ptr():
        out = out.clone()
    _count_copy(EmulatedTensor(out) if uploaded else out, source, kwargs.get("non_blocking", False))
    return _wrap(out) if uploaded else out


def _count_copy(target: Tensor, source: Tensor, non_blocking: bool) -> None:
    """Count a copy between devices. The host waits for it, unless it asked not to and its
    memory is pinned."""
    uploaded = isinstance(target, EmulatedTensor)
    counts["uploads" if uploaded else "downloads"] += 1
    if not (non_blocking and _is_pinned(source if uploaded else target)):
        _count_wait()


def _is_pinned(tensor: Tensor) -> bool:
    return not isinstance(tensor, EmulatedTensor) and getattr(
        tensor.untyped_storage(), "emulated_pin", False
    )


def _mark_pinned(tensor: Tensor) -> Tensor:
    tensor.untyped_storage().emulated_pin = True
    return tensor


def _run_collective(
    func: Any, name: str, args: Sequence[Any], kwargs: Mapping[str, Any], *, mixed: bool
) -> Any:
    if mixed:
        raise RuntimeError(f"the tensors of {name} are not on one device")
    counts["collectives"] += 1
    out = func(*_unwrap_tree(args), **_unwrap_tree(dict(kwargs)))
    # (tensors, work): the tensors are those that were given to be written.
    if (
        isinstance(out, tuple)
        and len(out) == 2
        and any(isinstance(x, Tensor) for x in tree_flatten(out[0])[0])
    ):
        return args[0], out[1]
    return out


def _check_devices(
    func: Any, name: str, args: Sequence[Any], given: Sequence[Tensor], on_host: Sequence[Tensor]
) -> None:
    """Raise where CUDA would. It takes scalars of the CPU in most operators, and indices of the
    CPU in `x[index]`."""
    arrays = [t for t in on_host if t.dim()]
    if arrays and not name.startswith(INDEXING):
        raise RuntimeError(
            "Expected all tensors to be on the same device, but found at least two devices, cuda:0 "
            f"and cpu! ({name}, {[f'{t.device.type} {tuple(t.shape)}' for t in given]})"
        )
    if len(arrays) < len(on_host) and any(part in name for part in NO_HOST_SCALAR):
        raise RuntimeError(f"{name} takes no scalar of the CPU")
    if arrays:  # the index is uploaded
        counts["uploads"] += 1
        _count_wait()


def _waits_for_result(name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Return True if the host has to know a number that the operator computes, or with
    which it computes."""
    if name.startswith(WAITING):
        return kwargs.get("output_size") is None
    if not name.startswith(INDEXING) or not any(
        isinstance(i, Tensor) and i.dtype in (torch.bool, torch.uint8) for i in args[1]
    ):
        return False
    # `x[mask] = 0` fills where the mask is set; any other use of a mask needs the number
    # of its elements.
    fills = len(args) > 2 and not isinstance(args[2], EmulatedTensor) and not any(args[3:])
    return not fills or args[2].numel() != 1


def _is_view(func: Any) -> bool:
    returned = func._schema.returns
    return bool(returned) and all(
        r.alias_info is not None and not r.alias_info.is_write for r in returned
    )


# Operators that exist on CUDA alone, in torch's other operations.


def _rms_norm(
    x: Tensor, shape: Any, weight: Tensor | None, eps: float | None
) -> tuple[Tensor, Tensor]:
    wide = x.float()
    scale = (
        wide.square()
        .mean(-1, keepdim=True)
        .add_(torch.finfo(x.dtype).eps if eps is None else eps)
        .rsqrt_()
    )
    out = wide * scale
    return (out if weight is None else out * weight.float()).to(x.dtype), scale


def _rms_norm_backward(
    grad: Tensor, x: Tensor, shape: Any, scale: Tensor, weight: Tensor | None, mask: Any
) -> tuple[Tensor, Tensor | None]:
    normed = x.float() * scale
    by_out = grad.float()
    by_normed = by_out if weight is None else by_out * weight.float()
    by_x = (by_normed - normed * (by_normed * normed).mean(-1, keepdim=True)) * scale
    by_weight = None if weight is None else (by_out * normed).flatten(0, -2).sum(0).to(weight.dtype)
    return by_x.to(x.dtype), by_weight


def _histc(x: Tensor, bins: int = 100, min: float = 0, max: float = 0) -> Tensor:
    return torch.histc(x.float(), bins=bins, min=min, max=max).to(x.dtype)


class _PackedSample(NamedTuple):
    """One of the samples that a call attends to: its rows among queries and among keys, and what
    `_CPU_FLASH` takes."""

    query_rows: slice
    key_rows: slice
    heads: list[Tensor]
    options: dict[str, Any]


def _iter_packed_samples(
    tensors: Sequence[Tensor],
    edges: Sequence[Tensor],
    longest: Sequence[int],
    scale: float | None,
    window: Any,
) -> Iterator[_PackedSample]:
    """Yield the samples of queries, keys and values `[N, heads, D]` of the CPU, as
    `[1, heads, n, D]`."""
    left, right = window or (-1, -1)
    assert right == 0, "the learner attends to what comes before"
    assert all(e.dtype == torch.int32 for e in edges), "FlashAttention takes edges in int32"
    assert [int(e.diff().max()) for e in edges] == list(longest), (
        "the longest sample is another one"
    )
    repeats = tensors[0].shape[1] // tensors[1].shape[1]
    for asked, held in zip(
        itertools.pairwise(edges[0].tolist()), itertools.pairwise(edges[1].tolist()), strict=True
    ):
        rows = slice(*asked), slice(*held), slice(*held)
        q, k, v = (x[part].transpose(0, 1)[None] for x, part in zip(tensors, rows, strict=True))
        heads = [q, *(x.repeat_interleave(repeats, dim=1) for x in (k, v))]
        missing = k.shape[2] - q.shape[2]
        options: dict[str, Any] = {"is_causal": True, "scale": scale}
        if left >= 0 or missing:
            # The last query sees the last key.
            ago = torch.arange(q.shape[2])[:, None] + missing - torch.arange(k.shape[2])
            visible = (ago >= 0) & (ago <= left) if left >= 0 else ago >= 0
            options |= {
                "is_causal": False,
                "attn_mask": torch.where(visible, 0.0, -torch.inf).to(q.dtype),
            }
        yield _PackedSample(rows[0], rows[1], heads, options)


def _attend_packed(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    query_edges: Tensor,
    key_edges: Tensor,
    max_q: int,
    max_k: int,
    is_causal: bool = False,
    scale: float | None = None,
    window: Sequence[int] | None = None,
    *_: Any,
    **__: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute attention sample by sample; see `torch.nn.attention.varlen.varlen_attn`."""
    out = torch.empty_like(query)
    edges = (query_edges, key_edges)
    longest = (max_q, max_k)
    for sample in _iter_packed_samples((query, key, value), edges, longest, scale, window):
        out[sample.query_rows] = _CPU_FLASH(*sample.heads, **sample.options)[0][0].transpose(0, 1)
    # The backward pass below needs no logarithms of sums.
    return (
        out,
        query.new_zeros(query.shape[1], len(query), dtype=torch.float32),
        torch.zeros(2, dtype=torch.uint64),
    )


def _attend_packed_backward(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    query_edges: Tensor,
    key_edges: Tensor,
    max_q: int,
    max_k: int,
    is_causal: bool,
    rng_state: Tensor,
    scale: float | None = None,
    window: Sequence[int] | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    found = torch.zeros_like(query), torch.zeros_like(key), torch.zeros_like(value)
    edges = (query_edges, key_edges)
    longest = (max_q, max_k)
    for sample in _iter_packed_samples((query, key, value), edges, longest, scale, window):
        attended, sums = _CPU_FLASH(*sample.heads, **sample.options)
        of_out = grad[sample.query_rows].transpose(0, 1)[None]
        causal = sample.options["is_causal"]
        others = {k: v for k, v in sample.options.items() if k != "is_causal"}
        parts = _CPU_FLASH_BACKWARD(of_out, *sample.heads, attended, sums, 0.0, causal, **others)
        rows = sample.query_rows, sample.key_rows, sample.key_rows
        for whole, part, where in zip(found, parts, rows, strict=True):
            # Heads that share a key add up.
            whole[where] = part[0].unflatten(0, (whole.shape[1], -1)).sum(dim=1).transpose(0, 1)
    return found


_CPU_FLASH = aten._scaled_dot_product_flash_attention_for_cpu.default
_CPU_FLASH_BACKWARD = aten._scaled_dot_product_flash_attention_for_cpu_backward.default
ONLY_ON_CUDA: dict[str, Callable[..., Any]] = {
    "aten._fused_rms_norm.default": _rms_norm,
    "aten._fused_rms_norm_backward.default": _rms_norm_backward,
    "aten.histc.default": _histc,
    "aten.mm.dtype": lambda one, other, dtype: one.to(dtype) @ other.to(dtype),
    "torch_attn._varlen_attn.default": _attend_packed,
    "torch_attn._varlen_attn_backward.default": _attend_packed_backward,
}
"""What computes on the CPU what only CUDA has, by the operator's name."""
UNSPLIT = ("_fused_rms_norm", "mish_backward", "silu_backward")
"""Operators that torch splits into others on devices without a kernel: on the CUDA of torch's CPU
build, but not on CUDA."""
KERNELS = {"torch_attn._varlen_attn.default": 2, "torch_attn._varlen_attn_backward.default": 4}
"""Kernels of operators that launch several: attention with a state of random numbers; gradients
with their preparation."""


# Attention over padded samples: torch chooses its kernel by device, above the operators
# that are seen here.


_CPU_ATTENTION = F.scaled_dot_product_attention


class _PaddedAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, mask: Any, options: dict[str, Any]
    ) -> Tensor:
        counts["launches"] += 1
        query, key, value = heads = [_unwrap(x).detach().requires_grad_() for x in (q, k, v)]
        with torch.enable_grad():
            out = _CPU_ATTENTION(query, key, value, attn_mask=_unwrap(mask), **options)
        ctx.graph = heads, out
        return EmulatedTensor(out.detach())

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        counts["launches"] += 3
        heads, out = ctx.graph
        return (*map(_wrap, torch.autograd.grad(out, heads, _unwrap(grads[0]))), None, None)


def _attend_padded(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Any = None, **options: Any
) -> Tensor:
    places = {isinstance(x, EmulatedTensor) for x in (query, key, value)}
    if places == {False}:
        return _CPU_ATTENTION(query, key, value, attn_mask=attn_mask, **options)
    if len(places) > 1:
        raise RuntimeError("Expected query, key, and value to be on the same device")
    out: Tensor = _PaddedAttention.apply(query, key, value, attn_mask, options)
    return out


# The process: `torch.cuda` as a machine with one device has it.


class _DeviceMode(TorchDispatchMode):
    """Sees operations of the CPU too: those that make tensors of the device, and copies to it."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        if any(t is not EmulatedTensor and hasattr(t, "__tensor_flatten__") for t in types):
            return NotImplemented  # DTensor, for example: its parts come here
        return run_operation(func, args, kwargs or {})


class _Stream:
    """The device's stream, and its events: all work is done when a call returns."""

    device = DEVICE
    cuda_stream = 0

    def __init__(self, *_: Any, **__: Any): ...

    def _do_nothing(self, *_: Any, **__: Any) -> None: ...

    record = wait = wait_stream = wait_event = _do_nothing

    def synchronize(self) -> None:
        _count_wait()

    def query(self) -> bool:
        return True

    def elapsed_time(self, _: Any) -> float:
        return 0.0

    def record_event(self, *_: Any) -> _Stream:
        return self

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Stream)

    def __hash__(self) -> int:
        return 1


class _Generator:
    """The device's random numbers. Nothing of a learner draws any."""

    def _return_self(self, *_: Any) -> _Generator:
        return self

    clone_state = graphsafe_get_state = manual_seed = _return_self

    def graphsafe_set_state(self, _: Any) -> None: ...

    set_state = graphsafe_set_state

    def get_state(self) -> Tensor:
        return torch.zeros(16, dtype=torch.uint8)

    def initial_seed(self) -> int:
        return 0


_LIBRARY = torch.library.Library("aten", "IMPL", "CUDA")


def install_device() -> None:
    """Give this process, and each that it forks, the emulated device. Call it once, in
    the main thread."""
    load_library()
    # It keeps functions of torch.cuda, and would ask ours for what they lack.
    importlib.import_module("torch._dynamo")
    generator, stream = _Generator(), _Stream()
    properties = SimpleNamespace(
        name="emulated H100",
        uuid="GPU-emulated",
        major=COMPUTE_CAPABILITY[0],
        minor=COMPUTE_CAPABILITY[1],
        total_memory=MEMORY_BYTES,
        multi_processor_count=132,
    )

    def returning(value: Any) -> Callable[..., Any]:
        return lambda *_, **__: value

    replaced: dict[str, Any] = {
        "_lazy_init": returning(None),
        "current_device": returning(0),
        "current_stream": returning(stream),
        "default_generators": (generator,),
        "default_stream": returning(stream),
        "device_count": returning(1),
        "empty_cache": returning(None),
        "Event": _Stream,
        "get_device_capability": returning(COMPUTE_CAPABILITY),
        "get_device_name": returning(properties.name),
        "get_device_properties": returning(properties),
        "is_available": returning(True),
        "is_bf16_supported": returning(True),
        "is_current_stream_capturing": returning(False),
        "is_initialized": returning(True),
        "max_memory_allocated": returning(0),
        "mem_get_info": returning((MEMORY_BYTES, MEMORY_BYTES)),
        "memory_allocated": returning(0),
        "memory_reserved": returning(0),
        "reset_peak_memory_stats": returning(None),
        "set_device": returning(None),
        "Stream": _Stream,
        "stream": lambda _: contextlib.nullcontext(),
        "synchronize": lambda *_, **__: _count_wait(),
    }
    of_random: dict[str, Any] = {
        "get_rng_state": lambda *_, **__: generator.get_state(),
        "manual_seed": returning(None),
        "manual_seed_all": returning(None),
        "set_rng_state": returning(None),
    }
    for name, value in (replaced | of_random).items():
        setattr(torch.cuda, name, value)
    for name, value in of_random.items():
        setattr(torch.cuda.random, name, value)
    for name in UNSPLIT:
        # Never called: `run_operation` comes first.
        _LIBRARY.impl(name, lambda *_, **__: None)
    torch.Tensor.data = property(_get_data, _set_data)
    F.scaled_dot_product_attention = _attend_padded  # type: ignore[assignment]
    dist.init_process_group = _without_nccl(dist.init_process_group)
    # A module's parameters become other objects when it moves: the old ones cannot
    # change their class.
    torch.__future__.set_overwrite_module_params_on_conversion(True)
    torch.compiler.set_stance("force_eager")
    torch._C._set_only_lift_cpu_tensors(True)
    _DeviceMode().__enter__()
    # Modes are a thread's own.
    threading.Thread.run = _in_device_mode(threading.Thread.run)  # type: ignore[method-assign, assignment]


def _in_device_mode(run: Callable[[threading.Thread], None]) -> Callable[[threading.Thread], None]:
    def run_thread(thread: threading.Thread) -> None:
        with _DeviceMode():
            run(thread)

    return run_thread


def _without_nccl(init_process_group: Callable[..., Any]) -> Callable[..., Any]:
    def init(backend: str | None = None, *args: Any, **kwargs: Any) -> Any:
        counts["groups"] += "nccl" in (backend or "")
        return init_process_group(backend and backend.replace("nccl", "gloo"), *args, **kwargs)

    return init


# The other side of a comparison: a learner on the CPU.


_CPU_LIBRARY = torch.library.Library("aten", "IMPL", "CPU")
_CPU_ATTENTION_LIBRARY = torch.library.Library("torch_attn", "FRAGMENT")


def compute_as_cuda() -> None:
    """Make this process compute on the CPU what the emulated device does otherwise: norms, and
    attention in 16 bits.

    Everything else has the same bits on both. Call it once.
    """
    import torch.nn.attention.varlen

    from r3async.learner import packed_attention
    from r3async.learner.megatron import attention

    def normalize(x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return F.rms_norm(x, (x.shape[-1],), weight, eps)

    def has_unpadded_kernel(query: Tensor, value: Tensor) -> bool:
        size = query.shape[-1]
        return (
            query.dtype in (torch.bfloat16, torch.float16)
            and size == value.shape[-1]
            and size % 8 == 0
        )

    packed_attention._has_unpadded_kernel = has_unpadded_kernel
    attention._RMSNormFunction = SimpleNamespace(apply=normalize)  # type: ignore[misc, assignment]
    for name in ("_varlen_attn", "_varlen_attn_backward"):
        _CPU_ATTENTION_LIBRARY.impl(name, ONLY_ON_CUDA[f"torch_attn.{name}.default"], "CPU")
    for name in ("_fused_rms_norm", "_fused_rms_norm_backward"):
        _CPU_LIBRARY.impl(name, ONLY_ON_CUDA[f"aten.{name}.default"])
