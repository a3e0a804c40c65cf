"""Sub-modules plugged into Megatron through its layer specifications: the same on CPU and CUDA, no fork, no patch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe.router_replay import RouterReplay
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset
from torch import Tensor

from r3async.learner.attention import AttentionPlan, packed_attention, plan_attention
from r3async.learner.batch.packing import MicroBatch
from r3async.learner.replay import RoutingReplay


@dataclass
class PackedPlan(PackedSeqParams):
    """What every attention layer needs for one micro-batch: how it attends, and the rotary angles.

    `cos`, `sin`: `[N, 1, head_dim / 2]` in the compute dtype.
    """

    attention: AttentionPlan | None = None
    cos: Tensor | None = None
    sin: Tensor | None = None


def make_plan(
    micro_batch: MicroBatch, *, head_dim: int, rope_theta: float, dtype: torch.dtype, device: torch.device
) -> PackedPlan:
    """Plan for the samples of a micro-batch."""
    frequency = 1.0 / rope_theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
    angle = torch.from_numpy(micro_batch.positions).float()[:, None, None] * frequency
    cu = torch.from_numpy(micro_batch.cu_seqlens.astype(np.int32)).to(device)
    longest = int(micro_batch.lengths.max())
    return PackedPlan(
        qkv_format="thd",
        cu_seqlens_q=cu,
        cu_seqlens_kv=cu,
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
        attention=plan_attention(micro_batch.cu_seqlens, device, micro_batch.prefixes),
        cos=angle.cos().to(device, dtype),
        sin=angle.sin().to(device, dtype),
    )


class _Rotate(torch.autograd.Function):
    """Rotary embedding of `x [N, heads, D]`, halves convention: the pair (x[i], x[i + D/2]) turns by the angle.

    The gradient turns back, so nothing but the angles is kept for the backward pass.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return _turned(x, cos, sin)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        cos, sin = ctx.saved_tensors
        return _turned(grads[0], cos, -sin), None, None


def _turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    left, right = out.chunk(2, dim=-1)
    torch.mul(first, cos, out=left)
    left.addcmul_(second, sin, value=-1)
    torch.mul(second, cos, out=right)
    right.addcmul_(first, sin)
    return out


