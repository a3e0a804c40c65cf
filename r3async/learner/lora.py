"""Low-rank adapters (LoRA, arXiv 2106.09685) on the weights of any backend, with any
sharding over ranks.

An adapted matrix, or stack of matrices (the experts of a layer), is `W = W0 + s B A`, with
`s = alpha / rank`. The model always holds the merged `W` in the compute dtype, as engines do. So
the learner's log-probs are those of the policy that is served, and a forward pass is the same as
without adapters. The backward pass computes the gradient of one `W` at a time. It is projected onto
the adapter, in float32, and freed:

    dL/dA = s Bᵀ dL/dW      dL/dB = s dL/dW Aᵀ

Only `A` and `B` have gradients, float32 values and moments. `W0` is kept in host memory. Forward
and backward passes cost the same as when all weights are trained; only memory is saved.

With `lora.deliver = "adapter"` engines have `W0`, `A` and `s B`, and add `s B (A x)` to `W0 x`. Both
factors are rounded once, to the engines' dtype. Where one rank has a whole linear layer of torch, it
computes the same two products, and `A` and `B` get their gradients from these. Elsewhere `W` is
merged from the rounded factors, so that learner and engines differ by the rounding of `W`.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal, NamedTuple

import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.nn import Parameter, functional

from r3async.checkpoint.rank_files import TensorSlice
from r3async.config import LoraConfig
from r3async.learner.rank_group import RankGroup
from r3async.learner.row_shares import to_local
from r3async.learner.shard_slice import ShardSlice

ADAPTER_NAMES = ("lora_A", "lora_B")
ShardedDim = Literal["rows", "columns", "matrices"] | None
"""The dimension of a matrix, or of a stack of matrices, that is divided among ranks."""


class AdapterCandidate(NamedTuple):
    """A parameter of this rank that may be adapted: matrices, or stacks of them, at the places
    in `shard_slice`."""

    parameter: Parameter
    shard_slice: ShardSlice
    sharded_dim: ShardedDim = None
    is_router: bool = False
    linear: torch.nn.Linear | None = None
    """Layer whose weight it is, if this rank has all of it."""

    @property
    def module_names(self) -> list[str]:
        return [strip_weight_suffix(place.name) for place in self.shard_slice.places]


def strip_weight_suffix(name: str) -> str:
    """Return a weight's name without `.weight`, which all but stacked ones end with."""
    return name.removesuffix(".weight")


@dataclass(frozen=True)
class LoraAdapter:
    """The adapter of the matrices at `place`, this rank's part of it.

    `lora_a` is float32 `[.., rank, columns]`, and `lora_b` `[.., rows, rank]`.
    """

    place: TensorSlice
    lora_a: Parameter
    lora_b: Parameter
    scale: float
    served_dtype: torch.dtype | None = None
    """Dtype in which engines have `A` and `s B`; None if they have merged weights."""

    @staticmethod
    def initialize(
        place: TensorSlice,
        config: LoraConfig,
        seed: int,
        device: torch.device,
        served_dtype: torch.dtype | None = None,
    ) -> LoraAdapter:
        """Create an adapter with `B` 0 and `A` uniform within `1 / sqrt(columns)`, as in PEFT.

        It is the same on any layout of ranks.
        """
        shape = (*place.shape[:-2], config.rank, place.shape[-1])
        digest = hashlib.sha256(f"{seed} {place.name}".encode()).digest()
        rng = torch.Generator().manual_seed(int.from_bytes(digest[:7], "little"))
        whole = torch.rand(shape, generator=rng).mul_(2).sub_(1).div_(math.sqrt(place.shape[-1]))
        box = _replace_dimension(place, -2, config.rank)
        part = whole[_slice_box(box)]
        b = torch.zeros(*place.size[:-1], config.rank)
        return LoraAdapter(
            place,
            Parameter(part.clone().to(device)),
            Parameter(b.to(device)),
            config.alpha / config.rank,
            served_dtype,
        )

    @property
    def factor_places(self) -> tuple[TensorSlice, TensorSlice]:
        """The places of `lora_a` and `lora_b`."""
        name = strip_weight_suffix(self.place.name)
        rank = self.lora_a.shape[-2]
        a = _replace_dimension(self.place, -2, rank)
        b = _replace_dimension(self.place, -1, rank)
        return TensorSlice(f"{name}.{ADAPTER_NAMES[0]}.weight", *a), TensorSlice(
            f"{name}.{ADAPTER_NAMES[1]}.weight", *b
        )

    def project_gradient(self, gradient: Tensor) -> None:
        """Project a gradient of the weight's part onto the adapter, and add it to the
        adapter's gradients."""
        g = (
            gradient.float().mul_(self.scale)
            if gradient.dtype != torch.float32
            else gradient * self.scale
        )
        for parameter, part in (
            (self.lora_a, self.lora_b.detach().mT @ g),
            (self.lora_b, g @ self.lora_a.detach().mT),
        ):
            parameter.grad = part if parameter.grad is None else parameter.grad.add_(part)

    def merge_weight(self, base: Tensor) -> Tensor:
        """Return the weight's part with the adapter, float32, from that of the start model."""
        if self.served_dtype is not None:
            a, b = self.served_factors()
            return base.float() + b.float() @ a.float()
        return torch.add(
            base.float(), self.lora_b.detach() @ self.lora_a.detach(), alpha=self.scale
        )

    def served_factors(self) -> tuple[Tensor, Tensor]:
        """Return `A` and `s B` as engines have them."""
        return self.lora_a.to(self.served_dtype), (self.lora_b * self.scale).to(self.served_dtype)


