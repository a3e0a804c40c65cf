"""New weights for gpt-oss in a running engine.

vLLM (0.30 to 0.33) reloads a model through the loaders of its parameters. Its gpt-oss copies sinks
and whole stacks of experts into the parameters instead, which at that time have no memory: the
copies are lost, without an error.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch

_SINKS_SUFFIX = ".self_attn.sinks"
_EXPERTS_INFIX = ".mlp.experts."


def is_gpt_oss(model: torch.nn.Module) -> bool:
    """Return True for vLLM's gpt-oss."""
    return getattr(getattr(model, "config", None), "model_type", "") == "gpt_oss"


class GptOssTensors:
    """The tensors of one version of gpt-oss, in the form in which a reload loads them."""

    def __init__(self) -> None:
        self._sinks: list[tuple[str, torch.Tensor]] = []

    def iter_loadable(
        self, tensors: Iterable[tuple[str, torch.Tensor]]
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield stacks of experts one expert at a time, for which vLLM calls a parameter's loader.
        Keep the sinks."""
        for name, tensor in tensors:
            if name.endswith(_SINKS_SUFFIX):
                self._sinks.append((name, tensor.clone()))
            elif _EXPERTS_INFIX in name:
                stack, _, part = name.rpartition(".")
                for expert, weights in enumerate(tensor):
                    yield f"{stack}.{expert}.{part}", weights
            else:
                yield name, tensor

    def load_sinks(self, model: torch.nn.Module) -> set[str]:
        """Load the sinks after a reload, when the parameters have memory again, and return the
        names of the modules that have them."""
        loaded = model.load_weights(self._sinks)
        self._sinks = []
        return {name.rpartition(".")[0] for name in loaded}
