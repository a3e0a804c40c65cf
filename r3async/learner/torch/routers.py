"""Routers of any transformers mixture of experts, found by what they do, and replay in them.

A router is the module of a decoder layer whose forward calls `torch.topk(scores [N, experts],
top_k)`. Replay changes the result of exactly that call, so a model's own scoring, normalisation,
scaling and dtypes stay as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from r3async.data.model_shape import RoutingShape
from r3async.learner.replay import MicroBatchRoutes, RoutingReplay
from r3async.learner.results import LearnerError

_TOPK_FUNCTIONS = (torch.topk, torch.Tensor.topk)


def is_expert_choice(scores: Tensor, ids: Tensor, shape: RoutingShape | None) -> bool:
    """Return True if a top-k over `scores` that returned `ids` chose experts.

    Routers may also call top-k over groups of experts. In a model whose `config.json` mentions no
    experts, any top-k over rows may be a choice of experts.
    """
    return scores.ndim == 2 and (
        shape is None or (scores.shape[1], ids.shape[1]) == (shape.num_experts, shape.top_k)
    )


class TopKInterceptor(TorchFunctionMode):
    """A mode in which the caller of a top-k gets what `on_topk` returns for its result."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        return (
            self.on_topk(args[0] if args else (kwargs or {})["input"], result)
            if func in _TOPK_FUNCTIONS
            else result
        )

    def on_topk(self, scores: Tensor, result: Any) -> Any:
        raise NotImplementedError


class RouterSearch(TopKInterceptor):
    """A mode that records which module of which layer chooses experts.

    The values of a choice by a router that chose among groups of experts first come back as NaN. A
    model that uses them (DeepSeek-V2's group-limited routers do) takes gate weights from scores in
    which the other groups are masked, and recorded experts of those groups would have none. A model
    that reads its weights from the whole scores (DeepSeek-V3, GLM-4) does not notice.

    Attributes:
        routers: By layer index, the modules in whose forward a choice was made, one entry
            for each choice.
        grouped_routers: The modules that chose among groups of experts first.
    """

    def __init__(self, layers: Sequence[nn.Module], shape: RoutingShape | None):
        super().__init__()
        self.routers: dict[int, list[nn.Module]] = {}
        self._layers = layers
        self._shape = shape
        self.grouped_routers: set[nn.Module] = set()
        self._module_stack: list[tuple[int, nn.Module]] = []
        self._handles: list[Any] = []

    def __enter__(self) -> RouterSearch:
        for index, layer in enumerate(self._layers):
            for module in layer.modules():
                self._handles.append(
                    module.register_forward_pre_hook(partial(self._push_module, index))
                )
                self._handles.append(
                    module.register_forward_hook(self._pop_module, always_call=True)
                )
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        for handle in self._handles:
            handle.remove()

    def _push_module(self, index: int, module: nn.Module, _: Any) -> None:
        self._module_stack.append((index, module))

    def _pop_module(self, *_: Any) -> None:
        self._module_stack.pop()

    def on_topk(self, scores: Tensor, result: Any) -> Any:
        if not self._module_stack:
            return result
        index, module = self._module_stack[-1]
        if not is_expert_choice(scores, result.indices, self._shape):
            self.grouped_routers.add(module)
            return result
        self.routers.setdefault(index, []).append(module)
        return (
            _make_topk_result(torch.full_like(result.values, torch.nan), result.indices)
            if module in self.grouped_routers
            else result
        )


class _ReplayInterceptor(TopKInterceptor):
    """A mode in which a router of MoE layer `index` chooses the experts of the bound `routes`."""

    def __init__(self, shape: RoutingShape, routes: MicroBatchRoutes, index: int, *, logits: bool):
        super().__init__()
        self.choice_count = 0
        self._shape = shape
        self._routes = routes
        self._index = index
        self._to_probabilities = partial(torch.softmax, dim=-1) if logits else _to_probabilities

    def on_topk(self, scores: Tensor, result: Any) -> Any:
        if not is_expert_choice(scores, result.indices, self._shape):
            return result
        self.choice_count += 1
        balanced = self._routes.add_aux_loss(self._index, scores, self._to_probabilities)
        chosen = self._routes.choose_experts(self._index, result.indices)
        same = balanced is scores and chosen is result.indices
        return result if same else _make_topk_result(_gather_scores(balanced, chosen), chosen)


