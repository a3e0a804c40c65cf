"""The model: its layers made of our modules by Megatron's specifications, no fork, no patch; and replay in its routers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe.router_replay import RouterReplay
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset
from torch import Tensor

from r3async.learner.megatron.attention import AllHeadsRMSNorm, LatentAttention, PackedAttention, TorchRMSNorm
from r3async.learner.megatron.experts import GroupedExperts, use_local_dispatcher
from r3async.learner.replay import RoutingReplay
from r3async.learner.trained import MegatronModelShape


def build_layer_spec(config: TransformerConfig, shape: MegatronModelShape, *, moe: bool) -> ModuleSpec:
    """Specification of one decoder layer with the modules above."""
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
    """A GPTModel whose forward ends before the output layer, so that logits are made only where they are needed."""

    def _postprocess(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return hidden_states

    def get_output_weight(self) -> Tensor:
        """`[vocab of this rank, hidden]`, on the last pipeline stage."""
        if self.share_embeddings_and_output_weights:
            return self.shared_embedding_or_output_weight()
        return self.output_layer.weight


def build_model(config: TransformerConfig, shape: MegatronModelShape) -> HiddenStatesModel:
    """This pipeline stage of the decoder."""
    first = get_transformer_layer_offset(config)
    here = shape.moe_pattern[first : first + get_num_layers_to_build(config)]
    specs = [build_layer_spec(config, shape, moe=moe) for moe in here]
    model = HiddenStatesModel(
        config=config,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
        transformer_layer_spec=TransformerBlockSubmodules(layer_specs=specs, layer_norm=TorchRMSNorm),
        # The vocabulary is shared out evenly: rows of padding are never a target, and no logit is taken of them.
        vocab_size=shape.vocab_size + -shape.vocab_size % config.tensor_model_parallel_size,
        max_sequence_length=shape.max_positions,
        position_embedding_type="none",
        share_embeddings_and_output_weights=shape.tied_embeddings,
    )
    use_local_dispatcher(model.decoder.layers, config)
    return model


def freeze_padding_embedding(model: HiddenStatesModel, token: int | None, shard: tuple[int, int]) -> None:
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


TopKFunction = Callable[..., tuple[Tensor, Tensor]]


class RouterReplayAdapter(RouterReplay):
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

    def _to_probabilities(self, scores: Tensor) -> Tensor:
        """Scores are logits, unless gates are taken before the choice."""
        return scores if self._pre_softmax else scores.softmax(dim=-1)

    def get_replay_topk(
        self,
        scores: Tensor,
        topk: int,
        num_groups: int | None = None,
        group_topk: int | None = None,
        default_compute_topk: TopKFunction | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Selected scores and expert ids, `[N, K]` each, for `scores` `[N, experts]`."""
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

    `moe_layers`: global numbers (from 1) of all MoE layers of the model, in order: column `l` of a record belongs to
    `moe_layers[l]`. `cp_size`: among how many ranks the tokens are divided that the model is given. Routers elsewhere, such
    as those of multi-token prediction, stay as they are.
    """
    routers = {
        layer.layer_number: layer.mlp.router for layer in model.decoder.layers if isinstance(layer.mlp, MoELayer)
    }
    columns = [list(moe_layers).index(number) for number in routers]
    replay = RoutingReplay(num_moe_layers=len(moe_layers), moe_layer_indices=columns, token_shard=shard, **settings)
    for index, router in enumerate(routers.values()):
        router.router_replay = RouterReplayAdapter(replay, index, pre_softmax=model.config.moe_router_pre_softmax)
    # Before any collective: ranks that wait for each other's tokens would wait for ever.
    model.register_forward_pre_hook(lambda module, args: replay.check_token_count(cp_size * args[0].numel()))
    return replay
