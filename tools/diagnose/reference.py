"""The reference model of the files: each stage in float32 with transformers, changed as a
hypothesis says."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from r3async.data.model_shape import ModelShapeError, RoutingShape, read_moe_layers
from r3async.learner import LearnerError
from r3async.learner.torch.described import read_model_config
from r3async.learner.torch.routers import TopKInterceptor, is_expert_choice


@dataclass
class StageTrial:
    """One layer of the files, for a hypothesis to change, with the input that a witness fed
    into a stage of it.

    Attributes:
        input: `[T, hidden]`.
        token_ids: int64 `[T]`.
        expert_ids: int64 `[T, K]`, the experts that the witness chose.
        change_gates: Maps the gates `[T, K]` of the files to other gates.
        map_experts: Maps each expert to the one that computes in its place.
        dtype: The dtype of the computation.
    """

    stage: str
    layer: Any
    rotary: Any
    reference: ReferenceModel
    input: Tensor
    token_ids: Tensor
    expert_ids: Tensor | None = None
    mask: Tensor = field(default_factory=lambda: torch.zeros(0))
    change_gates: Callable[[Tensor], Tensor] = lambda gates: gates
    map_experts: Callable[[Tensor], Tensor] = lambda ids: ids
    temperature: float = 1.0
    dtype: torch.dtype = torch.float32

    @property
    def module(self) -> Any:
        """The module of the stage."""
        names = {
            "input_norm": "input_layernorm",
            "attention": "self_attn",
            "post_norm": "post_attention_layernorm",
        }
        if self.stage == "router":
            return get_router(self.layer.mlp)
        return (
            self.layer
            if self.stage in MODEL_STAGES
            else getattr(self.layer, names.get(self.stage, "mlp"))
        )

    @torch.no_grad()
    def compute_output(self) -> Tensor:
        """Compute the output of the stage, as float32."""
        self.layer.to(self.dtype)
        x = self.input if self.stage == "embedding" else self.input.to(self.dtype)
        compute = {
            "attention": self._run_attention,
            "mlp": self._run_mlp,
            "router": self._run_router,
            "head": self._run_head,
        }
        out: Tensor = compute.get(self.stage, self.module)(x)
        return out.float()

    def _run_attention(self, x: Tensor) -> Tensor:
        positions = torch.arange(len(x))[None]
        turns = self.rotary(x[None], positions)
        out: Tensor = self.layer.self_attn(
            hidden_states=x[None],
            position_embeddings=turns,
            position_ids=positions,
            attention_mask=self.mask.to(self.dtype)[None, None],
        )[0][0]
        return out

    def _run_router(self, x: Tensor) -> Tensor:
        logits: Tensor = get_router(self.layer.mlp)(x)[0]
        return logits

    def _run_mlp(self, x: Tensor) -> Tensor:
        mlp = self.layer.mlp
        if self.expert_ids is not None:
            router = get_router(mlp)
            with _ForcedTopK(self.reference.routing, self.expert_ids):
                logits, gates, _ = router(x)
            chosen = (logits, self.change_gates(gates), self.map_experts(self.expert_ids))
            router.forward = lambda *_: chosen
        out: Tensor = mlp(x[None])[0]
        return out

    def _run_head(self, x: Tensor) -> Tensor:
        """Compute the log-prob of each token after the first, `[T - 1]`, from `x` `[T, hidden]`
        after the last norm."""
        logits = self.layer(x[:-1]).float() / self.temperature
        return torch.log_softmax(logits, -1).gather(1, self.token_ids[1:, None])[:, 0]


_NORM_MODULES = ("input_layernorm", "post_attention_layernorm")
STAGE_MODULES = {
    "input_norm": _NORM_MODULES,
    "post_norm": _NORM_MODULES,
    "attention": ("self_attn",),
    "mlp": ("mlp",),
}
"""Names of the modules of a layer that each stage needs."""
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
        self.config: Any = self._model.config
        self.layers = len(self._base.layers)

    @property
    def is_tied(self) -> bool:
        """True if the output matrix is the embedding."""
        head: Tensor = self._model.get_output_embeddings().weight
        return head.data_ptr() == self.embedding_weight.data_ptr()

    @property
    def embedding_weight(self) -> Tensor:
        weight: Tensor = self._model.get_input_embeddings().weight
        return weight

    def copy_module(self, layer: int, stage: str) -> Any:
        """Return a float32 copy to change: the module of a stage, or the part of a layer that
        the stage needs."""
        outside = {
            "embedding": self._model.get_input_embeddings,
            "final_norm": lambda: self._base.norm,
            "head": self._model.get_output_embeddings,
        }
        # Copied with its configuration, which determines how attention is computed.
        if stage in outside:
            return copy.deepcopy(outside[stage]()).float()
        whole: Any = self._base.layers[layer]
        part: Any = nn.Module()
        if stage == "router":
            part.mlp = nn.Module()
            part.mlp.gate = copy.deepcopy(get_router(whole.mlp)).float()
            return part
        for name in STAGE_MODULES[stage]:
            setattr(part, name, copy.deepcopy(getattr(whole, name)).float())
        return part

    def make_trial(
        self, layer: int, stage: str, input: Tensor, token_ids: Tensor, expert_ids: Tensor | None
    ) -> StageTrial:
        rotary = copy.deepcopy(self._base.rotary_emb) if stage == "attention" else nn.Identity()
        trial = StageTrial(
            stage, self.copy_module(layer, stage), rotary, self, input, token_ids, expert_ids
        )
        if stage == "attention":
            trial.mask = make_causal_mask(
                len(input), getattr(trial.layer.self_attn, "sliding_window", None)
            )
        return trial

    @torch.no_grad()
    def choose_experts(
        self, layer: int, input: Tensor, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor]:
        """Run the router of a layer on `input` `[T, hidden]`.

        Return the scores that it chooses by, float32 `[T, experts]`, and the chosen experts.
        """
        router = get_router(self.copy_module(layer, "router").mlp).to(dtype)
        with _ObservedTopK(self.routing) as seen:
            ids = router(input.to(dtype))[2]
        return seen.scores.float(), ids


def get_router(mlp: Any) -> Any:
    return getattr(mlp, "gate", None) or mlp.router


def make_causal_mask(tokens: int, window: int | None) -> Tensor:
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
