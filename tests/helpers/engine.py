"""A tiny Qwen3-MoE on disk, and the reference values that transformers computes for it."""

import asyncio
import gc
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from pathlib import Path

import numpy as np
import pytest
import torch

from r3async.config.generator import GeneratorConfig
from r3async.rollout.engine import GenerationRequest
from r3async.rollout.vllm.engine import AdapterSettings, VllmEngine
from r3async.weights.manifest import WeightManifest
from r3async.weights.version_store import VersionStore
from tests.helpers.models import gates_of

VOCABULARY = 264
END = 257
OBSERVED = {
    "scheduler_cls": "tests.helpers.scheduler.ObservedScheduler",
    "worker_extension_cls": "tests.helpers.scheduler.ObservingExtension",
}
"""Arguments of an engine whose scheduler tells what it did."""
TOLERANCE = 1e-4
needs_fp8_cache = pytest.mark.skipif(
    "AVX512" not in torch.backends.cpu.get_cpu_capability(), reason="vLLM keeps an fp8 cache on CPUs with AVX-512 only"
)


@asynccontextmanager
async def started(
    model: Path,
    length: int = 512,
    *,
    concurrency: int = 4,
    dtype: str = "float32",
    gib: float = 0.1,
    adapters: AdapterSettings | None = None,
    **engine_args: object,
) -> AsyncIterator[VllmEngine]:
    """Start an engine for contexts of `length`, with a cache of `gib`, and stop it in the end."""
    engine = VllmEngine(
        str(model),
        GeneratorConfig(dtype=dtype, concurrency=concurrency, kv_cache_gib=gib, engine_args=engine_args),
        max_model_len=length,
        adapters=adapters,
    )
    collector = gc.get_threshold()
    await engine.start()
    try:
        yield engine
    finally:
        await engine.stop()
    assert gc.get_threshold() == collector


def prompt(length: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, length).astype(np.int32)


def request(ids: np.ndarray, max_tokens: int, name: str = "request", **values) -> GenerationRequest:
    return GenerationRequest(name, ids, max_tokens, **values)


def same_sets(rows: np.ndarray, expected: np.ndarray) -> bool:
    return rows.shape == expected.shape and np.array_equal(np.sort(rows, -1), expected)


def make_model(
    path: Path,
    *,
    hidden_size: int = 64,
    layers: int = 3,
    experts: int = 8,
    top_k: int = 2,
    expert_hidden_size: int = 32,
    dense_layers: tuple[int, ...] = (),
    seed: int = 0,
) -> Path:
    """Write a random fp32 Qwen3-MoE with a byte-level tokenizer to `path`; equal seeds give equal weights."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, Qwen3MoeConfig, Qwen3MoeForCausalLM

    config = Qwen3MoeConfig(
        vocab_size=VOCABULARY,
        hidden_size=hidden_size,
        intermediate_size=2 * hidden_size,
        moe_intermediate_size=expert_hidden_size,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        num_experts=experts,
        num_experts_per_tok=top_k,
        norm_topk_prob=True,
        mlp_only_layers=list(dense_layers),
        max_position_embeddings=1024,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=END,
        pad_token_id=256,
    )
    model = Qwen3MoeForCausalLM(config)
    randomise(model, seed)
    model.save_pretrained(path)
    symbols = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={symbol: i for i, symbol in enumerate(symbols)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<|pad|>", eos_token="<|end|>").save_pretrained(path)
    return path


def randomise(model: torch.nn.Module, seed: int) -> None:
    """Set random weights that give distinct log-probs and a decided router."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        if parameter.dim() > 1:
            parameter.data.normal_(0, 0.5 if name.endswith("mlp.gate.weight") else 0.1, generator=generator)