LEAST_SCORE = 1e-30
"""The least score of a replayed expert: sums of such scores, and their inverses, are
float32 numbers."""


def _gather_scores(scores: Tensor, chosen: Tensor) -> Tensor:
    """Return the scores `[N, K]` of the chosen experts. Probabilities below `LEAST_SCORE` count as
    that, without gradient.

    A router may have no probability left for any expert that is replayed, and would divide 0 by 0
    when it makes gates of them.
    """
    found = scores.gather(1, chosen)
    return torch.where((found >= 0) & (found < LEAST_SCORE), LEAST_SCORE, found)


def _to_probabilities(scores: Tensor) -> Tensor:
    """Normalise scores, which are probabilities, or sigmoids that become probabilities when
    they are normalised."""
    return scores / scores.sum(dim=-1, keepdim=True)


def _make_topk_result(values: Tensor, ids: Tensor) -> Any:
    return torch.return_types.topk((values, ids))


def check_routers(
    found: dict[int, list[nn.Module]], shape: RoutingShape | None, expected: Sequence[int]
) -> list[nn.Module]:
    """Return one router for each of the `expected` layers, in order.

    Raises `LearnerError` if the model's layers do not choose experts where its `config.json` says
    so: the engine numbers the layers of its records by that file.
    """
    if sorted(found) != list(expected):
        call = (
            f"torch.topk(scores [N, {shape.num_experts}], {shape.top_k})"
            if shape
            else "torch.topk(scores [N, experts], k)"
        )
        raise LearnerError(
            f"config.json says that layers {list(expected)} are mixtures of experts, but a call of "
            f"{call} was seen in layers {sorted(found)}: routes of this model cannot be replayed"
        )
    for index in expected:
        if len(found[index]) != 1:
            names = ", ".join(type(m).__name__ for m in found[index])
            raise LearnerError(
                f"layer {index} chooses experts {len(found[index])} times, in {names}: which of "
                "them is recorded is not known"
            )
    return [found[index][0] for index in expected]


def attach_replay(
    routers: Sequence[nn.Module], shape: RoutingShape, replay: RoutingReplay, *, logits: bool
) -> None:
    """Make the routers use the experts from `replay` whenever a micro-batch is bound.

    With `logits`, they choose among logits instead of probabilities. Their `forward` is replaced
    instead of hooked, so that a recomputed forward pass goes through it as well.
    """
    for index, router in enumerate(routers):
        router.forward = partial(
            _forward_with_replay,
            router.forward,
            type(router).__name__,
            index,
            shape,
            replay,
            logits,
        )


def _replace_gates(name: str, routes: MicroBatchRoutes, index: int, output: Any) -> Any:
    """Return the output of router `name`, which is logits, gates and ids `[N, K]`, with the gates
    of `routes`."""
    match output:
        case (_, Tensor() as gates, Tensor() as ids) if (
            gates.shape == ids.shape and gates.is_floating_point() > ids.is_floating_point()
        ):
            return output[0], routes.replace_gates(index, gates, ids), ids
    raise LearnerError(
        f'router {name} does not return logits, gates and experts: set routing.gates="learner"'
    )


def _forward_with_replay(
    forward: Callable[..., Any],
    name: str,
    index: int,
    shape: RoutingShape,
    replay: RoutingReplay,
    logits: bool,
    *args: Any,
    **kwargs: Any,
) -> Any:
    routes = replay.current_routes
    if routes is None:
        return forward(*args, **kwargs)
    with _ReplayInterceptor(shape, routes, index, logits=logits) as mode:
        output = forward(*args, **kwargs)
    if routes.has_gates:
        output = _replace_gates(name, routes, index, output)
    if mode.choice_count != 1:
        raise LearnerError(
            f"router {name} of MoE layer {index} chose experts {mode.choice_count} times in "
            "one forward pass"
        )
    return output
