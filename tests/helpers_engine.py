"""A tiny Qwen3-MoE on disk, and what transformers says about it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from r3async.engines.vllm_worker import WorkerExtension

VOCABULARY = 264
END = 257


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
    """Random weights that give distinct log-probs and a decided router."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        if parameter.dim() > 1:
            parameter.data.normal_(0, 0.5 if name.endswith("mlp.gate.weight") else 0.1, generator=generator)


class Reference:
    """The same model in transformers, fp32: what the engine's numbers are compared with."""

    def __init__(self, path: Path):
        from transformers import AutoModelForCausalLM

        self.model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager").eval()
        self._chosen: list[torch.Tensor] = []
        for layer in self.model.model.layers:
            if hasattr(layer.mlp, "gate"):
                layer.mlp.gate.register_forward_hook(lambda module, args, output: self._chosen.append(output[-1]))

    def tensors(self) -> dict[str, torch.Tensor]:
        """Weights under the names that a checkpoint has (one tensor an expert)."""
        from safetensors.torch import load_file

        return load_file(Path(self.model.config._name_or_path) / "model.safetensors")

    @torch.no_grad()
    def score(self, ids: np.ndarray, temperature: float = 1.0) -> np.ndarray:
        """float32 `[T - 1]`: log-prob of each token after the first."""
        logits = self.model(torch.as_tensor(ids, dtype=torch.long)[None]).logits[0, :-1].float() / temperature
        labels = torch.as_tensor(ids[1:], dtype=torch.long)[:, None]
        return torch.log_softmax(logits, -1).gather(-1, labels)[:, 0].numpy()

    @torch.no_grad()
    def routes(self, ids: np.ndarray) -> np.ndarray:
        """`[T, MoE layers, top_k]`, ids of each row sorted."""
        self._chosen.clear()
        self.model(torch.as_tensor(ids, dtype=torch.long)[None])
        return np.sort(torch.stack([c.reshape(len(ids), -1) for c in self._chosen], 1).numpy(), -1)


@torch.no_grad()
def replay(models: dict[int, Reference], prompt: np.ndarray, tokens: np.ndarray, versions: np.ndarray):
    """What transformers gives if the weights change between tokens and earlier keys and values are kept.

    Token i of the answer is sampled by `models[versions[i]]`, which feeds the token before it (for the first token:
    the whole prompt) onto the cache that the earlier versions left. Returns its log-probs, float32 `[n]`, and the
    sorted routes of all positions but the last, `[P + n - 1, MoE layers, top_k]`.
    """
    from transformers import DynamicCache

    ids = torch.as_tensor(np.concatenate([prompt, tokens]), dtype=torch.long)
    cache, logprobs, chosen, start = DynamicCache(), [], [], 0
    bounds = [i for i in range(1, len(tokens)) if versions[i] != versions[i - 1]] + [len(tokens)]
    for bound in bounds:
        reference, stop = models[int(versions[bound - 1])], len(prompt) + bound - 1
        reference._chosen.clear()
        logits = reference.model(ids[None, start:stop], past_key_values=cache, use_cache=True).logits[0].float()
        logprobs.append(torch.log_softmax(logits, -1).gather(-1, ids[start + 1 : stop + 1, None])[:, 0])
        chosen.append(torch.stack([c.reshape(stop - start, -1) for c in reference._chosen], 1))
        start = stop
    return torch.cat(logprobs)[-len(tokens) :].numpy(), np.sort(torch.cat(chosen).numpy(), -1)


class BrokenExtension(WorkerExtension):
    """vLLM as it is: experts stay in checkpoint layout after a reload. The second reload dies half-way."""

    reloads = 0

    def r3_after_load(self) -> None:
        self.reloads += 1
        if self.reloads == 2:
            raise RuntimeError("lost half-way")
