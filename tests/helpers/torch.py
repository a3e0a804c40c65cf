"""Tiny random models of three families, and plain transformers with forced routes as the reference for all of them."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import MixtralConfig, OlmoeConfig, PreTrainedConfig, Qwen3MoeConfig

from r3async.config import Config
from r3async.data.tokens import Sample
from r3async.learner import MinibatchResult
from r3async.learner.micro_batches import MicroBatch
from r3async.learner.torch.backend import TorchLearner
from r3async.learner.torch.model import PackedInputs
from tests.helpers import learner
from tests.helpers.learner import fully_recorded
from tests.helpers.models import forced_routes, load_hf, make_samples, save_random
from tests.helpers.steps import train_minibatch

VOCAB, EXPERTS, TOP_K = 97, 8, 2
LENGTHS = [9, 40, 5, 17, 40, 6]
"""Tokens of the samples of most tests: two buckets, not in order."""
BUDGET = 48
"""Tokens per micro-batch: three micro-batches of different lengths."""

SHARED = {
    "vocab_size": VOCAB,
    "hidden_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_experts_per_tok": TOP_K,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}
FAMILIES: dict[str, tuple[type[PreTrainedConfig], dict[str, Any]]] = {
    "qwen3": (
        Qwen3MoeConfig,
        {"head_dim": 16, "intermediate_size": 56, "moe_intermediate_size": 40, "num_experts": EXPERTS}
        | {"norm_topk_prob": True, "mlp_only_layers": [1]},
    ),
    "mixtral": (MixtralConfig, {"intermediate_size": 40, "num_local_experts": EXPERTS, "router_jitter_noise": 0.1}),
    "olmoe": (
        OlmoeConfig,
        {"intermediate_size": 40, "num_experts": EXPERTS, "norm_topk_prob": False, "clip_qkv": 0.3}
        | {"attention_dropout": 0.1},
    ),
}


def make_model(directory: Path, family: str, *, seed: int = 0, std: float = 0.1, **changes: Any) -> Path:
    """Save a random float32 model (all weights random, norms too) and a stand-in tokenizer file, and return
    `directory`."""
    kind, settings = FAMILIES[family]
    return save_random(directory, kind(**(SHARED | settings | changes)), seed=seed, std=std)


def moe_layers(family: str) -> int:
    return 2 if family == "qwen3" else 3


def recorded_samples(layers: int, *, seed: int = 1, **options: Any) -> list[Sample]:
    """Return samples of `LENGTHS`, with a record of random routes in every row; without routes if `layers` is 0."""
    samples = make_samples(seed, LENGTHS, layers=max(layers, 1), vocab=VOCAB, routes=layers > 0, **options)
    return fully_recorded(samples) if layers else samples


def reference_step(
    path: Path, samples: Sequence[Sample], config: Config, dtype: torch.dtype = torch.float32
) -> tuple[dict[str, float], dict[str, torch.Tensor]]:
    """Return the losses, and the gradient of every checkpoint tensor, of a step with forced routes: sample by sample,
    token by token."""
    model = load_hf(path).to(dtype)
    policy = kl = torch.zeros((), dtype=torch.float64)
    count = 0
    for sample in samples:
        table = sample.table
        ids = torch.from_numpy(table["token_ids"].astype(np.int64))
        with forced_routes(model, table["routed_experts"]):
            logits = model(ids[None]).logits[0].double() / sample.temperature
        if "support" in table:
            # Row t predicts token t + 1.
            left = torch.from_numpy(table["support"].to_dense_mask(logits.shape[-1])).roll(-1, 0)
            logits = logits.masked_fill(~left, -torch.inf)
        logp = torch.log_softmax(logits, -1)
        for t in np.flatnonzero(table["loss_mask"] & np.isfinite(table["rollout_logprobs"])):
            lp, mu = logp[t - 1, ids[t]], float(table["rollout_logprobs"][t])
            ratio = min(float(torch.exp(lp.detach() - mu)), config.algorithm.truncated_pg.cap)
            policy = policy - ratio * float(table["advantages"][t]) * lp
            kl = kl + config.algorithm.rollout_kl.coef * (lp - mu) ** 2 / 2
            count += 1
    ((policy + kl) / count).backward()
    grads = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    squares = sum(float(g.double().square().sum()) for g in grads.values())
    losses = {"loss/policy": policy.item() / count, "loss/rollout_kl": kl.item() / count, "grad_norm": squares**0.5}
    return losses, grads


def gradients(learner: TorchLearner) -> dict[str, torch.Tensor]:
    """Return the whole gradients of all parameters, under transformers' names. Collective."""
    named = learner.model.causal_lm.named_parameters()
    out = {n: p.grad for n, p in named if p.grad is not None}
    return {n: g.full_tensor() if hasattr(g, "full_tensor") else g.clone() for n, g in out.items()}


def gradients_of_step(
    learner: TorchLearner, micro_batches: Sequence[MicroBatch]
) -> tuple[MinibatchResult, dict[str, torch.Tensor]]:
    """Return the step's result, and the whole gradients that the optimizer got."""
    taken: dict[str, torch.Tensor] = {}
    optimizer = learner.optimizer
    step = optimizer.step

    def capture():
        taken.update(gradients(learner))
        return step()

    optimizer.step = capture
    try:
        return train_minibatch(learner, micro_batches), taken
    finally:
        del optimizer.step


def settings(**changes: Any) -> Config:
    limits = {"episode__max_total_tokens": 1024, "episode__max_prompt_tokens": 256}
    return learner.settings(learner__backend="torch", **limits, **changes)


def worst_error(got: dict[str, torch.Tensor], want: dict[str, torch.Tensor]) -> tuple[float, str]:
    """Return the largest relative error and the name of its tensor. All tensors must be there, and more than zero."""
    assert set(got) == set(want)
    assert all(t.abs().max() > 0 for t in want.values())
    return max((float((got[n].double() - w.double()).norm() / w.double().norm()), n) for n, w in want.items())


def logits(learner: TorchLearner, micro_batch: MicroBatch) -> torch.Tensor:
    """Return the logits of all tokens, `[N, V]`."""
    m = micro_batch
    packed = PackedInputs.from_micro_batch(m, torch.device("cpu"))
    hidden = learner.model.causal_lm.base_model(**packed.to_model_inputs()).last_hidden_state[0]
    return learner.model.causal_lm.get_output_embeddings()(hidden) * learner.model.logit_scale
