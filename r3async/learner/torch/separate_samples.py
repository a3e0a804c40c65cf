"""Samples of a micro-batch kept apart in layers that carry a state from token to token.

Recurrent and convolutional layers of transformers know nothing of packed samples: their state runs
on from one sample into the next. They are found by what they do, whatever they are called, and
their own `forward` is then called on samples laid out as rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn

from r3async.learner.packed_attention import AttentionPlan, PaddedLayout, unpad_rows

LEAST_LEAK = 0.02
"""Share of a module's largest output from which a change of another sample's rows counts. What
changes with the order of sums in bfloat16 is smaller; a state that runs on changes the first token
of the next sample by about as much as its output is large."""


class SampleSeparator:
    """Calls modules with one sample a row, by the plan of the micro-batch that their model has just
    been given.

    Args:
        base_model: The decoder. It is called with `attention_plan`, whatever it hands on.
    """

    def __init__(self, base_model: nn.Module):
        self.plan: AttentionPlan | None = None
        self.modules: list[nn.Module] = []
        """The modules that are called in that way."""
        base_model.register_forward_pre_hook(self._take_plan, with_kwargs=True)

    def _take_plan(self, _: nn.Module, args: Any, kwargs: Mapping[str, Any]) -> None:
        # A pass that is recomputed for its gradients runs before the next micro-batch's.
        self.plan = kwargs.get("attention_plan")

    def separate(self, module: nn.Module) -> None:
        """Keep the samples apart in this module from now on."""
        # Replaced instead of hooked, so that a recomputed forward pass goes through it as well.
        module.forward = partial(self._forward_rows, module.forward)
        self.modules.append(module)

    def _forward_rows(self, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        plan = self.plan
        if plan is None:
            return forward(*args, **kwargs)
        plan.check_whole_samples()
        layout = plan.padded_layout
        tokens = (args[0] if args else kwargs["hidden_states"]).shape[1]
        kwargs.pop("attention_plan", None)  # of the packed rows
        by_place = [_divide(value, layout, tokens) for value in args]
        by_name = {key: _divide(value, layout, tokens) for key, value in kwargs.items()}
        outputs = [
            forward(*(parts[i] for parts in by_place), **{key: by_name[key][i] for key in by_name})
            for i in range(len(layout.buckets))
        ]
        mixed = torch.cat([_take_rows(each).flatten(0, 1) for each in outputs])
        packed = unpad_rows(mixed, layout)[None]
        first = outputs[0]
        return (packed, *(None for _ in first[1:])) if isinstance(first, tuple) else packed


def _divide(value: Any, layout: PaddedLayout, tokens: int) -> list[Any]:
    """Return what the call for each bucket gets for an argument.

    Tensors `[1, tokens, ...]` become rows `[samples, width, ...]`, also in tuples; anything else is
    the same for all.
    """
    if isinstance(value, tuple) and value:
        parts = [_divide(each, layout, tokens) for each in value]
        return list(zip(*parts, strict=True))
    if not isinstance(value, Tensor) or value.shape[:2] != (1, tokens):
        return [value] * len(layout.buckets)
    rows = value[0] if layout.key_gather is None else layout.key_gather(value[0])
    shapes = [(count, width) for count, width, _ in layout.buckets]
    split = rows.split([count * width for count, width in shapes])
    return [part.unflatten(0, shape) for part, shape in zip(split, shapes, strict=True)]


@contextmanager
def find_leaks(layers: Sequence[nn.Module], border: int) -> Iterator[list[nn.Module]]:
    """Yield a list of the modules that a pass inside this block shows to mix samples: children of
    layers, and layers.

    The pass has two samples, of which the second begins at row `border`. Each module is called
    twice, the second time with other rows of the first sample; it mixes samples if the first token
    of the second sample then gets another output. So every module is judged by itself, whatever
    those before it do.
    """
    leaking: list[nn.Module] = []
    watched = [module for layer in layers for module in (*layer.children(), layer)]
    own = {module: vars(module).get("forward") for module in watched}
    called_again = False

    def compare(module: nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        nonlocal called_again
        output = forward(*args, **kwargs)
        hidden = args[0] if args else kwargs.get("hidden_states")
        mixed = _take_rows(output)
        if called_again or not _has_rows(hidden) or not _has_rows(mixed):
            return output
        other = torch.cat([-hidden[:, :border].flip(1), hidden[:, border:]], dim=1)
        called_again = True
        try:
            again = (
                forward(other, *args[1:], **kwargs)
                if args
                else forward(**(kwargs | {"hidden_states": other}))
            )
        finally:
            called_again = False
        if _differ(mixed[0, border], _take_rows(again)[0, border], hidden[0, border]):
            leaking.append(module)
        return output

    for module in own:
        module.forward = partial(compare, module, module.forward)
    try:
        yield leaking
    finally:
        for module, forward in own.items():
            del module.forward
            if forward is not None:
                module.forward = forward


def _take_rows(output: Any) -> Any:
    """Return what a module makes of its rows, without weights or states that it returns as well."""
    return output[0] if isinstance(output, tuple) else output


def _has_rows(value: Any) -> TypeGuard[Tensor]:
    return isinstance(value, Tensor) and value.ndim == 3 and len(value) == 1


def _differ(once: Tensor, again: Tensor, given: Tensor) -> bool:
    """Return True if two outputs for a token differ by more than sums in another order make them."""
    size = once.abs().max()
    if once.shape == given.shape:
        # What a layer adds to its input may be small beside it.
        size = torch.minimum(size, (once - given).abs().max())
    rounding = 2 * torch.finfo(once.dtype).eps * once.abs()
    return bool(((once - again).abs() > LEAST_LEAK * size + rounding).any())
