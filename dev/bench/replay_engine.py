"""The engine of `bench replay-map`: a tiny Qwen3-MoE sampled in batches in this process, with the disturbances that
engines have.

It stands for vLLM where hundreds of runs must be measured on few cores. Like vLLM it is a different program from the
learner: the forward pass is written out here, with a key-value cache. Tests compare it with transformers, and compare a
run that uses it with a run of the whole pipeline.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import linear, rms_norm, scaled_dot_product_attention, silu
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel

from r3async.config import ConfigError
from r3async.data.routes import route_dtype

PRECISIONS = ("float32", "bfloat16", "fp8_kv")
"""Precisions of the engine. `fp8_kv`: bfloat16, with keys and values rounded to float8 (e5m2), vLLM's
`kv_cache_dtype="fp8_e5m2"`."""


class Answers(NamedTuple):
    """The sampled answers to B prompts of P tokens.

    Attributes:
        tokens: int32 `[B, n]`, of which the first `lengths` are the answer.
        logprobs: float32 `[B, n]`, likewise.
        lengths: int64 `[B]`.
        stopped: bool `[B]`, True for an answer that ended with a stop token.
        routes: `[B, P + n - 1, layers, k]`, the routes of each token that was fed.
    """

    tokens: np.ndarray
    logprobs: np.ndarray
    lengths: np.ndarray
    stopped: np.ndarray
    routes: np.ndarray


class BatchEngine:
    """An engine that answers prompts of one length, all at once.

    Args:
        model: the model whose configuration and weight names it takes.
        noise: standard deviation of the noise added to every router logit, drawn for each token. It stands for whatever
            makes two programs choose different experts, and exists in this benchmark alone: no setting of a run reaches
            it.
    """

    def __init__(self, model: PreTrainedModel, *, precision: str, noise: float, seed: int):
        c = model.config
        if c.model_type != "qwen3_moe":
            raise ConfigError(f"the engine of this benchmark plays qwen3_moe, not {c.model_type}")
        self._c, self._noise = c, noise
        self._dtype = torch.float32 if precision == "float32" else torch.bfloat16
        self._rounds = precision == "fp8_kv"
        self._rng = torch.Generator().manual_seed(seed)
        rotary = model.base_model.rotary_emb
        self._cos, self._sin = rotary(torch.zeros(1), torch.arange(c.max_position_embeddings)[None])
        self._weights: dict[str, Tensor] = {}

    def load(self, weights: dict[str, Tensor]) -> None:
        """Load weights under the names of transformers."""
        self._weights = {name: w.to(self._dtype) for name, w in weights.items()}

    @torch.no_grad()
    def answer(self, prompts: np.ndarray, most: int, stops: Sequence[int]) -> Answers:
        """Sample up to `most` tokens for each of `prompts`, int `[B, P]`, at temperature 1."""
        fed, ends = torch.from_numpy(prompts.astype(np.int64)), torch.tensor(list(stops))
        cache: list[tuple[Tensor, Tensor]] = []
        alive = torch.ones(len(fed), dtype=torch.bool)
        lengths = torch.zeros(len(fed), dtype=torch.int64)
        tokens: list[Tensor] = []
        logprobs: list[Tensor] = []
        routes: list[Tensor] = []
        while len(tokens) < most and bool(alive.any()):
            logits, chosen = self._forward(fed, cache)
            routes.append(chosen)
            scores = logits.float().log_softmax(dim=-1)
            fed = torch.multinomial(scores.exp(), 1, generator=self._rng)
            tokens.append(fed[:, 0])
            logprobs.append(scores.gather(1, fed)[:, 0])
            lengths += alive
            alive &= ~torch.isin(fed[:, 0], ends)
        return Answers(
            torch.stack(tokens, dim=1).numpy().astype(np.int32),
            torch.stack(logprobs, dim=1).numpy(),
            lengths.numpy(),
            ~alive.numpy(),
            torch.cat(routes, dim=1).numpy().astype(route_dtype(self._c.num_experts)),
        )

    def _forward(self, ids: Tensor, cache: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
        """Feed int64 `[B, T]` after the contents of the `cache`, which grows. Return the logits of the last token, `[B,
        vocabulary]`, and the experts to which each token is sent, `[B, T, layers, k]`."""
        w, c, past = self._weights, self._c, cache[0][0].shape[2] if cache else 0
        span = slice(past, past + ids.shape[1])
        cos, sin = self._cos[0, span].to(self._dtype), self._sin[0, span].to(self._dtype)
        x, chosen = w["model.embed_tokens.weight"][ids], []
        for i in range(c.num_hidden_layers):
            at = f"model.layers.{i}."
            x = x + self._attend(self._norm(x, at + "input_layernorm"), at + "self_attn.", cos, sin, cache, i)
            mixed, experts = self._mix(self._norm(x, at + "post_attention_layernorm").flatten(0, 1), at + "mlp.")
            x = x + mixed.view_as(x)
            chosen.append(experts.view(*ids.shape, -1))
        return linear(self._norm(x[:, -1], "model.norm"), w["lm_head.weight"]), torch.stack(chosen, dim=2)

    def _norm(self, x: Tensor, name: str) -> Tensor:
        weight = self._weights[name + ".weight"]
        return rms_norm(x.float(), (x.shape[-1],), eps=self._c.rms_norm_eps).to(x.dtype) * weight

    def _attend(
        self, x: Tensor, at: str, cos: Tensor, sin: Tensor, cache: list[tuple[Tensor, Tensor]], layer: int
    ) -> Tensor:
        c, w, shape = self._c, self._weights, (*x.shape[:2], -1, self._c.head_dim)
        q, k, v = (linear(x, w[f"{at}{name}_proj.weight"]).view(shape) for name in "qkv")
        q, k, v = (y.transpose(1, 2) for y in (self._norm(q, at + "q_norm"), self._norm(k, at + "k_norm"), v))
        q, k = (y * cos + torch.cat((-y[..., c.head_dim // 2 :], y[..., : c.head_dim // 2]), -1) * sin for y in (q, k))
        if self._rounds:
            k, v = (y.to(torch.float8_e5m2).to(y.dtype) for y in (k, v))
        if layer < len(cache):
            k, v = torch.cat((cache[layer][0], k), 2), torch.cat((cache[layer][1], v), 2)
            cache[layer] = k, v
        else:
            cache.append((k, v))
        out = scaled_dot_product_attention(q, k, v, is_causal=q.shape[2] > 1, enable_gqa=True)
        return linear(out.transpose(1, 2).flatten(2), w[at + "o_proj.weight"])

    def _mix(self, x: Tensor, at: str) -> tuple[Tensor, Tensor]:
        """Return the experts' output for `[N, hidden]`, and the chosen experts, `[N, k]`. All experts are computed,
        because there are few."""
        w, c = self._weights, self._c
        logits = linear(x, w[at + "gate.weight"]).float()
        if self._noise:
            logits = logits + self._noise * torch.randn(logits.shape, generator=self._rng)
        gates, chosen = logits.softmax(dim=-1).topk(c.num_experts_per_tok, dim=-1)
        if c.norm_topk_prob:
            gates = gates / gates.sum(dim=-1, keepdim=True)
        shares = torch.zeros_like(logits).scatter_(1, chosen, gates).to(x.dtype)
        gate, up = torch.matmul(x, w[at + "experts.gate_up_proj"].transpose(1, 2)).chunk(2, dim=-1)
        out = torch.matmul(silu(gate) * up, w[at + "experts.down_proj"].transpose(1, 2))
        return torch.einsum("enh,ne->nh", out, shares), chosen


# -- the same disturbances in a learner --------------------------------------------------------------------------------


class RouterTap(TorchFunctionMode):
    """A mode that acts on a router's forward pass.

    It adds `noise` to the router's logits, the result of its linear map, as an engine does. Unless `margins` is None,
    it also appends to it the log of how much likelier the last chosen expert is than the next one.
    """

    def __init__(self, noise: float, seed: int):
        super().__init__()
        self._noise, self._rng = noise, torch.Generator().manual_seed(seed)
        self.margins: list[Tensor] | None = None

    def __torch_function__(
        self, func: Callable[..., Any], types: Iterable[type], args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is linear and self._noise:
            return result + self._noise * torch.randn(result.shape, generator=self._rng)
        if func is torch.topk and self.margins is not None:
            k = result.indices.shape[-1]
            ranked = args[0].detach().float().topk(k + 1, dim=-1).values.log()
            self.margins.append(ranked[:, k - 1] - ranked[:, k])
        return result


def tap(routers: Sequence[nn.Module], noise: float, seed: int) -> RouterTap:
    """Route each of these routers' forward passes through a tap from now on, and return the tap."""
    made = RouterTap(noise, seed)
    for router in routers:
        router.forward = partial(_tapped, router.forward, made)
    return made


def _tapped(forward: Callable[..., Any], mode: RouterTap, *args: Any, **kwargs: Any) -> Any:
    with mode:
        return forward(*args, **kwargs)
