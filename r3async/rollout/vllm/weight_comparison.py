"""What a vLLM model holds of its weights, and its comparison with the published tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import torch

from r3async.weights.manifest import TensorMismatch, WeightManifest
from r3async.weights.version_reader import iter_verified_tensors

NamedTensors = Iterable[tuple[str, torch.Tensor]]
_TAG_BASE = 128
"""Base of the digits in which tags are written: every floating-point dtype of weights represents 1
to 128 exactly, except float8."""
_STATE_NAMES = ("kv_cache",)
"""Attributes of modules that hold what requests computed, and no weights."""


def find_model_differences(
    model: torch.nn.Module, published: WeightManifest, load_tensors: Callable[[NamedTensors], None]
) -> list[TensorMismatch]:
    """Return the published tensors that the model does not hold as they were published, in the
    manifest's order.

    vLLM fuses, splits and re-packs the tensors that it loads, which loses their names. So what the
    model holds is compared with what it holds after a regular load of the same file by
    `load_tensors`. To name the elements that differ, the loader then gets tags instead of weights:
    whatever it does with the tensors, it does with the tags too. Where it computes with them, such
    as a decay from its logarithm, a mismatch has vLLM's own name for the tensor.

    The list is empty if the model holds exactly the loaded weights: then either they are correct,
    or every load goes wrong in the same way. Afterwards the model holds the result of
    `load_tensors`. Needs host memory for one copy of the model.
    """
    held = {name: tensor.to("cpu", copy=True) for name, tensor in iter_weight_contents(model)}
    load_tensors(iter_verified_tensors(published))
    wrong = {}
    for name, tensor in iter_weight_contents(model):
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
        for name, tensor in iter_weight_contents(model):
            if name not in wrong:
                continue
            digits = tensor.cpu().to(torch.int64)
            tagged[name] &= (digits >= 1) & (digits <= _TAG_BASE)  # not padding
            tags[name] += (digits - 1) * place
        place *= _TAG_BASE
    load_tensors(iter_verified_tensors(published))
    names = list(published.tensors)
    found: dict[int, TensorMismatch] = {}
    unnamed = []
    for held_name, different in wrong.items():
        which, counts = tags[held_name][different & tagged[held_name]].unique(return_counts=True)
        known = [
            (tag, count)
            for tag, count in zip(which.tolist(), counts.tolist(), strict=True)
            if tag < len(names)
        ]
        for tag, count in known:
            found[tag] = TensorMismatch(names[tag], held_name, count)
        if not known:
            unnamed.append(TensorMismatch(held_name, held_name, int(different.sum())))
    return [found[tag] for tag in sorted(found)] + unnamed


def iter_weight_contents(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the name and contents of each parameter, and of each tensor beside them that a load may
    fill or derive from them: buffers, registered or not.

    On CPU vLLM passes the weights of dense layers to oneDNN, and may empty the parameter. The
    layer's output for the unit vectors equals oneDNN's weights, to the bit.
    """
    for owner, module in model.named_modules():
        for name, parameter in module.named_parameters(recurse=False):
            held = parameter.detach()
            if held.numel():
                yield f"{owner}.{name}", held
            elif hasattr(module, "cpu_linear"):
                yield f"{owner}.{name}", _read_packed_matrix(module, parameter)
        kernel = vars(module).get("cpu_linear")
        if kernel not in (None, torch.nn.functional.linear) and module.weight.numel():
            yield f"{owner}.cpu_linear", _read_packed_matrix(module, module.weight)
        for name, buffer in module.named_buffers(recurse=False):
            yield f"{owner}.{name}", buffer
        for name, value in vars(module).items():
            if (
                isinstance(value, torch.Tensor)
                and value.is_floating_point()
                and name not in _STATE_NAMES
            ):
                yield f"{owner}.{name}", value


def _read_packed_matrix(module: torch.nn.Module, parameter: torch.Tensor) -> torch.Tensor:
    widths = ("input_size_per_partition", "input_size", "embedding_dim")
    width = next(getattr(module, w) for w in widths if hasattr(module, w))
    unit = torch.eye(width, dtype=parameter.dtype)
    return module.cpu_linear(unit, parameter, None).T


def find_derived_buffers(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return the buffers that are views of a parameter when vLLM loads a model, by name.

    vLLM records the tensors that a reload fills, and these are not among them: they follow their
    parameter as long as they share its storage.
    """
    from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

    return {
        f"{owner}.{name}".lstrip("."): buffer
        for owner, module in model.named_modules()
        for name, buffer in module.named_buffers(recurse=False)
        if buffer.is_floating_point()
        and name in module._non_persistent_buffers_set
        and name not in get_layerwise_info(module).restore_metadata[1]
    }


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