class PackedAttention(torch.nn.Module):
    """Megatron core attention over packed samples (`qkv_format="thd"`), causal, with rotary embedding.

    Megatron's rotary embedding of packed input loops over samples in Python, in every layer; here the model is built with
    `position_embedding_type="none"` and the angles come with the plan.
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
        packed_seq_params: PackedPlan | None = None,
        **kwargs: Any,
    ) -> Tensor:
        """`query [N, heads, D]`, `key` and `value` `[N, groups, D]` -> `[N, heads, D]`. Masks are implied by the plan."""
        plan = packed_seq_params
        assert isinstance(plan, PackedPlan), "samples are packed; their plan goes in packed_seq_params"
        query, key = _Rotate.apply(query, plan.cos, plan.sin), _Rotate.apply(key, plan.cos, plan.sin)
        assert plan.attention is not None
        return packed_attention(query, key, value, plan.attention, self._scale)


class _RMSNorm(torch.autograd.Function):
    """RMSNorm of float32 on CPU, where torch's own backward pass is a chain of eight operations.

    With mean 0 and `r = 1 / rms(x)` in their place, LayerNorm's backward kernel gives RMSNorm's gradient but for the term
    `-r * mean(grad * weight)`, which is added back. It is 4 times as fast in all.
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
    """RMSNorm with Megatron's signature. Megatron's own wrapper refuses sequence parallelism; this one tags the weight, so
    that its gradient is reduced over the tensor-parallel group."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-6, **kwargs: Any):
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype)
        self.weight.sequence_parallel = config.sequence_parallel

    def forward(self, x: Tensor) -> Tensor:
        """`[..., hidden]`, normalised over the last dimension."""
        if x.device.type == "cpu" and x.dtype == torch.float32:
            return _RMSNorm.apply(x.contiguous(), self.weight, self.eps)
        return super().forward(x)


def layer_spec(config: TransformerConfig, *, moe: bool) -> ModuleSpec:
    """Specification of one decoder layer with the modules above."""
    spec = get_gpt_layer_local_spec(
        num_experts=config.num_moe_experts if moe else None, qk_layernorm=config.qk_layernorm, normalization="RMSNorm"
    )
    attention = spec.submodules.self_attention.submodules
    attention.core_attention = PackedAttention
    if config.qk_layernorm:
        attention.q_layernorm = attention.k_layernorm = TorchRMSNorm
    spec.submodules.input_layernorm = spec.submodules.pre_mlp_layernorm = TorchRMSNorm
    return spec


class HiddenStatesModel(GPTModel):
    """A GPTModel whose forward ends before the output layer, so that logits are made only where they are needed."""

    def _postprocess(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return hidden_states

    def output_weight(self) -> Tensor:
        """`[vocab of this rank, hidden]`, on the last pipeline stage."""
        if self.share_embeddings_and_output_weights:
            return self.shared_embedding_or_output_weight()
        return self.output_layer.weight


def build_model(
    config: TransformerConfig, *, moe_pattern: Sequence[bool], vocab_size: int, max_positions: int, tied: bool
) -> HiddenStatesModel:
    """This pipeline stage of the decoder with one layer per entry of `moe_pattern` (whether its MLP is a mixture of
    experts)."""
    first = get_transformer_layer_offset(config)
    here = moe_pattern[first : first + get_num_layers_to_build(config)]
    specs = [layer_spec(config, moe=moe) for moe in here]
    return HiddenStatesModel(
        config=config,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
        transformer_layer_spec=TransformerBlockSubmodules(layer_specs=specs, layer_norm=TorchRMSNorm),
        # The vocabulary is shared out evenly: rows of padding are never a target, and no logit is taken of them.
        vocab_size=vocab_size + -vocab_size % config.tensor_model_parallel_size,
        max_sequence_length=max_positions,
        position_embedding_type="none",
        share_embeddings_and_output_weights=tied,
    )


def hold_padding(model: HiddenStatesModel, token: int | None, shard: tuple[int, int]) -> None:
    """Keep the embedding of `token`, the model's padding, from being trained: as transformers does (`padding_idx`).

    It is a row of zeros, and a policy may sample the token. The norm behind the embedding multiplies the gradient of a row of
    zeros by `1 / sqrt(eps)`: a thousand. One such token would decide the norm of the whole gradient, which is clipped by it.
    `shard`: (index, count) of the parts into which sequence-parallel ranks split the tokens.
    """
    if token is None or not model.pre_process:
        return
    index, count = shard

    def hold(module: torch.nn.Module, args: Any, kwargs: Any, output: Tensor) -> Tensor:
        """`output` `[N / count, 1, hidden]`."""
        ids: Tensor = kwargs["input_ids"][0].chunk(count)[index]
        return torch.where((ids == token)[:, None, None], output.detach(), output)

    model.embedding.register_forward_hook(hold, with_kwargs=True)


TopK = Callable[..., tuple[Tensor, Tensor]]


class ReplayedRouter(RouterReplay):
    """Stands in one router's `router_replay`, and asks `replay` about that router. With nothing bound, the router is exactly
    Megatron's.

    Megatron's own class keeps a class-wide list, a queue for the backward pass and no checks: a record with fewer rows
    than tokens silently leaves the others without expert.
    """

    def __init__(self, replay: RoutingReplay, index: int, *, pre_softmax: bool):
        # RouterReplay.__init__ would enter the instance into the class-wide list: not called on purpose.
        self._replay, self._index, self._pre_softmax = replay, index, pre_softmax
        self.clear_indices()
        self.clear_router_replay_action()

    def _probabilities(self, scores: Tensor) -> Tensor:
        """Scores are logits, unless gates are taken before the choice."""
        return scores if self._pre_softmax else scores.softmax(dim=-1)

    def get_replay_topk(
        self,
        scores: Tensor,
        topk: int,
        num_groups: int | None = None,
        group_topk: int | None = None,
        default_compute_topk: TopK | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Selected scores and expert ids, `[N, K]` each, for `scores` `[N, experts]`."""
        assert default_compute_topk is not None
        routes = self._replay.current
        if routes is None:
            return default_compute_topk(scores, topk, num_groups, group_topk)
        scores = routes.balance(self._index, scores, self._probabilities)
        if not routes.replays:
            own_scores, own = default_compute_topk(scores, topk, num_groups, group_topk)
            routes.choose(self._index, own)
            return own_scores, own
        with torch.no_grad():
            own = default_compute_topk(scores, topk, num_groups, group_topk)[1]
        chosen = routes.choose(self._index, own)
        return scores.gather(1, chosen), chosen


def attach(
    model: HiddenStatesModel, *, moe_layers: Sequence[int], shard: tuple[int, int], **settings: Any
) -> RoutingReplay:
    """Put `RoutingReplay` into the routers of the decoder's layers that this rank has, found by global layer number.

    `moe_layers`: global numbers (from 1) of all MoE layers of the model, in order: column `l` of a record belongs to
    `moe_layers[l]`. Routers elsewhere, such as those of multi-token prediction, stay as they are.
    """
    routers = {
        layer.layer_number: layer.mlp.router for layer in model.decoder.layers if isinstance(layer.mlp, MoELayer)
    }
    columns = [list(moe_layers).index(number) for number in routers]
    replay = RoutingReplay(layers=len(moe_layers), columns=columns, shard=shard, **settings)
    for index, router in enumerate(routers.values()):
        router.router_replay = ReplayedRouter(replay, index, pre_softmax=model.config.moe_router_pre_softmax)
    # Before any collective: ranks that wait for each other's tokens would wait for ever.
    model.register_forward_pre_hook(lambda module, args: replay.check_tokens(args[0].numel()))
    return replay
