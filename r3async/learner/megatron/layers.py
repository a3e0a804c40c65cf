"""Attention, norms and experts, plugged into Megatron through its layer specifications: the same on CPU and CUDA."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel import (
    ColumnParallelLinear,
    RowParallelLinear,
    all_to_all,
    gather_from_sequence_parallel_region,
)
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe.moe_utils import get_default_pg_collection
from megatron.core.transformer.moe.router_replay import RouterReplay
from megatron.core.transformer.moe.token_dispatcher import MoETokenDispatcher
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset
from torch import Tensor
from torch.nn import Parameter

from r3async.learner.batch import MicroBatch
from r3async.learner.kernels import (
    AttentionPlan,
    DeterministicGather,
    ExpertDispatch,
    WeightedSwiGLU,
    grouped_linear,
    packed_attention,
    plan_attention,
    upload_array,
)
from r3async.learner.megatron.context_parallel import ContextParallelGroup
from r3async.learner.model import MegatronModelShape, RotarySettings
from r3async.learner.replay import RoutingReplay, RowExchange

# Attention and norms, plugged into Megatron through its layer specifications: the same on CPU and CUDA.


@dataclass
class PackedAttentionParams(PackedSeqParams):
    """The parameters of every attention layer for one micro-batch: its attention plan, and the rotary angles.

    `cos` and `sin` are `[n, 1, R / 2]` in the compute dtype, where the first `R` values of a head are rotated. They are
    those of the tokens that this rank has; with `context_parallel` other ranks have the others.
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
    """Rotary embedding of `x [N, heads, D]`, halves convention: the pair (x[i], x[i + D/2]) turns by the angle.

    The gradient turns back, so only the angles are kept for the backward pass.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return _rotate_halves(x, cos, sin)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        cos, sin = ctx.saved_tensors
        return _rotate_halves(grads[0], cos, -sin), None, None


def _rotate_halves(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    left, right = out.chunk(2, dim=-1)
    torch.mul(first, cos, out=left)
    left.addcmul_(second, sin, value=-1)
    torch.mul(second, cos, out=right)
    right.addcmul_(first, sin)
    return out


def apply_rotary(x: Tensor, plan: PackedAttentionParams) -> Tensor:
    """Return `x [N, heads, D]` with its first `R` values rotated."""
    assert plan.cos is not None
    turning = 2 * plan.cos.shape[-1]
    if turning == x.shape[-1]:
        return _RotaryEmbedding.apply(x, plan.cos, plan.sin)
    return torch.cat([_RotaryEmbedding.apply(x[..., :turning], plan.cos, plan.sin), x[..., turning:]], dim=-1)


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
    """Megatron core attention over packed samples (`qkv_format="thd"`), causal, with rotary embedding.

    Megatron's rotary embedding of packed input loops over samples in Python, in every layer; here the model is built
    with `position_embedding_type="none"` and the angles come with the plan.
    """

    def __init__(self, config: TransformerConfig, *args: Any, softmax_scale: float | None = None, **kwargs: Any):
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
        """Compute attention: `query [N, heads, D]`, `key` and `value` `[N, groups, D]` -> `[N, heads, D]`.

        Masks are implied by the plan.
        """
        plan = packed_seq_params
        assert isinstance(plan, PackedAttentionParams), "samples are packed; their plan goes in packed_seq_params"
        return attend_across_ranks(apply_rotary(query, plan), apply_rotary(key, plan), value, plan, self._scale)


class _RMSNormFunction(torch.autograd.Function):
    """RMSNorm of float32 on CPU, where torch's own backward pass is a chain of eight operations.

    With mean 0 and `r = 1 / rms(x)` in place of its own statistics, LayerNorm's backward kernel gives RMSNorm's
    gradient but for the term `-r * mean(grad * weight)`, which is added back. It is 4 times as fast in all.
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
        grad, size = grads[0].contiguous(), x.shape[-1]
        zero = torch.zeros_like(scale)
        grad_x, grad_weight, _ = torch.ops.aten.native_layer_norm_backward(
            grad, x, [size], zero, scale, weight, None, [True, True, False]
        )
        return grad_x.add_(scale * (grad @ weight)[..., None], alpha=1 / size), grad_weight, None


