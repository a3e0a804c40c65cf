"""Attention and norms, plugged into Megatron by its layer specifications, on CPU and CUDA alike."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from megatron.core import parallel_state
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel import (
    ColumnParallelLinear,
    RowParallelLinear,
    gather_from_sequence_parallel_region,
)
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from r3async.learner.device_upload import upload_array
from r3async.learner.megatron.context_parallel import ContextParallelGroup
from r3async.learner.micro_batches import MicroBatch
from r3async.learner.model import MegatronModelShape, RotarySettings
from r3async.learner.packed_attention import AttentionPlan, packed_attention, plan_attention


@dataclass
class PackedAttentionParams(PackedSeqParams):
    """The parameters of every attention layer for one micro-batch: its attention plan, and
    the rotary angles.

    `cos` and `sin` are `[n, 1, R / 2]` in the compute dtype, where the first `R` values of a head
    are rotated. They are those of the tokens that this rank has; with `context_parallel` other
    ranks have the others.
    """

    attention: AttentionPlan | None = None
    context_parallel: ContextParallelGroup | None = None
    cos: Tensor | None = None
    sin: Tensor | None = None


def build_attention_params(
    micro_batch: MicroBatch,
    *,
    rotary: RotarySettings,
    dtype: torch.dtype,
    device: torch.device,
    context: ContextParallelGroup | None = None,
) -> PackedAttentionParams:
    """Build the attention parameters for the samples of a micro-batch."""
    frequency = torch.tensor(rotary.frequencies, dtype=torch.float32)
    here = context.local_rows(micro_batch.num_tokens) if context else slice(None)
    angle = torch.from_numpy(micro_batch.positions[here]).float()[:, None, None] * frequency
    cu = upload_array(micro_batch.cu_seqlens.astype(np.int32), device)
    longest = int(micro_batch.segment_lengths.max())
    return PackedAttentionParams(
        qkv_format="thd",
        cu_seqlens_q=cu,
        cu_seqlens_kv=cu,
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
        attention=plan_attention(micro_batch.cu_seqlens, device, micro_batch.prefixes),
        context_parallel=context,
        cos=upload_array((angle.cos() * rotary.scale).to(dtype), device),
        sin=upload_array((angle.sin() * rotary.scale).to(dtype), device),
    )


class _RotaryEmbedding(torch.autograd.Function):
    """Rotary embedding of `x [N, heads, D]`, halves convention: the pair (x[i], x[i + D/2])
    turns by the angle.

    The gradient turns back, so only the angles are kept for the backward pass.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return _rotate_halves(x, cos, sin, direction=1)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        cos, sin = ctx.saved_tensors
        return _rotate_halves(grads[0], cos, sin, direction=-1), None, None


def _rotate_halves(x: Tensor, cos: Tensor, sin: Tensor, *, direction: int) -> Tensor:
    halves = x.unflatten(-1, (2, -1))
    out = halves * cos[..., None, :]
    first, second = halves.unbind(dim=-2)
    left, right = out.unbind(dim=-2)
    left.addcmul_(second, sin, value=-direction)
    right.addcmul_(first, sin, value=direction)
    return out.flatten(-2)


def apply_rotary(x: Tensor, plan: PackedAttentionParams) -> Tensor:
    """Return `x [N, heads, D]` with its first `R` values rotated."""
    assert plan.cos is not None
    turning = 2 * plan.cos.shape[-1]
    if turning == x.shape[-1]:
        return _RotaryEmbedding.apply(x, plan.cos, plan.sin)
    return torch.cat(
        [_RotaryEmbedding.apply(x[..., :turning], plan.cos, plan.sin), x[..., turning:]], dim=-1
    )


def attend_across_ranks(
    query: Tensor, key: Tensor, value: Tensor, plan: PackedAttentionParams, scale: float | None
) -> Tensor:
    """Compute attention over the whole micro-batch for this rank's tokens.

    `query [n, heads, D]`, `key` and `value` `[n, groups, D]` -> `[n, heads, D]`.
    """
    assert plan.attention is not None
    context = plan.context_parallel
    if context is None:
        return packed_attention(query, key, value, plan.attention, scale)
    query, key, value = (context.to_heads(x) for x in (query, key, value))
    return context.to_tokens(packed_attention(query, key, value, plan.attention, scale))


