"""Comparison of the weights in a vLLM model with the published tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import torch

from r3async.weights.manifest import TensorMismatch, WeightManifest
from r3async.weights.version_reader import iter_verified_tensors

NamedTensors = Iterable[tuple[str, torch.Tensor]]
_TAG_BASE = 128
"""Base of the digits in which tags are written: every floating-point dtype of weights represents 1
to 128 exactly, except float8."""


def find_model_differences(
    model: torch.nn.Module, published: WeightManifest, load_tensors: Callable[[NamedTensors], None]
) -> list[TensorMismatch]:
    """Return the published tensors that the model does not hold as they were published, in the
    manifest's order.

    vLLM fuses, splits and re-packs the tensors that it loads, which loses their names. So the
    model's parameters are compared with those after a regular load of the same file by
    `load_tensors`. To name the elements that differ, the loader then gets tags instead of weights:
    whatever it does with the tensors, it does with the tags too.

    The list is empty if the model holds exactly the loaded weights: then either they are correct,
    or every load goes wrong in the same way. Afterwards the model holds the result of
    `load_tensors`. Needs host memory for one copy of the model.
    """
    held = {name: tensor.to("cpu", copy=True) for name, tensor in iter_parameter_contents(model)}
    load_tensors(iter_verified_tensors(published))
    wrong = {}
    for name, tensor in iter_parameter_contents(model):
        now = tensor.cpu()
        before = held.pop(name)
        if before.shape != now.shape:
            wrong[name] = torch.ones(now.shape, dtype=torch.bool)
        elif (different := view_as_integers(before) != view_as_integers(now)).any():
            wrong[name] = different.reshape(now.shape)
    if not wrong:
        return []
    tags = {
        name: torch.zeros(different.shape, dtype=torch.int64) for name, different in wrong.items()
    }
    tagged = {
        name: torch.ones(different.shape, dtype=torch.bool) for name, different in wrong.items()
    }
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
        which, counts = tags[parameter_name][different & tagged[parameter_name]].unique(
            return_counts=True
        )
        for tag, count in zip(which.tolist(), counts.tolist(), strict=True):
            if tag < len(names):
                found[tag] = TensorMismatch(names[tag], parameter_name, count)
    return [found[tag] for tag in sorted(found)]


def iter_parameter_contents(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the name and contents of each parameter.

    On CPU vLLM passes the weights of dense layers to oneDNN and empties the parameter. The layer's
    output for the unit vectors equals oneDNN's weights, to the bit.
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
    """Return the tensor's bits as integers, flattened, so that NaN equals itself."""
    sizes = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return tensor.contiguous().reshape(-1).view(sizes[tensor.element_size()])


def _iter_tag_tensors(published: WeightManifest, place: int) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield tensors of the published shapes, each filled with one digit (plus 1) of its index."""
    for index, (name, entry) in enumerate(published.tensors.items()):
        yield (
            name,
            torch.full(
                entry.shape, index // place % _TAG_BASE + 1, dtype=getattr(torch, entry.dtype)
            ),
        )