class TorchRMSNorm(torch.nn.RMSNorm):
    """RMSNorm with Megatron's signature.

    Megatron's own wrapper refuses sequence parallelism; this one tags the weight, so that its gradient is reduced over
    the tensor-parallel group.
    """

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-6, **kwargs: Any):
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype)
        self.weight.sequence_parallel = config.sequence_parallel

    def forward(self, x: Tensor) -> Tensor:
        """Normalise `[..., hidden]` over the last dimension."""
        if x.device.type == "cpu" and x.dtype == torch.float32:
            return _RMSNormFunction.apply(x.contiguous(), self.weight, self.eps)
        return super().forward(x)


class AllHeadsRMSNorm(TorchRMSNorm):
    """RMSNorm over all `heads` of a token together, where Megatron normalises each head alone."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-6, *, heads: int, **kwargs: Any):
        super().__init__(config, heads * hidden_size, eps)

    def forward(self, x: Tensor) -> Tensor:
        """Normalise `[..., heads, D]` over the last two dimensions."""
        return super().forward(x.flatten(-2)).view_as(x)


LATENT_NORM_EPS = 1e-6
"""Epsilon of the norms inside latent attention, as in transformers, whatever `config.json` says for the other norms."""


class LatentAttention(torch.nn.Module):
    """Multi-head latent attention (MLA, arXiv 2405.04434) over packed samples, in place of Megatron's self-attention.

    Megatron's rotary embedding of packed input loops over samples, and its kernel needs TransformerEngine.

    Queries, and keys with values, come from low-rank projections, which every rank has of its own tokens; heads are
    divided among tensor-parallel ranks. The last `rope_dim` values of a head are rotated, and those of a key are the
    same for all heads.
    """

    def __init__(self, config: TransformerConfig, *, shape: MegatronModelShape, layer_number: int, **_: Any):
        super().__init__()
        ranks = parallel_state.get_tensor_model_parallel_world_size()
        self._shape, self._num_local_heads, self._is_tensor_parallel = shape, shape.num_heads // ranks, ranks > 1
        low = {"bias": False, "dtype": config.params_dtype}
        up = {"config": config, "init_method": config.init_method, "bias": False}
        if shape.query_rank:
            self.linear_q_down_proj = torch.nn.Linear(shape.hidden_size, shape.query_rank, **low)
            self.q_layernorm = TorchRMSNorm(config, shape.query_rank, LATENT_NORM_EPS)
        wide = shape.num_heads * shape.qk_dim
        self.linear_q_up_proj = ColumnParallelLinear(
            shape.query_rank or shape.hidden_size, wide, gather_output=False, **up
        )
        self.linear_kv_down_proj = torch.nn.Linear(shape.hidden_size, shape.kv_rank + shape.rope_dim, **low)
        self.kv_layernorm = TorchRMSNorm(config, shape.kv_rank, LATENT_NORM_EPS)
        wide = shape.num_heads * (shape.qk_dim - shape.rope_dim + shape.value_dim)
        self.linear_kv_up_proj = ColumnParallelLinear(shape.kv_rank, wide, gather_output=False, **up)
        self.linear_proj = RowParallelLinear(
            shape.num_heads * shape.value_dim, shape.hidden_size, input_is_parallel=True, skip_bias_add=True, **up
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
        plan, s = packed_seq_params, self._shape
        assert isinstance(plan, PackedAttentionParams), "samples are packed; their plan goes in packed_seq_params"
        low = self.q_layernorm(self.linear_q_down_proj(hidden_states)) if s.query_rank else hidden_states
        query = self.linear_q_up_proj(low)[0].view(-1, self._num_local_heads, s.qk_dim)
        latent, turning = self.linear_kv_down_proj(hidden_states).split([s.kv_rank, s.rope_dim], dim=-1)
        if self._is_tensor_parallel:
            turning = gather_from_sequence_parallel_region(turning)
        fixed = s.qk_dim - s.rope_dim
        both = self.linear_kv_up_proj(self.kv_layernorm(latent))[0].view(-1, self._num_local_heads, fixed + s.value_dim)
        key, value = both.split([fixed, s.value_dim], dim=-1)
        alike = self._apply_rotary(turning, plan).expand(-1, self._num_local_heads, -1)
        key = torch.cat([key, alike], dim=-1)
        query = torch.cat([query[..., :fixed], self._apply_rotary(query[..., fixed:], plan)], dim=-1)
        out = attend_across_ranks(query, key, value.contiguous(), plan, s.attention_scale)
        return self.linear_proj(out.flatten(1)[:, None])[0], None

    def _apply_rotary(self, x: Tensor, plan: PackedAttentionParams) -> Tensor:
        """Return `x [N, heads, R]`, rotated.

        Neighbours that turn together are put half a head apart first, in queries and keys alike.
        """
        if self._shape.rotary.interleaved:
            x = x.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2)
        return apply_rotary(x, plan)


# The experts of a layer in two parameters, plugged into Megatron through its layer specifications.


class GroupedExperts(torch.nn.Module):
    """This rank's experts of a layer: `weight1 [E, 2 W, hidden]` (gate over up) and `weight2 [E, hidden, W]`.

    Megatron's own experts need TransformerEngine, or run one after the other.
    """

    def __init__(self, num_local_experts: int, config: TransformerConfig, **_: Any):
        super().__init__()
        hidden, width = config.hidden_size, config.moe_ffn_hidden_size
        self.weight1 = Parameter(torch.empty(num_local_experts, 2 * width, hidden, dtype=config.params_dtype))
        self.weight2 = Parameter(torch.empty(num_local_experts, hidden, width, dtype=config.params_dtype))

    def forward(self, tokens: Tensor, counts: Tensor, gates: Tensor) -> tuple[Tensor, None]:
        """Return the experts' outputs for `tokens [P, hidden]` in the order of experts, and no bias.

        `counts` int64 `[E]` are the tokens of each expert, and `gates [P]` the gates of the tokens.
        """
        wide = grouped_linear(tokens, self.weight1, counts)
        return grouped_linear(WeightedSwiGLU.apply(wide, gates), self.weight2, counts), None


class LocalDispatcher(MoETokenDispatcher):
    """A dispatcher that sends tokens to experts that are all on this rank.

    Megatron's dispatchers read each expert's token count from the device three times a layer, and sum the results in no
    fixed order.
    """

    def dispatch_preprocess(self, hidden_states: Tensor, routing_map: Tensor, probs: Tensor) -> tuple[Tensor, Tensor]:
        """Return the sent rows and their gates, from `[n, 1, hidden]` and twice `[n, E]`."""
        self._shape = hidden_states.shape
        self._dispatch = ExpertDispatch(routing_map, self.config.moe_router_topk)
        return self._dispatch.dispatch_rows(hidden_states.reshape(-1, self._shape[-1])), self._dispatch.gather_gates(
            probs
        )

    def token_dispatch(self, hidden_states: Tensor, probs: Tensor) -> tuple[Tensor, Tensor]:
        return hidden_states, probs

    def dispatch_postprocess(self, hidden_states: Tensor, probs: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return hidden_states, self._dispatch.expert_counts, probs

    def combine_preprocess(self, hidden_states: Tensor) -> Tensor:
        return self._dispatch.combine_outputs(hidden_states)

    def token_combine(self, hidden_states: Tensor) -> Tensor:
        return hidden_states

    def combine_postprocess(self, hidden_states: Tensor) -> Tensor:
        """Restore the shape: `[n, hidden]` -> `[n, 1, hidden]`."""
        return hidden_states.view(self._shape)


class ExchangeDispatcher(LocalDispatcher):
    """A dispatcher that sends tokens to the ranks that have their experts, by all-to-all.

    The host has to know how many rows it sends and receives: once a layer, also if the layer is recomputed. Megatron's
    dispatcher reads from the device five times a pass, and sums the results in no fixed order.

    Rows are sent in the order of experts and then of tokens, and so leave in blocks, one for each rank. They arrive in
    the order of ranks, experts and tokens, and are put into that of experts, ranks and tokens.
    """

    replay: RoutingReplay
    router: int
    """The number of the layer's router among those of this rank."""

    def token_dispatch(self, hidden_states: Tensor, probs: Tensor) -> tuple[Tensor, Tensor]:
        routes = self.replay.current_routes
        exchange = routes.exchanges.get(self.router) if routes is not None and routes.is_recomputing else None
        self._exchange = exchange or self._plan_exchange(self._dispatch.expert_counts)
        if routes is not None:
            routes.exchanges[self.router] = self._exchange
        self._to_experts, self._to_ranks = order_by_expert(self._exchange)
        return self._send(hidden_states), self._send(probs)

    def _plan_exchange(self, sent: Tensor) -> RowExchange:
        """Agree with the other ranks on the rows that everyone sends, from those of each expert, int64 `[E]`."""
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent, group=self.ep_group)
        by_rank = (counts.view(self.ep_size, -1).sum(dim=1) for counts in (sent, received))
        sizes = torch.cat([*by_rank]).tolist()
        return RowExchange(sizes[: self.ep_size], sizes[self.ep_size :], received.view(self.ep_size, -1))

    def _send(self, rows: Tensor) -> Tensor:
        arrived: Tensor = all_to_all(self.ep_group, rows, self._exchange.received, self._exchange.sent)
        return arrived

    def dispatch_postprocess(self, hidden_states: Tensor, probs: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        counts = self._exchange.received_by_expert.sum(dim=0)
        return self._to_experts(hidden_states), counts, self._to_experts(probs)

    def combine_preprocess(self, hidden_states: Tensor) -> Tensor:
        return self._to_ranks(hidden_states)

    def token_combine(self, hidden_states: Tensor) -> Tensor:
        returned: Tensor = all_to_all(self.ep_group, hidden_states, self._exchange.sent, self._exchange.received)
        return returned

    def combine_postprocess(self, hidden_states: Tensor) -> Tensor:
        return super().combine_postprocess(self._dispatch.combine_outputs(hidden_states))


def order_by_expert(exchange: RowExchange) -> tuple[DeterministicGather, DeterministicGather]:
    """Return the gathers of received rows in the order of experts, and of these in the order in which they came."""
    by_expert, total = exchange.received_by_expert, sum(exchange.received)
    ranks, experts = by_expert.shape
    expert_of_block = torch.arange(experts, device=by_expert.device).repeat(ranks)
    expert_of_row = expert_of_block.repeat_interleave(by_expert.flatten(), output_size=total)
    order = expert_of_row.argsort(stable=True)
    back = torch.empty_like(order).index_copy_(0, order, torch.arange(total, device=order.device))
    return DeterministicGather(order, back, None), DeterministicGather(back, order, None)


def use_own_dispatchers(layers: Iterable[Any], config: TransformerConfig) -> None:
    """Give the mixtures among `layers` our dispatchers."""
    dispatcher = LocalDispatcher if config.expert_model_parallel_size == 1 else ExchangeDispatcher
    for layer in layers:
        if isinstance(layer.mlp, MoELayer):
            layer.mlp.token_dispatcher = dispatcher(config, get_default_pg_collection())


# The model: layers of our modules through Megatron's specifications, without fork or patch; and replay in its routers.


def build_layer_spec(config: TransformerConfig, shape: MegatronModelShape, *, moe: bool) -> ModuleSpec:
    """Return the specification of one decoder layer with the modules above."""
    spec = get_gpt_layer_local_spec(
        num_experts=config.num_moe_experts if moe else None, qk_layernorm=config.qk_layernorm, normalization="RMSNorm"
    )
    if shape.kv_rank:
        spec.submodules.self_attention = ModuleSpec(module=LatentAttention, params={"shape": shape})
    else:
        attention = spec.submodules.self_attention.submodules
        attention.core_attention = PackedAttention
        if shape.query_norm == "head":
            attention.q_layernorm = attention.k_layernorm = TorchRMSNorm
        elif shape.query_norm == "whole":
            attention.q_layernorm = ModuleSpec(module=AllHeadsRMSNorm, params={"heads": shape.num_heads})
            attention.k_layernorm = ModuleSpec(module=AllHeadsRMSNorm, params={"heads": shape.num_kv_heads})
    if moe:
        spec.submodules.mlp.submodules.experts = GroupedExperts
    spec.submodules.input_layernorm = spec.submodules.pre_mlp_layernorm = TorchRMSNorm
    return spec


class HiddenStatesModel(GPTModel):
    """A GPTModel whose forward ends before the output layer, so that logits are computed only where they are needed."""

    def _postprocess(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return hidden_states

    def get_output_weight(self) -> Tensor:
        """Return the output matrix, `[vocab of this rank, hidden]`, on the last pipeline stage."""
        if self.share_embeddings_and_output_weights:
            return self.shared_embedding_or_output_weight()
        return self.output_layer.weight


def build_model(config: TransformerConfig, shape: MegatronModelShape) -> HiddenStatesModel:
    """Build this pipeline stage of the decoder."""
    first = get_transformer_layer_offset(config)
    here = shape.moe_pattern[first : first + get_num_layers_to_build(config)]
    specs = [build_layer_spec(config, shape, moe=moe) for moe in here]
    model = HiddenStatesModel(
        config=config,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
        transformer_layer_spec=TransformerBlockSubmodules(layer_specs=specs, layer_norm=TorchRMSNorm),
        # The vocabulary is divided evenly: rows of padding are never a target, and no logit is computed for them.
        vocab_size=shape.vocab_size + -shape.vocab_size % config.tensor_model_parallel_size,
        max_sequence_length=shape.max_positions,
        position_embedding_type="none",
        share_embeddings_and_output_weights=shape.tied_embeddings,
    )
    use_own_dispatchers(model.decoder.layers, config)
    return model


def freeze_padding_embedding(model: HiddenStatesModel, token: int | None, shard: tuple[int, int]) -> None:
    """Keep the embedding of `token`, the model's padding, from being trained, as transformers does (`padding_idx`).

    It is a row of zeros, and a policy may sample the token. The norm behind the embedding multiplies the gradient of a
    row of zeros by `1 / sqrt(eps)`: a thousand. One such token would decide the norm of the whole gradient, which is
    clipped by it. `shard` is (index, count) of the parts into which sequence-parallel ranks split the tokens.
    """
    if token is None or not model.pre_process:
        return
    index, count = shard

    def hold(module: torch.nn.Module, args: Any, kwargs: Any, output: Tensor) -> Tensor:
        """Stop the gradient at padding tokens; `output` is `[N / count, 1, hidden]`."""
        ids: Tensor = kwargs["input_ids"][0].chunk(count)[index]
        return torch.where((ids == token)[:, None, None], output.detach(), output)

    model.embedding.register_forward_hook(hold, with_kwargs=True)


TopKFunction = Callable[..., tuple[Tensor, Tensor]]


class RouterReplayAdapter(RouterReplay):
    """A stand-in for one router's `router_replay`, which asks `replay` about that router.

    With nothing bound, the router behaves exactly like Megatron's. Megatron's own class keeps a class-wide list, a
    queue for the backward pass and no checks: a record with fewer rows than tokens silently leaves the others without
    expert.
    """

    def __init__(self, replay: RoutingReplay, index: int, *, pre_softmax: bool):
        # RouterReplay.__init__ is not called on purpose: it would add the instance to the class-wide list.
        self._replay, self._index, self._pre_softmax = replay, index, pre_softmax
        self.clear_indices()
        self.clear_router_replay_action()

    def _to_probabilities(self, scores: Tensor) -> Tensor:
        """Return probabilities from scores, which are logits unless gates are computed before the choice."""
        return scores if self._pre_softmax else scores.softmax(dim=-1)

    def get_replay_topk(
        self,
        scores: Tensor,
        topk: int,
        num_groups: int | None = None,
        group_topk: int | None = None,
        default_compute_topk: TopKFunction | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Return selected scores and expert ids, `[N, K]` each, for `scores` `[N, experts]`."""
        assert default_compute_topk is not None
        routes = self._replay.current_routes
        if routes is None:
            return default_compute_topk(scores, topk, num_groups, group_topk)
        scores = routes.add_aux_loss(self._index, scores, self._to_probabilities)
        if not routes.has_replayed_routes:
            own_scores, own = default_compute_topk(scores, topk, num_groups, group_topk)
            routes.choose_experts(self._index, own)
            return own_scores, own
        with torch.no_grad():
            own = default_compute_topk(scores, topk, num_groups, group_topk)[1]
        chosen = routes.choose_experts(self._index, own)
        return scores.gather(1, chosen), chosen


def attach_replay(
    model: HiddenStatesModel, *, moe_layers: Sequence[int], shard: tuple[int, int], cp_size: int = 1, **settings: Any
) -> RoutingReplay:
    """Put `RoutingReplay` into the routers of the decoder's layers that this rank has, found by global layer number.

    Routers elsewhere, such as those of multi-token prediction, stay as they are.

    Args:
        moe_layers: Global numbers (from 1) of all MoE layers of the model, in order: column `l` of a record belongs to
            `moe_layers[l]`.
        cp_size: The number of ranks among which the model's input tokens are divided.
    """
    mixtures = {layer.layer_number: layer.mlp for layer in model.decoder.layers if isinstance(layer.mlp, MoELayer)}
    columns = [list(moe_layers).index(number) for number in mixtures]
    replay = RoutingReplay(num_moe_layers=len(moe_layers), moe_layer_indices=columns, token_shard=shard, **settings)
    for index, mixture in enumerate(mixtures.values()):
        mixture.router.router_replay = RouterReplayAdapter(
            replay, index, pre_softmax=model.config.moe_router_pre_softmax
        )
        mixture.token_dispatcher.replay, mixture.token_dispatcher.router = replay, index
    # Checked before any collective: ranks that wait for each other's tokens would wait forever.
    model.register_forward_pre_hook(lambda module, args: replay.check_token_count(cp_size * args[0].numel()))
    return replay