class PackedAttention(torch.nn.Module):
    """Megatron core attention over packed samples (`qkv_format="thd"`), causal, with
    rotary embedding.

    Megatron's rotary embedding of packed input loops over samples in Python, in every layer; here
    the model is built with `position_embedding_type="none"` and the angles come with the plan.
    """

    def __init__(
        self,
        config: TransformerConfig,
        *args: Any,
        softmax_scale: float | None = None,
        **kwargs: Any,
    ):
        super().__init__()
        if config.attention_dropout:
            raise ValueError("attention dropout is not supported")
        self._scale = softmax_scale

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        *args: Any,
        packed_seq_params: PackedAttentionParams | None = None,
        **kwargs: Any,
    ) -> Tensor:
        """Compute attention: `query [N, heads, D]`, `key` and `value` `[N, groups, D]` ->
        `[N, heads, D]`.

        Masks are implied by the plan.
        """
        plan = packed_seq_params
        assert isinstance(plan, PackedAttentionParams), (
            "samples are packed; their plan goes in packed_seq_params"
        )
        return attend_across_ranks(
            apply_rotary(query, plan), apply_rotary(key, plan), value, plan, self._scale
        )


class _RMSNormFunction(torch.autograd.Function):
    """RMSNorm of float32 on CPU, where torch's own backward pass is a chain of eight operations.

    With mean 0 and `r = 1 / rms(x)` in place of its own statistics, LayerNorm's backward kernel
    gives RMSNorm's gradient but for the term `-r * mean(grad * weight)`, which is added back. It is
    4 times as fast in all.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        scale = norm.square_().div_(x.shape[-1]).add_(eps).rsqrt_()
        ctx.save_for_backward(x, weight, scale)
        return (x * scale).mul_(weight)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, scale = ctx.saved_tensors
        grad = grads[0].contiguous()
        size = x.shape[-1]
        zero = torch.zeros_like(scale)
        grad_x, grad_weight, _ = torch.ops.aten.native_layer_norm_backward(
            grad, x, [size], zero, scale, weight, None, [True, True, False]
        )
        return grad_x.add_(scale * (grad @ weight)[..., None], alpha=1 / size), grad_weight, None


class TorchRMSNorm(torch.nn.RMSNorm):
    """RMSNorm with Megatron's signature.

    Megatron's own wrapper refuses sequence parallelism; this one tags the weight, so that its
    gradient is reduced over the tensor-parallel group.
    """

    def __init__(
        self, config: TransformerConfig, hidden_size: int, eps: float = 1e-6, **kwargs: Any
    ):
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype)
        self.weight.sequence_parallel = config.sequence_parallel

    def forward(self, x: Tensor) -> Tensor:
        """Normalise `[..., hidden]` over the last dimension."""
        if x.device.type == "cpu" and x.dtype == torch.float32:
            return _RMSNormFunction.apply(x.contiguous(), self.weight, self.eps)
        return super().forward(x)


class AllHeadsRMSNorm(TorchRMSNorm):
    """RMSNorm over all `heads` of a token together, where Megatron normalises each head alone."""

    def __init__(
        self,
        config: TransformerConfig,
        hidden_size: int,
        eps: float = 1e-6,
        *,
        heads: int,
        **kwargs: Any,
    ):
        super().__init__(config, heads * hidden_size, eps)

    def forward(self, x: Tensor) -> Tensor:
        """Normalise `[..., heads, D]` over the last two dimensions."""
        return super().forward(x.flatten(-2)).view_as(x)


LATENT_NORM_EPS = 1e-6
"""Epsilon of the norms inside latent attention, as in transformers, whatever `config.json` says for
the other norms."""


class LatentAttention(torch.nn.Module):
    """Multi-head latent attention (MLA, arXiv 2405.04434) over packed samples, in place of
    Megatron's self-attention.

    Megatron's rotary embedding of packed input loops over samples, and its kernel needs
    TransformerEngine.

    Queries, and keys with values, come from low-rank projections, which every rank has of its own
    tokens; heads are divided among tensor-parallel ranks. The last `rope_dim` values of a head are
    rotated, and those of a key are the same for all heads.
    """

    def __init__(
        self, config: TransformerConfig, *, shape: MegatronModelShape, layer_number: int, **_: Any
    ):
        super().__init__()
        ranks = parallel_state.get_tensor_model_parallel_world_size()
        self._shape = shape
        self._num_local_heads = shape.num_heads // ranks
        self._is_tensor_parallel = ranks > 1
        low = {"bias": False, "dtype": config.params_dtype}
        up = {"config": config, "init_method": config.init_method, "bias": False}
        if shape.query_rank:
            self.linear_q_down_proj = torch.nn.Linear(shape.hidden_size, shape.query_rank, **low)
            self.q_layernorm = TorchRMSNorm(config, shape.query_rank, LATENT_NORM_EPS)
        wide = shape.num_heads * shape.qk_dim
        self.linear_q_up_proj = ColumnParallelLinear(
            shape.query_rank or shape.hidden_size, wide, gather_output=False, **up
        )
        self.linear_kv_down_proj = torch.nn.Linear(
            shape.hidden_size, shape.kv_rank + shape.rope_dim, **low
        )
        self.kv_layernorm = TorchRMSNorm(config, shape.kv_rank, LATENT_NORM_EPS)
        wide = shape.num_heads * (shape.qk_dim - shape.rope_dim + shape.value_dim)
        self.linear_kv_up_proj = ColumnParallelLinear(
            shape.kv_rank, wide, gather_output=False, **up
        )
        self.linear_proj = RowParallelLinear(
            shape.num_heads * shape.value_dim,
            shape.hidden_size,
            input_is_parallel=True,
            skip_bias_add=True,
            **up,
        )

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        *,
        packed_seq_params: PackedAttentionParams | None = None,
        **_: Any,
    ) -> tuple[Tensor, None]:
        """Compute attention: `hidden_states [N / tp, 1, hidden]` -> the same shape, and no bias."""
        plan = packed_seq_params
        s = self._shape
        assert isinstance(plan, PackedAttentionParams), (
            "samples are packed; their plan goes in packed_seq_params"
        )
        low = (
            self.q_layernorm(self.linear_q_down_proj(hidden_states))
            if s.query_rank
            else hidden_states
        )
        query = self.linear_q_up_proj(low)[0].view(-1, self._num_local_heads, s.qk_dim)
        latent, turning = self.linear_kv_down_proj(hidden_states).split(
            [s.kv_rank, s.rope_dim], dim=-1
        )
        if self._is_tensor_parallel:
            turning = gather_from_sequence_parallel_region(turning)
        fixed = s.qk_dim - s.rope_dim
        both = self.linear_kv_up_proj(self.kv_layernorm(latent))[0].view(
            -1, self._num_local_heads, fixed + s.value_dim
        )
        key, value = both.split([fixed, s.value_dim], dim=-1)
        alike = self._apply_rotary(turning, plan).expand(-1, self._num_local_heads, -1)
        key = torch.cat([key, alike], dim=-1)
        query = torch.cat(
            [query[..., :fixed], self._apply_rotary(query[..., fixed:], plan)], dim=-1
        )
        out = attend_across_ranks(query, key, value.contiguous(), plan, s.attention_scale)
        return self.linear_proj(out.flatten(1)[:, None])[0], None

    def _apply_rotary(self, x: Tensor, plan: PackedAttentionParams) -> Tensor:
        """Return `x [N, heads, R]`, rotated.

        Neighbours that turn together are put half a head apart first, in queries and keys alike.
        """
        if self._shape.rotary.interleaved:
            x = x.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2)
        return apply_rotary(x, plan)
