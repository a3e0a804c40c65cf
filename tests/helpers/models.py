"""Tiny random Qwen3-MoE models, reference forward passes with forced routes, and samples to train on."""

import json
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import MethodType
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch.overrides import TorchFunctionMode
from transformers import AutoModelForCausalLM, PreTrainedConfig, Qwen3MoeConfig

from r3async.data.tokens import Sample, TokenTable

LAYERS, EXPERTS, TOP_K, VOCAB = 3, 8, 2, 96
PADDING = 7
"""Id of the padding token. Samples have this token, too, since a policy may sample it."""


def make_hf_model(directory: Path, *, seed: int = 0, std: float = 0.1, **changes: Any) -> Path:
    """Save a random float32 model (all weights random, norms too) and a stand-in tokenizer file, and return
    `directory`."""
    settings = {
        "vocab_size": VOCAB,
        "hidden_size": 64,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "intermediate_size": 80,
        "moe_intermediate_size": 48,
        "num_experts": EXPERTS,
        "num_experts_per_tok": TOP_K,
        "norm_topk_prob": True,
        "max_position_embeddings": 256,
        "tie_word_embeddings": False,
        "pad_token_id": PADDING,
    }
    return save_random(directory, Qwen3MoeConfig(**(settings | changes)), seed=seed, std=std)


def save_random(directory: Path, config: PreTrainedConfig, *, seed: int = 0, std: float = 0.1) -> Path:
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            centre = 1.0 if parameter.ndim == 1 else 0.0
            parameter.copy_(centre + std * torch.randn(parameter.shape, generator=generator))
        if (padding := model.get_input_embeddings().padding_idx) is not None:
            model.get_input_embeddings().weight[padding] = 0  # as transformers makes it
    model.save_pretrained(directory)
    (directory / "tokenizer.json").write_text(json.dumps({"stand": "in"}))
    return directory


def load_weights(directory: Path) -> dict[str, torch.Tensor]:
    """Return all weights of a model directory, whether of one file or of several."""
    return {name: tensor for file in directory.glob("*.safetensors") for name, tensor in load_file(file).items()}


def load_hf(directory: Path) -> torch.nn.Module:
    """Load a model in float32, with transformers' own attention and plain loop over experts."""
    return AutoModelForCausalLM.from_pretrained(
        directory, dtype=torch.float32, attn_implementation="eager", experts_implementation="eager"
    ).eval()


def gates_of(model: torch.nn.Module) -> Iterator[torch.nn.Module]:
    """Yield the model's routers, by layer; gpt-oss has another name for them."""
    for layer in model.model.layers:
        gate = getattr(layer.mlp, "gate", None) or getattr(layer.mlp, "router", None)
        if gate is not None:
            yield gate


BY_TOPK = (
    *(
        "qwen3_next",
        "qwen3_5_moe_text",
        "nemotron_h",
        "kimi_linear",
        "bailing_hybrid",
        "minimax",
        "lfm2_moe",
        "granitemoehybrid",
    ),
    *("jamba", "minimax_m2", "ernie4_5_moe", "hunyuan_v1_moe", "qwen3_5_text", "olmo_hybrid", "bamba", "falcon_h1"),
)
"""Models whose routers are forced by what their top-k returns; gates of the others are computed here."""


class _ForcedTopK(TorchFunctionMode):
    """Give every choice of `TOP_K` among `EXPERTS` the experts of the next layer."""

    def __init__(self, routes: np.ndarray):
        super().__init__()
        self.left = [torch.from_numpy(routes[:, layer].astype(np.int64)) for layer in range(routes.shape[1])]

    def __torch_function__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if func not in (torch.topk, torch.Tensor.topk) or result.indices.shape[-1] != TOP_K:
            return result
        if args[0].shape[-1] != EXPERTS or args[0].ndim != 2:
            return result
        chosen = self.left.pop(0)
        return torch.return_types.topk((args[0].gather(1, chosen), chosen))


@contextmanager
def forced_routes(model: torch.nn.Module, routes: np.ndarray) -> Iterator[None]:
    """Make the routers choose `routes`, int `[T, L, K]` (columns are MoE layers), in the next forward pass of one
    sequence."""
    if model.config.model_type in BY_TOPK:
        with _ForcedTopK(routes) as forced:
            yield
        assert not forced.left
        return
    gates = list(gates_of(model))
    assert not gates or len(gates) == routes.shape[1]
    with ExitStack() as stack:
        for index, gate in enumerate(gates):
            chosen = torch.from_numpy(routes[:, index].astype(np.int64))
            gate.forward = MethodType(
                lambda gate, hidden, chosen=chosen: _gated(model.config, gate, hidden, chosen), gate
            )
            stack.callback(gate.__delattr__, "forward")
        yield


