"""Names of the tensors of a checkpoint, beside those of the model that transformers read from it."""

from __future__ import annotations

import collections
from collections.abc import Collection, Iterable, Mapping
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.core_model_loading import (
    WeightConverter,
    WeightRenaming,
    rename_source_key,
    revert_weight_conversion,
)

from r3async.data.checkpoint_forms import declares_prediction_layers


class CheckpointNames:
    """The `names` of a checkpoint's tensors, and the tensors of a `model` that was read from it.

    Attributes:
        carried: Those that the model has no tensor for: they are not trained, but carried.
        published: Those that transformers reads but would write by another name, which is the key.
    """

    def __init__(self, model: PreTrainedModel, names: Collection[str]):
        held = model.state_dict()
        own = _find_own_names(model, names, held)
        self.carried = [name for name in names if name not in own]
        shapes = {
            name: torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
            for name, tensor in held.items()
        }
        written = revert_weight_conversion(model, shapes)
        count = collections.Counter(own.values())
        self.published: dict[str, str] = {}
        for name in sorted(own.keys() - written.keys()):
            # Of several that are read as one tensor, none is its other name.
            if count[own[name]] == 1:
                (other,) = revert_weight_conversion(model, {own[name]: shapes[own[name]]})
                if other not in own:
                    self.published[other] = name


def _find_own_names(
    model: PreTrainedModel, names: Iterable[str], held: Mapping[str, Any]
) -> dict[str, str]:
    """Return the model's name for the tensor that is read from each of `names`, as far as it has
    one. Of several that are read from it, the first."""
    used = getattr(model, "_weight_conversions", None) or []
    renamings = [each for each in used if isinstance(each, WeightRenaming)]
    converters = [each for each in used if isinstance(each, WeightConverter)]
    prefix = model.base_model_prefix
    own = {}
    for name in names:
        # As in transformers: what has no meaning when renamed may have one before.
        for how in ((renamings, converters), ([], [])):
            key, _ = rename_source_key(name, *how, prefix, held)
            if key in held:
                own[name] = key
                break
    return own


def may_be_carried(model: PreTrainedModel, config: Mapping[str, Any], name: str) -> bool:
    """Return True if a tensor, by the name under which transformers looked for it, belongs to a
    part that a model with this `config.json` may have besides its text model.

    These are the other models of a model with a `text_config`, and layers for multi-token
    prediction behind the last one.
    """
    module: nn.Module = model
    for part in name.split("."):
        if part not in module._modules:
            break
        module = module.get_submodule(part)
    if isinstance(module, nn.ModuleList):
        return declares_prediction_layers(config)
    return "text_config" in config and (module is model or module is model.base_model)
