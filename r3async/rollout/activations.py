"""Records a decoder's activations stage by stage, with hooks that work on vLLM, transformers and
Megatron models.

A stage is named by layer and part: `3.attention.in` is the input of the fourth layer's
attention, `3.attention.out` its output. The model's computation is not changed, and all hooks
are removed at the end.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

NORM_NAMES = {
    "input_norm": ("input_layernorm",),
    "post_norm": ("post_attention_layernorm", "pre_mlp_layernorm"),
}
PART_NAMES = {"attention": ("self_attn", "self_attention"), "mlp": ("mlp", "block_sparse_moe")}
"""Parts of a layer, each with the attribute names that models give it."""


class ActivationError(RuntimeError):
    """A model whose stages cannot be recorded."""


class ActivationRecorder:
    """A recorder of one model's activations, from its construction until `finish_recording`.

    It serves one request at a time: rows are in the order of the forward passes.

    Stages: `embedding.out`; for each layer `input_norm`, `attention`, `post_norm` and `mlp`, each
    with `.in` and `.out`; for a mixture of experts also `router.out` (logits `[T, experts]`),
    `choice.out` (ids `[T, K]`) and `gates.out` `[T, K]`, where they exist; then `final_norm.in` and
    `.out`. The input of a norm is the residual stream. All other stages are `[T, hidden]`.

    Raises `ActivationError` for a model without a list of layers.
    """

    def __init__(self, model: nn.Module):
        decoder = next(
            (m for m in model.modules() if isinstance(getattr(m, "layers", None), nn.ModuleList)),
            None,
        )
        if decoder is None:
            raise ActivationError(f"{type(model).__name__} has no list of decoder layers")
        self.dtype = ""
        """Name of the dtype of the embedding's output; "" before the first pass."""
        self._rows_by_name: dict[str, list[Tensor]] = {}
        self._undo_hooks: list[Callable[[], object]] = []
        embedding = _find_module(decoder, "embed_tokens") or _find_module(model, "embedding")
        if embedding is not None:
            self._undo_hooks.append(embedding.register_forward_hook(self._record_embedding).remove)
        for index, layer in enumerate(decoder.layers):
            for stage, names in NORM_NAMES.items():
                self._hook_norm(f"{index}.{stage}", _find_module(layer, *names))
            for stage, names in PART_NAMES.items():
                self._hook_part(f"{index}.{stage}", _find_module(layer, *names))
            mlp = _find_module(layer, *PART_NAMES["mlp"])
            if mlp is not None:
                self._hook_router(str(index), mlp)
        self._hook_norm("final_norm", _find_module(decoder, "norm", "final_layernorm"))

    def finish_recording(self) -> dict[str, Tensor]:
        """Stop recording and return the rows of each stage, float32 or int64, in host memory."""
        for undo in self._undo_hooks:
            undo()
        self._undo_hooks.clear()
        seen = self._rows_by_name
        self._rows_by_name = {}
        return {name: torch.cat(rows) for name, rows in seen.items()}

    def _record_rows(self, name: str, value: Tensor) -> None:
        kept = value.detach().to(
            "cpu", torch.float32 if value.is_floating_point() else torch.int64, copy=True
        )
        self._rows_by_name.setdefault(name, []).append(kept.reshape(-1, kept.shape[-1]))

    def _record_embedding(self, module: nn.Module, args: Any, out: Any) -> None:
        self.dtype = str(_first_output(out).dtype).removeprefix("torch.")
        self._record_rows("embedding.out", _first_output(out))

    def _hook_norm(self, name: str, module: nn.Module | None) -> None:
        def after(module: nn.Module, args: Any, kwargs: Any, out: Any) -> None:
            # vLLM's norm first adds its input to the residual stream, then normalises it,
            # and returns both.
            fused = isinstance(out, tuple)
            self._record_rows(f"{name}.in", out[1] if fused else _first_float_tensor(args, kwargs))
            self._record_rows(f"{name}.out", _first_output(out))

        if module is not None:
            self._undo_hooks.append(module.register_forward_hook(after, with_kwargs=True).remove)

    def _hook_part(self, name: str, module: nn.Module | None) -> None:
        def before(module: nn.Module, args: Any, kwargs: Any) -> None:
            self._record_rows(f"{name}.in", _first_float_tensor(args, kwargs))

        def after(module: nn.Module, args: Any, out: Any) -> None:
            self._record_rows(f"{name}.out", _first_output(out))

        if module is not None:
            self._undo_hooks.append(
                module.register_forward_pre_hook(before, with_kwargs=True).remove
            )
            self._undo_hooks.append(module.register_forward_hook(after).remove)

    def _hook_router(self, layer: str, mlp: nn.Module) -> None:
        chooser = getattr(getattr(mlp, "experts", None), "router", None)
        if hasattr(chooser, "select_experts"):  # vLLM's router is no module
            self._wrap_method(
                chooser,
                "select_experts",
                lambda out, kwargs: self._record_choice(layer, kwargs["router_logits"], *out),
            )
        elif (router := _find_module(mlp, "router")) is not None:
            # Megatron's router has a column for each expert.
            self._wrap_method(
                router, "gating", lambda out, kwargs: self._record_rows(f"{layer}.router.out", out)
            )
            self._undo_hooks.append(
                router.register_forward_hook(
                    lambda m, a, out: self._record_routing_map(layer, *out)
                ).remove
            )
        elif (gate := _find_module(mlp, "gate")) is not None:
            hook = lambda m, a, out: self._record_choice(layer, out[0], *out[1:])  # noqa: E731
            self._undo_hooks.append(gate.register_forward_hook(hook).remove)

    def _wrap_method(
        self, owner: Any, name: str, record: Callable[[Any, dict[str, Any]], None]
    ) -> None:
        """Call `record(result, keyword arguments)` after each call of that method, until
        `finish_recording`."""
        method = getattr(owner, name)

        def seen(*args: Any, **kwargs: Any) -> Any:
            out = method(*args, **kwargs)
            record(out, kwargs)
            return out

        setattr(owner, name, seen)
        self._undo_hooks.append(lambda: delattr(owner, name))

    def _record_choice(self, layer: str, logits: Tensor, gates: Tensor, ids: Tensor) -> None:
        self._record_rows(f"{layer}.router.out", logits)
        self._record_rows(f"{layer}.gates.out", gates.float())
        self._record_rows(f"{layer}.choice.out", ids)

    def _record_routing_map(self, layer: str, gates: Tensor, chosen: Tensor) -> None:
        rows = chosen.reshape(-1, chosen.shape[-1])
        ids = rows.nonzero()[:, 1].reshape(len(rows), -1)
        self._record_rows(f"{layer}.choice.out", ids)
        self._record_rows(f"{layer}.gates.out", gates.reshape(rows.shape).gather(1, ids))


def _find_module(module: nn.Module, *names: str) -> nn.Module | None:
    found = (getattr(module, name, None) for name in names)
    return next((part for part in found if isinstance(part, nn.Module)), None)


def _first_output(out: Any) -> Tensor:
    return out[0] if isinstance(out, tuple) else out


def _first_float_tensor(args: Any, kwargs: Any) -> Tensor:
    """Return the first argument that is a floating-point tensor; positions are integers."""
    return next(
        a for a in (*args, *kwargs.values()) if isinstance(a, Tensor) and a.is_floating_point()
    )
