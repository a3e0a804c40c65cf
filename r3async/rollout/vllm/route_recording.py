"""What vLLM records of its routers: the experts of each token, and their gates if those are wanted.

With `enable_return_routed_experts` vLLM's own recorder returns the rows of the tokens that a step
fed forward with each output; `core.AnswerBuffer` gathers them in the engine's process, and
`running_requests.RunningRequest` here. The bits of an expert's gate, a float32, travel behind the
ids of a token's experts, through the same buffers, blocks and outputs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from r3async.data.model_shape import RoutingShape
from r3async.data.routes import route_dtype

GATES_KEY = "r3async_gates"
"""Key in vLLM's `additional_config` whose value is True if gates are recorded."""


def join_routes(
    pieces: Sequence[np.ndarray], shape: RoutingShape, moe_layers: Sequence[int]
) -> tuple[np.ndarray, np.ndarray | None]:
    """Return the routes `[n, layers, top_k]` of the MoE layers, which are `moe_layers` of those that
    vLLM returned in pieces, and their gates if it records those."""
    narrow = route_dtype(shape.num_experts)
    if not pieces:
        none = np.empty((0, shape.layers, shape.top_k), narrow)
        return none, none.astype(np.float32) if shape.has_gates else None
    rows = pieces[0] if len(pieces) == 1 else np.concatenate(pieces)
    if len(moe_layers) != rows.shape[1]:
        rows = rows[:, moe_layers]
    return split_gates(rows, narrow) if shape.has_gates else (rows, None)


def split_gates(rows: np.ndarray, dtype: np.dtype) -> tuple[np.ndarray, np.ndarray]:
    """Split what an engine returned, int32 `[n, layers, 2 * top_k]`, into ids of `dtype` and
    float32 gates, `[n, layers, top_k]` each."""
    ids, bits = np.split(rows, 2, axis=2)
    return ids.astype(dtype), np.ascontiguousarray(bits, np.int32).view(np.float32)


def record_gates() -> None:
    """Make vLLM in this process record gates beside routes. Call it before a model is loaded.
    Idempotent."""
    import torch
    from vllm.model_executor.layers.fused_moe import routed_experts_capturer as recorder
    from vllm.model_executor.layers.fused_moe.layer import MoERunner
    from vllm.model_executor.layers.fused_moe.modular_kernel import FusedMoEExpertsMonolithic
    from vllm.model_executor.layers.fused_moe.router.base_router import BaseRouter

    read_shape = recorder._get_routed_experts_shape
    if read_shape.__module__ == __name__:
        return
    manager = recorder.RoutedExpertsManager
    begin = manager.__init__
    build = MoERunner.__init__

    def read_doubled_shape(config: Any) -> tuple[int, int, int]:
        layers, experts, top_k = read_shape(config)
        return layers, experts, 2 * top_k

    def begin_with_gates(self: Any, *args: Any, **kwargs: Any) -> None:
        begin(self, *args, **kwargs)
        self.routed_experts_by_slot = np.zeros(self.routed_experts_by_slot.shape, np.int32)

    def build_with_scale(self: Any, *args: Any, **kwargs: Any) -> None:
        build(self, *args, **kwargs)
        # Some models multiply the sum of the outputs, and not the gates.
        self.router.r3_output_scale = self.routed_scaling_factor

    def set_capture_fn(self: Any, capture: Any) -> None:
        compute = self._compute_routing

        def compute_and_record(*args: Any, **kwargs: Any) -> Any:
            gates, ids = compute(*args, **kwargs)
            bits = (gates.to(torch.float32) * self.r3_output_scale).view(torch.int32)
            capture(torch.cat([ids.to(torch.int32), bits], dim=1))
            return gates, ids

        self._compute_routing = compute_and_record

    def refuse_capture(self: Any, capture: Any) -> None:
        raise ValueError(
            f'the kernel {type(self).__name__} computes gates itself: set routing.gates="learner", '
            "or another generator.engine_args.moe_backend"
        )

    recorder._get_routed_experts_shape = read_doubled_shape
    manager.__init__ = begin_with_gates
    MoERunner.__init__ = build_with_scale
    BaseRouter.set_capture_fn = set_capture_fn
    FusedMoEExpertsMonolithic.set_capture_fn = refuse_capture