class Reference:
    """The engine's model in transformers, fp32, as the reference for its numbers."""

    def __init__(self, path: Path):
        from transformers import AutoModelForCausalLM

        self.model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager").eval()
        self.chosen: list[torch.Tensor] = []
        for gate in gates_of(self.model):
            gate.register_forward_hook(lambda module, args, output: self.chosen.append(output[-1]))

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return the weights under the names of a checkpoint (one tensor per expert)."""
        from safetensors.torch import load_file

        return load_file(Path(self.model.config._name_or_path) / "model.safetensors")

    @torch.no_grad()
    def score(self, ids: np.ndarray, temperature: float = 1.0) -> np.ndarray:
        """Return the log-prob of each token after the first, float32 `[T - 1]`."""
        logits = self.model(torch.as_tensor(ids, dtype=torch.long)[None]).logits[0, :-1].float() / temperature
        labels = torch.as_tensor(ids[1:], dtype=torch.long)[:, None]
        return torch.log_softmax(logits, -1).gather(-1, labels)[:, 0].numpy()

    @torch.no_grad()
    def routes(self, ids: np.ndarray) -> np.ndarray:
        """Return the routes, `[T, MoE layers, top_k]`, with the ids of each row sorted."""
        self.chosen.clear()
        self.model(torch.as_tensor(ids, dtype=torch.long)[None])
        return np.sort(torch.stack([c.reshape(len(ids), -1) for c in self.chosen], 1).numpy(), -1)


class Weights:
    """The weights by version: odd versions are the model on disk (-1 is loaded at the start), even ones another random
    model."""

    def __init__(self, path: Path, other: Path, publisher: VersionStore, version: int = -1):
        self.on_disk, self.other, self.publisher, self.version = Reference(path), Reference(other), publisher, version

    def reference(self, version: int) -> Reference:
        return self.on_disk if version % 2 else self.other

    @property
    def by_version(self) -> dict[int, Reference]:
        return {v: self.reference(v) for v in range(-1, self.version + 1)}

    def publish(self) -> WeightManifest:
        self.version += 1
        return self.publisher.write_tensors(self.version, self.reference(self.version).tensors(), torch.float32)


def replay(models: dict[int, Reference], prompt: np.ndarray, tokens: np.ndarray, versions: np.ndarray):
    """Compute with transformers an answer during which the weights change while earlier keys and values are kept.

    Token i of the answer is sampled by `models[versions[i]]`, which feeds the token before it (for the first token: the
    whole prompt) onto the cache that the earlier versions left. Returns its log-probs, float32 `[n]`, and the sorted
    routes of all positions but the last, `[P + n - 1, MoE layers, top_k]`.
    """
    feeds, start = [], 0
    for bound in [i for i in range(1, len(tokens)) if versions[i] != versions[i - 1]] + [len(tokens)]:
        stop = len(prompt) + bound - 1
        feeds.append((int(versions[bound - 1]), start, stop))
        start = stop
    logprobs, routes = replay_feeds(models, np.concatenate([prompt, tokens]), feeds)
    return logprobs[len(prompt) - 1 :], routes


@torch.no_grad()
def replay_feeds(models: dict[int, Reference], ids: np.ndarray, feeds: Iterable[tuple[int, int, int]]):
    """Compute with transformers the positions that `feeds` (version, start, stop) feed, one after the other.

    A feed that begins before the end of the one before it is a re-prefill: it replaces keys and values from there on,
    but a position's log-prob and routes stay those of the feed that came first. All feeds together cover `ids` except
    for the last. Returns the log-prob of each token after the first, float32 `[T - 1]`, and the sorted routes `[T - 1,
    MoE layers, top_k]`.
    """
    from transformers import DynamicCache

    tokens = torch.as_tensor(ids, dtype=torch.long)
    cache, logprobs, chosen, known = DynamicCache(), [], [], 0
    for version, start, stop in feeds:
        reference = models[version]
        assert start <= known, "a position was left out"
        if start < known:
            cache.crop(start - known)  # a negative number takes away so many
        reference.chosen.clear()
        logits = reference.model(tokens[None, start:stop], past_key_values=cache, use_cache=True).logits[0].float()
        rows = torch.stack([c.reshape(stop - start, -1) for c in reference.chosen], 1)
        if stop > known:
            new = slice(known - start, None)
            logprobs.append(torch.log_softmax(logits[new], -1).gather(-1, tokens[known + 1 : stop + 1, None])[:, 0])
            chosen.append(rows[new])
            known = stop
    assert known == len(ids) - 1
    return torch.cat(logprobs).numpy(), np.sort(torch.cat(chosen).numpy(), -1)


async def sampled(engine: VllmEngine, name: str, tokens: int) -> None:
    """Wait until the running request of that name has sampled `tokens` tokens. The engine needs an
    `ObservedScheduler`."""
    async with asyncio.timeout(150):
        while (await engine.core.collective_rpc("r3_sampled", args=(name,)))[0] < tokens:
            pass


async def revive(engine: VllmEngine) -> None:
    """Make an engine that ended itself go on, with what it holds now. It does not do so by itself: it does not hold what
    it was given."""
    engine._requests.failure = None
    await engine.core.resume_generation()
    engine._requests.resume_admission()