class _Box(NamedTuple):
    shape: tuple[int, ...]
    offset: tuple[int, ...]
    size: tuple[int, ...]


def _slice_box(box: _Box | TensorSlice) -> tuple[slice, ...]:
    """Return the index of the box in the whole."""
    return tuple(slice(o, o + n) for o, n in zip(box.offset, box.size, strict=True))


def _replace_dimension(place: TensorSlice, dimension: int, rank: int) -> _Box:
    """Return the box with `rank` in place of that dimension, which is then whole."""

    def put(values: tuple[int, ...], value: int) -> tuple[int, ...]:
        out = list(values)
        out[dimension] = value
        return tuple(out)

    return _Box(put(place.shape, rank), put(place.offset, 0), put(place.size, rank))


class AdapterParameter(NamedTuple):
    """An `A` or `B`, its place in the whole, and the candidate with the sharding of its weight.

    `is_replicated`: each rank has all of it, and the gradient of its own rows or columns of
    the weight only.
    """

    parameter: Parameter
    shard_slice: ShardSlice
    candidate: AdapterCandidate
    is_replicated: bool


class _AdaptedParameter(NamedTuple):
    """A parameter, its values in the start model, and the adapters of its parts; None for
    parts without one."""

    candidate: AdapterCandidate
    base_weight: Tensor
    adapters: list[LoraAdapter | None]


def _describe_parameters(
    candidate: AdapterCandidate, adapter: LoraAdapter
) -> list[AdapterParameter]:
    """Return `A` and `B` of an adapter."""
    out = []
    for parameter, place, over, whole in (
        (adapter.lora_a, adapter.factor_places[0], "rows", adapter.place.offset[-2]),
        (adapter.lora_b, adapter.factor_places[1], "columns", adapter.place.offset[-1]),
    ):
        shared = candidate.sharded_dim == over
        # Among the ranks that have all of it, the one with the weight's first rows, or
        # columns, writes it.
        writes = candidate.shard_slice.is_writer and not (shared and whole)
        out.append(
            AdapterParameter(parameter, ShardSlice((place,), is_writer=writes), candidate, shared)
        )
    return out


class LoraAdapters:
    """The adapters of this rank's part of a model. Every other parameter is frozen by the code that
    builds the model.

    `chosen` are the names of the matrices that have one, see `select_targets`; `served_dtype` is the
    engines' dtype. From then on, a gradient of an adapted parameter is projected onto its adapters
    when it has been accumulated.
    """

    def __init__(
        self,
        candidates: Sequence[AdapterCandidate],
        chosen: set[str],
        config: LoraConfig,
        *,
        seed: int,
        dtype: torch.dtype,
        served_dtype: torch.dtype,
    ):
        self._adapted: list[_AdaptedParameter] = []
        self._uses_start_weights = False
        for candidate in candidates:
            parameter = candidate.parameter
            places = candidate.shard_slice.places
            device = to_local(parameter.detach()).device
            served = served_dtype if config.delivers_adapters else None
            adapters = [
                LoraAdapter.initialize(p, config, seed, device, served)
                if strip_weight_suffix(p.name) in chosen
                else None
                for p in places
            ]
            if not any(adapters):
                continue
            linear = candidate.linear if config.delivers_adapters else None
            base_device = torch.device("cpu") if linear is None else device
            base = to_local(parameter.detach()).to(base_device, dtype, copy=True)
            one = _AdaptedParameter(candidate, base, adapters)
            self._adapted.append(one)
            if linear is not None:
                parameter.requires_grad_(False)
                linear.forward = partial(self._multiply, one)
            else:
                parameter.register_post_accumulate_grad_hook(
                    lambda p, one=one: _project_gradient(one, p)
                )

    def _multiply(self, one: _AdaptedParameter, x: Tensor) -> Tensor:
        """Compute the output of an adapted layer in the order of vLLM."""
        assert one.candidate.linear is not None
        output = functional.linear(x, one.base_weight, one.candidate.linear.bias)
        (adapter,) = one.adapters
        if adapter is None or self._uses_start_weights:
            return output
        a, b = (factor.to(x.dtype) for factor in adapter.served_factors())
        return output + functional.linear(functional.linear(x, a), b)

    def list_parameters(self) -> list[AdapterParameter]:
        """Return every `A` and `B`, in the optimizer's order."""
        return [
            parameter
            for candidate, _, adapters in self._adapted
            for adapter in filter(None, adapters)
            for parameter in _describe_parameters(candidate, adapter)
        ]

    @torch.no_grad()
    def gather_served_factors(self, ranks: RankGroup) -> dict[str, Tensor]:
        """Return `A` and `s B` of every adapter as engines have them, whole, under PEFT's names.

        The first rank gets them, other ranks get nothing. Collective.
        """
        mine = [
            (place, values.cpu() if ranks.world_size > 1 else values)
            for candidate, _, adapters in self._adapted
            for adapter in filter(None, adapters)
            for (_, held, *_), values in zip(
                _describe_parameters(candidate, adapter), adapter.served_factors(), strict=True
            )
            if held.is_writer
            for place in held.places
        ]
        everyones = ranks.all_gather(mine)
        whole: dict[str, Tensor] = {}
        for place, values in itertools.chain(*everyones) if not ranks.rank else ():
            name = peft_tensor_name(place.name)
            if place.size == place.shape:
                whole[name] = values
                continue
            into = whole.setdefault(name, values.new_empty(place.shape))
            into[_slice_box(place)] = values
        return whole

    @torch.no_grad()
    def merge_weights(self) -> None:
        """Set the model's weights to the start model's, merged with the adapters."""
        for candidate, base, adapters in self._adapted:
            target = to_local(candidate.parameter.detach())
            parts = zip(
                candidate.shard_slice.layout.split(base.to(target.device)), adapters, strict=True
            )
            # Parts are rounded one at a time, because all experts of a layer are one parameter.
            made = [
                (part if one is None else one.merge_weight(part)).to(target.dtype)
                for part, one in parts
            ]
            target.copy_(candidate.shard_slice.layout.join(made))

    @contextmanager
    def use_reference_weights(self) -> Iterator[None]:
        """Make the model the start model inside this block, and restore it bit by bit afterwards.

        The counterpart of `reference_weights.ReferenceWeights`.
        """
        with torch.no_grad():
            for candidate, base, _ in self._adapted:
                to_local(candidate.parameter.detach()).copy_(base)
        self._uses_start_weights = True
        try:
            yield
        finally:
            self._uses_start_weights = False
            self.merge_weights()


