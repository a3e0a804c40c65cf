"""The adapters of versions beside the weights of a vLLM worker (`learner.lora.deliver = "adapter"`).

vLLM holds the adapters of several versions at once, each in a slot, and each request runs under
those that it names.
"""

from __future__ import annotations

import contextlib
import json
import tempfile
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

import torch

from r3async.rollout.vllm.messages import build_adapter_request
from r3async.rollout.vllm.weight_comparison import view_as_integers
from r3async.weights.manifest import AdapterFormat, TensorMismatch, WeightError, WeightManifest
from r3async.weights.version_reader import VersionFile


def install_adapters(
    worker: Any, published: WeightManifest, versions_in_use: Collection[int]
) -> None:
    """Load a version's adapters beside those of `versions_in_use`, and remove all others.

    Raises `WeightError` for a tensor that vLLM does not hold afterwards as it was published, or
    whatever vLLM raises. Other versions are not changed by that.
    """
    from vllm.lora.request import LoRARequest

    assert published.adapter is not None
    kept = {build_adapter_request(version).lora_int_id for version in versions_in_use}
    for adapter_id in worker.list_loras() - kept:
        worker.remove_lora(adapter_id)
    with tempfile.TemporaryDirectory() as folder:
        write_adapter_folder(Path(folder), published.path, published.adapter)
        request = build_adapter_request(published.version, folder)
        worker.add_lora(
            LoRARequest(
                request.lora_name, request.lora_int_id, request.lora_path, load_inplace=True
            )
        )
    different = find_adapter_differences(worker, published)
    if different:
        first = different[0]
        raise WeightError(
            f"weights version {published.version}: vLLM does not hold tensor {first.tensor!r} as "
            f"it was published ({len(different)} in all)"
        )


@contextlib.contextmanager
def keep_adapters(runner: Any) -> Iterator[None]:
    """Keep vLLM's model runner from removing all adapters when it loads weights in this block:
    they are the same weights."""
    runner.reset_lora_state = lambda: None
    try:
        yield
    finally:
        del runner.reset_lora_state


def write_adapter_folder(folder: Path, path: str, form: AdapterFormat) -> None:
    """Make a folder from which vLLM reads the adapters in the file of a version, without copying
    the file. They are scaled already."""
    (folder / "adapter_model.safetensors").symlink_to(path)
    described = {"r": form.rank, "lora_alpha": form.rank, "target_modules": []}
    (folder / "adapter_config.json").write_text(json.dumps(described))


def find_adapter_differences(worker: Any, published: WeightManifest) -> list[TensorMismatch]:
    """Return the tensors of a version that the worker's slot for it does not hold to the bit, or
    that no layer applies, in the manifest's order."""
    runner = worker.model_runner
    manager = runner.lora_manager._adapter_manager
    adapter_id = build_adapter_request(published.version).lora_int_id
    if adapter_id not in manager.lora_index_to_id:
        return [TensorMismatch(name, "no slot", 0) for name in published.tensors]
    slot = manager.lora_index_to_id.index(adapter_id)
    published_names = _map_module_names(runner.get_model(), published.tensors)
    content = dict(VersionFile(published).iter_tensors())
    factors = {key: content[name] for key, name in published_names.items()}
    found = {
        name: TensorMismatch(name, "no layer", tensor.numel()) for name, tensor in content.items()
    }
    for module_name, module in manager.modules.items():
        parts = manager.packed_modules.get(module_name, [module_name])
        for key, expected, held in _iter_slot_tensors(module, parts, slot, factors):
            name = published_names[key]
            rows, columns = expected.shape
            part = held[:rows, :columns].cpu()
            different = view_as_integers(part) != view_as_integers(expected.to(part.dtype))
            if different.any():
                found[name] = TensorMismatch(name, module_name, int(different.sum()))
            else:
                del found[name]
    return [found[name] for name in published.tensors if name in found]


def _map_module_names(
    model: torch.nn.Module, tensors: Collection[str]
) -> dict[tuple[str, bool], str]:
    """Return the published names by vLLM's name of the module and whether it is `A`."""
    from vllm.lora.utils import parse_fine_tuned_lora_name

    mapper = getattr(model, "hf_to_vllm_mapper", None)
    renames = None if mapper is None else mapper.get_rename_mapper()
    return {parse_fine_tuned_lora_name(name, renames): name for name in tensors}


def _iter_slot_tensors(
    module: Any,
    parts: list[str],
    slot: int,
    content: dict[tuple[str, bool], torch.Tensor],
) -> Iterator[tuple[tuple[str, bool], torch.Tensor, torch.Tensor]]:
    """Yield, for each published factor of the layer's `parts`, its key, this worker's part of it,
    and the slot's matrix `[rows, columns]`, which may be padded."""
    for is_a, stacks, cut in (
        (True, module.lora_a_stacked, module.slice_lora_a),
        (False, module.lora_b_stacked, module.slice_lora_b),
    ):
        whole = [content.get((part, is_a)) for part in parts]
        mine = whole
        if module.tp_size > 1 and any(each is not None for each in whole):
            mine = cut(whole) if len(whole) > 1 else [cut(whole[0])]
        for part, expected, stack in zip(parts, mine, stacks, strict=True):
            if expected is not None:
                yield (part, is_a), expected, stack[slot, 0]
