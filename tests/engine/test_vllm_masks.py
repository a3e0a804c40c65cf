"""Real vLLM: supports of tokens sampled by top-p, top-k or min-p are those of the model, and their log-probs are over these."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
import torch

from r3async.data.supports import SupportSets
from r3async.rollout.vllm.engine import VllmEngine
from r3async.rollout.vllm.worker import pack_bits
from tests.helpers.engine import VOCABULARY, make_model, prompt, request

pytestmark = pytest.mark.engine
TRUNCATED = [{"top_p": 0.5}, {"top_k": 7}, {"min_p": 0.5}, {"top_p": 0.9, "top_k": 60, "min_p": 0.1}, {}]


def left(logits: torch.Tensor, top_p: float = 1.0, top_k: int = 0, min_p: float = 0.0) -> np.ndarray:
    """bool `[T, V]`: what may be sampled of float64 logits: min-p of all, then top-k, then top-p of what is left."""
    probs = logits.softmax(-1)
    logits = logits.masked_fill(probs < min_p * probs.max(-1, keepdim=True).values, -torch.inf)
    if top_k:
        logits = logits.masked_fill(logits < logits.topk(top_k).values[:, -1:], -torch.inf)
    ordered, order = logits.softmax(-1).sort(-1, descending=True)
    first = ordered.cumsum(-1) - ordered < top_p
    return torch.zeros_like(first).scatter(-1, order, first).numpy() & (logits > -torch.inf).numpy()


def test_bits_are_those_of_numpy() -> None:
    possible = torch.rand(5, 100) < 0.3
    expected = np.packbits(possible.numpy(), axis=1, bitorder="little")
    assert np.array_equal(pack_bits(possible).numpy().view(np.uint8)[:, : expected.shape[1]], expected)


def test_supports_are_those_of_the_model_and_log_probs_are_renormalised(tmp_path) -> None:
    from transformers import AutoModelForCausalLM

    path = make_model(tmp_path / "model")
    temperature = 0.7

    async def play():
        engine = VllmEngine(
            str(path), dtype="float32", concurrency=8, max_model_len=64, kv_cache_gib=0.1, record_sampling_masks=True
        )
        try:
            await engine.start()
            asked = [
                request(
                    prompt(9, i),
                    12,
                    f"r{i}",
                    temperature=temperature,
                    needs_sampling_mask=True,
                    **TRUNCATED[i % len(TRUNCATED)],
                )
                for i in range(10)
            ]
            # One that does not ask for its mask runs beside them, and a greedy one, and a text is scored.
            others = [request(prompt(9, 90), 12, "other"), request(prompt(9, 91), 12, "greedy", temperature=0.0)]
            made = await asyncio.gather(*map(engine.generate, [*asked, *others]), engine.score_tokens(prompt(9, 92)))
            return asked, made[: len(asked)], made[len(asked) : -1]
        finally:
            await engine.stop()

    asked, made, others = asyncio.run(play())
    assert all(other.supports is None for other in others)
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    for call, got in zip(asked, made, strict=True):
        ids = torch.tensor(np.concatenate([call.prompt_ids, got.token_ids]))[None].long()
        with torch.no_grad():
            logits = model(ids).logits[0, len(call.prompt_ids) - 1 : -1].double() / temperature
        supports = got.supports
        assert isinstance(supports, SupportSets)
        assert len(supports) == len(got.token_ids)
        dense = supports.to_dense_mask(VOCABULARY)
        settings = {"top_p": call.top_p, "top_k": call.top_k, "min_p": call.min_p}
        expected = left(logits, **settings)
        # A token on the very edge may fall to either side in single precision.
        assert (dense != expected).sum() <= 2
        assert dense.all() == (settings == {"top_p": 1.0, "top_k": 0, "min_p": 0.0})
        masked = logits.masked_fill(~torch.from_numpy(dense), -torch.inf).log_softmax(-1)
        mine = masked[torch.arange(len(dense)), torch.from_numpy(got.token_ids).long()]
        assert np.abs(mine.numpy() - got.logprobs).max() < 1e-4