@torch.no_grad()
def _project_gradient(one: _AdaptedParameter, parameter: Tensor) -> None:
    assert parameter.grad is not None
    gradient = to_local(parameter.grad)
    parameter.grad = None
    for adapter, part in zip(
        one.adapters, one.candidate.shard_slice.layout.split(gradient), strict=True
    ):
        if adapter is not None:
            adapter.project_gradient(part)


# -- on disk ---------------------------------------------------------------------------------------


def save_adapter(
    directory: Path,
    tensors: Mapping[str, Tensor],
    config: LoraConfig,
    *,
    base: str,
    order: Sequence[str] = (),
) -> None:
    """Write adapters in PEFT's format: `adapter_config.json` and `adapter_model.safetensors`.

    Adapters of stacked experts become PEFT's adapters of parameters (`target_parameters`), with all
    experts' ranks in one dimension.

    Args:
        tensors: Whole tensors, float32, by the names of `LoraAdapter.factor_places`.
        base: The start model, a path or a name.
        order: The model's names of its parameters, in order, for stacked experts.
    """
    stacked: set[str] = set()
    modules: set[str] = set()
    out = {}
    for name, tensor in sorted(tensors.items()):
        module, side = name.removesuffix(".weight").rsplit(".", 1)
        (stacked if tensor.ndim == 3 else modules).add(module)
    for name, tensor in sorted(tensors.items()):
        module, side = name.removesuffix(".weight").rsplit(".", 1)
        wrapper = (
            _peft_module_name(module, [n for n in order if n in stacked])
            if module in stacked
            else module
        )
        out[peft_tensor_name(f"{wrapper}.{side}.weight")] = _flatten_stack(tensor, side)
    described = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": config.rank,
        "lora_alpha": config.alpha,
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "target_modules": sorted(modules),
        "target_parameters": sorted(stacked) or None,
    }
    save_file(out, directory / "adapter_model.safetensors", metadata={"format": "pt"})
    (directory / "adapter_config.json").write_text(json.dumps(described, indent=2) + "\n")


def peft_tensor_name(name: str) -> str:
    """Return the name in PEFT's files of a tensor of `LoraAdapter.factor_places`."""
    return f"base_model.model.{name}"


def _flatten_stack(tensor: Tensor, side: str) -> Tensor:
    """Return the matrix that PEFT has for a stack `[experts, ..]`: the ranks of all experts
    in one dimension."""
    if tensor.ndim == 2:
        return tensor.contiguous()
    if side == ADAPTER_NAMES[0]:
        return tensor.flatten(0, 1).contiguous()
    return tensor.permute(1, 2, 0).flatten(1, 2).contiguous()


def _peft_module_name(name: str, stacked: Sequence[str]) -> str:
    """Return PEFT's name of the module that wraps that parameter.

    The wrappers of one module are nested, the first parameter's innermost.
    """
    owner = name.rsplit(".", 1)[0]
    beside = [other for other in stacked if other.rsplit(".", 1)[0] == owner]
    return owner + ".base_layer" * (len(beside) - 1 - beside.index(name))
