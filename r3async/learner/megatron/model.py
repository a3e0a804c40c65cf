"""The model on Megatron: our layers through its specifications, without fork or patch."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import (
    TransformerBlockSubmodules,
    get_num_layers_to_build,
)
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset
from torch import Tensor

from r3async.learner.megatron.attention import (
    AllHeadsRMSNorm,
    LatentAttention,
    PackedAttention,
    TorchRMSNorm,
)
from r3async.learner.megatron.experts import GroupedExperts, use_own_dispatchers
from r3async.learner.model import MegatronModelShape


def build_layer_spec(
    config: TransformerConfig, shape: MegatronModelShape, *, moe: bool
) -> ModuleSpec:
    """Return the specification of one decoder layer with the modules above."""
    spec = get_gpt_layer_local_spec(
        num_experts=config.num_moe_experts if moe else None,
        qk_layernorm=config.qk_layernorm,
        normalization="RMSNorm",
    )
    if shape.kv_rank:
        spec.submodules.self_attention = ModuleSpec(module=LatentAttention, params={"shape": shape})
    else:
        attention = spec.submodules.self_attention.submodules
        attention.core_attention = PackedAttention
        if shape.query_norm == "head":
            attention.q_layernorm = attention.k_layernorm = TorchRMSNorm
        elif shape.query_norm == "whole":
            attention.q_layernorm = ModuleSpec(
                module=AllHeadsRMSNorm, params={"heads": shape.num_heads}
            )
            attention.k_layernorm = ModuleSpec(
                module=AllHeadsRMSNorm, params={"heads": shape.num_kv_heads}
            )
    if moe:
        mlp = spec.submodules.mlp
        # A specification in megatron-core 0.16, a `partial` of the layer in later ones.
        parts = mlp.keywords["submodules"] if isinstance(mlp, partial) else mlp.submodules
        parts.experts = GroupedExperts
    spec.submodules.input_layernorm = spec.submodules.pre_mlp_layernorm = TorchRMSNorm
    return spec


class HiddenStatesModel(GPTModel):
    """A GPTModel whose forward ends before the output layer, so that logits are computed only where
    they are needed."""

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
        transformer_layer_spec=TransformerBlockSubmodules(
            layer_specs=specs, layer_norm=TorchRMSNorm
        ),
        # The vocabulary is divided evenly: rows of padding are never a target, and no logit is
        # computed for them.
        vocab_size=shape.vocab_size + -shape.vocab_size % config.tensor_model_parallel_size,
        max_sequence_length=shape.max_positions,
        position_embedding_type="none",
        share_embeddings_and_output_weights=shape.tied_embeddings,
    )
    use_own_dispatchers(model.decoder.layers, config)
    return model


def freeze_padding_embedding(
    model: HiddenStatesModel, token: int | None, shard: tuple[int, int]
) -> None:
    """Keep the embedding of `token`, the model's padding, from being trained, as transformers does
    (`padding_idx`).

    It is a row of zeros, and a policy may sample the token. The norm behind the embedding
    multiplies the gradient of a row of zeros by `1 / sqrt(eps)`: a thousand. One such token would
    decide the norm of the whole gradient, which is clipped by it. `shard` is (index, count) of the
    parts into which sequence-parallel ranks split the tokens.
    """
    if token is None or not model.pre_process:
        return
    index, count = shard

    def hold(module: torch.nn.Module, args: Any, kwargs: Any, output: Tensor) -> Tensor:
        """Stop the gradient at padding tokens; `output` is `[N / count, 1, hidden]`."""
        ids: Tensor = kwargs["input_ids"][0].chunk(count)[index]
        return torch.where((ids == token)[:, None, None], output.detach(), output)

    model.embedding.register_forward_hook(hold, with_kwargs=True)
