"""The reference model of the files: each stage in float32 with transformers."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from r3async.data.model_shape import ModelShapeError, RoutingShape, read_moe_layers
from r3async.learner import LearnerError
from r3async.learner.torch.described import read_model_config
from r3async.learner.torch.routers import TopKInterceptor, is_expert_choice


@dataclass(frozen=True)
class StageInput:
    """The input that a witness fed into a stage of a layer.

    Attributes:
        layer: -1 for a stage outside the layers.
        input: `[T, hidden]`; token ids `[T]` for the embedding.
        token_ids: int64 `[T]`.
        expert_ids: int64 `[T, K]`, the experts that the witness chose.
        gates: `[T, K]`, its gates, if those of the files are not to be used.
        temperature: Divides the logits of the head.
    """

    layer: int
    stage: str
    input: Tensor
    token_ids: Tensor
    expert_ids: Tensor | None = None
    gates: Tensor | None = None
    temperature: float = 1.0


STAGE_MODULES = {
    "input_norm": "input_layernorm",
    "attention": "self_attn",
    "post_norm": "post_attention_layernorm",
    "mlp": "mlp",
}
"""Name of the module of a layer for each stage."""
MODEL_STAGES = ("embedding", "final_norm", "head")
"""Stages outside the layers."""


class ReferenceModel:
    """The model of a directory. Raises `LearnerError` if transformers cannot load it."""

    def __init__(self, directory: Path):
        from transformers import AutoModelForCausalLM

        config = read_model_config(directory)
        try:
            self.routing, self.moe_layers = read_moe_layers(config)
        except ModelShapeError as error:
            raise LearnerError(f"{directory}: {error}") from error
        try:
            self._model: Any = AutoModelForCausalLM.from_pretrained(
                directory,
                dtype="auto",
                attn_implementation="eager",
                experts_implementation="eager",
                local_files_only=True,
            ).eval()
        except Exception as error:
            # Of many kinds: files, their headers, names, shapes, an unknown model type.
            raise LearnerError(f"transformers cannot load {directory}: {error}") from error
        self._base: Any = self._model.base_model
        self.layers = len(self._base.layers)

    @torch.no_grad()
    def compute_stage(self, given: StageInput, dtype: torch.dtype = torch.float32) -> Tensor:
        """Compute the output of a stage in `dtype`; return it as float32."""
        module = self._copy_module(given.layer, given.stage).to(dtype)
        x = given.input if given.stage == "embedding" else given.input.to(dtype)
        if given.stage == "attention":
            out: Tensor = self._run_attention(module, x)
        elif given.stage == "mlp":
            out = self._run_mlp(module, x, given)
        elif given.stage == "router":
            out = module(x)[0]
        elif given.stage == "head":
            out = _score_tokens(module, x, given)
        else:
            out = module(x)
        return out.float()

    def _run_attention(self, attention: Any, x: Tensor) -> Tensor:
        positions = torch.arange(len(x))[None]
        mask = _make_causal_mask(len(x), getattr(attention, "sliding_window", None))
        out: Tensor = attention(
            hidden_states=x[None],
            position_embeddings=self._base.rotary_emb(x[None], positions),
            position_ids=positions,
            attention_mask=mask.to(x.dtype)[None, None],
        )[0][0]
        return out

    def _run_mlp(self, mlp: Any, x: Tensor, given: StageInput) -> Tensor:
        if given.expert_ids is not None:
            router = _get_router(mlp)
            with _ForcedTopK(self.routing, given.expert_ids):
                logits, gates, _ = router(x)
            chosen = (logits, gates if given.gates is None else given.gates, given.expert_ids)
            router.forward = lambda *_: chosen
        out: Tensor = mlp(x[None])[0]
        return out

    def _copy_module(self, layer: int, stage: str) -> Any:
        """Return a float32 copy of the module of a stage, to cast and to change."""
        if stage == "embedding":
            module = self._model.get_input_embeddings()
        elif stage == "final_norm":
            module = self._base.norm
        elif stage == "head":
            module = self._model.get_output_embeddings()
        elif stage == "router":
            module = _get_router(self._base.layers[layer].mlp)
        else:
            module = getattr(self._base.layers[layer], STAGE_MODULES[stage])
        return copy.deepcopy(module).float()

    @torch.no_grad()
    def choose_experts(
        self, layer: int, input: Tensor, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor]:
        """Run the router of a layer on `input` `[T, hidden]`.

        Return the scores that it chooses by, float32 `[T, experts]`, and the chosen experts.
        """
        router = self._copy_module(layer, "router").to(dtype)
        with _ObservedTopK(self.routing) as seen:
            ids = router(input.to(dtype))[2]
        return seen.scores.float(), ids


def _get_router(mlp: Any) -> Any:
    return getattr(mlp, "gate", None) or mlp.router


def _score_tokens(head: Any, x: Tensor, given: StageInput) -> Tensor:
    """Compute the log-prob of each token after the first, `[T - 1]`, from `x` `[T, hidden]`
    after the last norm."""
    logits = head(x[:-1]).float() / given.temperature
    return torch.log_softmax(logits, -1).gather(1, given.token_ids[1:, None])[:, 0]


def _make_causal_mask(tokens: int, window: int | None) -> Tensor:
    """Return a mask to add to scores, float32 `[T, T]`: a token sees itself and those before it,
    `window` in all."""
    distance = torch.arange(tokens)[:, None] - torch.arange(tokens)
    hidden = (distance < 0) | (distance >= (window or tokens))
    return torch.zeros(tokens, tokens).masked_fill_(hidden, torch.finfo(torch.float32).min)


class _ForcedTopK(TopKInterceptor):
    """A context in which routers choose `expert_ids`."""

    def __init__(self, shape: RoutingShape | None, expert_ids: Tensor):
        super().__init__()
        self._shape = shape
        self._ids = expert_ids

    def on_topk(self, scores: Tensor, result: Any) -> Any:
        if not is_expert_choice(scores, result.indices, self._shape):
            return result
        return torch.return_types.topk((scores.gather(1, self._ids), self._ids))


class _ObservedTopK(TopKInterceptor):
    """A context in which `scores` holds the last scores that a router chose by."""

    def __init__(self, shape: RoutingShape | None):
        super().__init__()
        self._shape = shape
        self.scores = torch.zeros(0)

    def on_topk(self, scores: Tensor, result: Any) -> Any:
        if is_expert_choice(scores, result.indices, self._shape):
            self.scores = scores
        return result