def _gated(config: Any, gate: torch.nn.Module, hidden: torch.Tensor, chosen: torch.Tensor) -> tuple[torch.Tensor, ...]:
    logits = F.linear(hidden.reshape(-1, hidden.shape[-1]), gate.weight, getattr(gate, "bias", None))
    sigmoid = hasattr(gate, "e_score_correction_bias")
    scores = logits.sigmoid() if sigmoid else logits.softmax(-1)
    weights = scores.gather(1, chosen)
    if getattr(config, "norm_topk_prob", True):  # Mixtral always normalises, and has no such setting
        weights = weights / weights.sum(-1, keepdim=True)
    return logits, weights * (config.routed_scaling_factor if sigmoid else 1.0), chosen


def score(model: torch.nn.Module, ids: np.ndarray, temperature: float = 1.0) -> np.ndarray:
    """Return a model's log-probs of all tokens but the first, float32 `[T - 1]`."""
    tokens = torch.from_numpy(ids.astype(np.int64))
    with torch.no_grad():
        logprobs = torch.log_softmax(model(tokens[None]).logits[0] / temperature, -1)
    return logprobs[:-1].gather(1, tokens[1:, None])[:, 0].numpy()


def random_routes(rng: np.random.Generator, length: int, layers: int = LAYERS) -> np.ndarray:
    """Return random routes, uint8 `[length, layers, TOP_K]`, distinct within a row."""
    return np.argsort(rng.random((length, layers, EXPERTS)), axis=-1)[..., :TOP_K].astype(np.uint8)


def make_sample(
    rng: np.random.Generator,
    length: int,
    *,
    name: str = "s",
    prompt: int = 3,
    layers: int = LAYERS,
    vocab: int = VOCAB,
    temperature: float = 1.0,
    routes: bool = True,
    advantages: bool = True,
) -> Sample:
    """Return a sample whose tokens after `prompt` were sampled with plausible log-probs; the last row has no recorded
    route."""
    sampled = np.arange(length) >= prompt
    columns = {
        "token_ids": rng.integers(0, vocab, length).astype(np.int32),
        "loss_mask": sampled,
        "rollout_logprobs": np.where(sampled, np.minimum(rng.normal(-3.0, 1.0, length), 0.0), 0.0).astype(np.float32),
        "policy_version": np.where(sampled, 0, -1).astype(np.int32),
        "turn": np.where(sampled, 0, -1).astype(np.int32),
        "rewards": np.zeros(length, np.float32),
    }
    if advantages:
        columns["advantages"] = np.where(sampled, rng.normal(size=length), 0.0).astype(np.float32)
    if routes:
        columns["routed_experts"] = random_routes(rng, length, layers)
        columns["routing_recorded"] = np.arange(length) < length - 1
    for array in columns.values():
        array.setflags(write=False)  # as they come off the wire
    return Sample(name, TokenTable(columns), temperature)


def make_samples(seed: int, lengths: list[int], **options: Any) -> list[Sample]:
    rng = np.random.default_rng(seed)
    return [make_sample(rng, length, name=f"s{i}", **options) for i, length in enumerate(lengths)]


def continued(sample: Sample, name: str, length: int, rng: np.random.Generator, *, at: int | None = None) -> Sample:
    """Return the first `at` tokens of `sample` (default: all) with their routes, none trained, and then `length`
    trained ones."""
    at = len(sample.table) if at is None else at
    layers = sample.table.column_shape("routed_experts")[1] if "routed_experts" in sample.table else 0
    more = make_sample(rng, length, prompt=0, name=name, layers=max(layers, 1), routes=layers > 0).table
    again = sample.table.slice_rows(0, at).with_columns(loss_mask=np.zeros(at, bool))
    return Sample(name, TokenTable.concat([again, more]), sample.temperature)


def make_families(seed: int = 0, **options: Any) -> list[Sample]:
    """Return samples that share prefixes, in random order.

    There are two groups whose prompts begin alike, samples that branch off another's middle or end, and one that shares
    nothing. The prompt's routes of two samples differ, in a choice and in what is recorded.
    """
    rng = np.random.default_rng(seed)
    system = make_sample(rng, 5, name="system", prompt=5, **options)
    groups = [continued(system, f"prompt{p}", p, rng) for p in (4, 20)]
    samples = [
        continued(prompt, f"g{g}e{e}", length, rng)
        for g, prompt in enumerate(groups)
        for e, length in enumerate([3, 30, 1, 6])
    ]
    samples += [continued(samples[1], "branch", 4, rng, at=21), continued(samples[5], "later", 7, rng)]
    samples.append(make_sample(rng, 11, name="alone", **options))
    if options.get("routes", True):
        rows, recorded = samples[2].table["routed_experts"].copy(), samples[6].table["routing_recorded"].copy()
        rows[6] = (rows[6] + 1) % EXPERTS
        recorded[9] = ~recorded[9]
        for at, columns in ((2, {"routed_experts": rows}), (6, {"routing_recorded": recorded})):
            samples[at] = Sample(samples[at].sample_id, samples[at].table.with_columns(**columns), 0.7)
    return [samples[i] for i in rng.permutation(len(samples))]
