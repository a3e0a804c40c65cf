"""Real vLLM: supports of tokens sampled by top-p, top-k or min-p are those of the model, and their log-probs are over these; an
answer ends with the token that completes a stop string, and with no other."""

import asyncio
import string

import numpy as np
import pytest
import pytest_asyncio
import torch
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel

from r3async.config.generator import GeneratorConfig
from r3async.data.supports import SupportSets
from r3async.rollout.engine import EngineError
from r3async.rollout.vllm.engine import VllmEngine
from r3async.rollout.vllm.sampling_masks import pack_bits
from r3async.rollout.vllm.stop_strings import StopStringMatcher
from tests.helpers.engine import END, VOCABULARY, make_model, prompt, request

pytestmark = pytest.mark.engine
PAIRS = tuple(a + b for a in string.ascii_lowercase for b in string.ascii_lowercase)
TRUNCATED = [{"top_p": 0.5}, {"top_k": 7}, {"min_p": 0.5}, {"top_p": 0.9, "top_k": 60, "min_p": 0.1}, {}]
ON_ENGINE = pytest.mark.asyncio(loop_scope="module")


@pytest.fixture(scope="module")
def of_bytes() -> Tokenizer:
    tokenizer = Tokenizer(BPE({c: i for i, c in enumerate(sorted(ByteLevel.alphabet()))}, []))
    tokenizer.pre_tokenizer, tokenizer.decoder = ByteLevel(add_prefix_space=False), ByteLevelDecoder()
    return tokenizer


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("model"))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engine(path):
    """One that records of which tokens it samples."""
    engine = VllmEngine(
        str(path),
        GeneratorConfig(dtype="float32", concurrency=16, kv_cache_gib=0.1),
        max_model_len=128,
        extra_records=("sampling_masks",),
    )
    await engine.start()
    yield engine
    await engine.stop()


# --- supports


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


@ON_ENGINE
async def test_supports_are_those_of_the_model_and_log_probs_are_renormalised(engine, path) -> None:
    from transformers import AutoModelForCausalLM

    temperature = 0.7
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
    made, others = made[: len(asked)], made[len(asked) : -1]
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


# --- stop strings


@given(st.text("ab\né你", max_size=30), st.lists(st.text("ab\né你", min_size=1, max_size=3), min_size=1, max_size=3))
def test_the_token_that_completes_a_stop_string_is_found(of_bytes, text, stop):
    watch, ids = StopStringMatcher(of_bytes, stop), of_bytes.encode(text).ids
    ends = next((i for i in range(len(ids)) if watch.add_token(ids[i]) is not None), None)
    whole = [of_bytes.decode(ids[: i + 1]) for i in range(len(ids))]
    assert ends == next((i for i, said in enumerate(whole) if any(s in said for s in stop)), None)


def test_bytes_that_are_no_text_are_passed_over(of_bytes):
    watch = StopStringMatcher(of_bytes, ["b"])
    alphabet = sorted(ByteLevel.alphabet())
    ids = [alphabet.index(c) for c in "ÿþÿþÿ"] + of_bytes.encode("ab").ids
    found = [watch.add_token(i) for i in ids]
    assert found[:-1] == [None] * (len(ids) - 1)
    assert found[-1] == "b"


@ON_ENGINE
async def test_answers_end_with_the_token_that_completes_a_stop_string(engine, path):
    calls = [
        request(
            prompt(9, i),
            60,
            f"r{i}",
            stop_token_ids=(END,),
            stop_strings=PAIRS,
            top_p=0.97 if i % 2 else 1.0,
            needs_sampling_mask=True,
        )
        for i in range(40)
    ]
    made = await asyncio.gather(*map(engine.generate, calls))
    plain = await engine.generate(request(prompt(9, 99), 60, "plain"))
    tokenizer = Tokenizer.from_file(str(path / "tokenizer.json"))
    assert len(plain.token_ids) == 60
    ended = 0
    for got in made:
        texts = [tokenizer.decode(got.token_ids[:n].tolist(), skip_special_tokens=False) for n in (-1, 99)]
        has = [any(pair in text for pair in PAIRS) for text in texts]
        assert not has[0]
        if got.token_ids[-1] == END:
            assert got.stop_reason == "stop"
            continue
        assert has[1] == (got.stop_reason == "stop")
        assert len(got.supports) == len(got.logprobs) == len(got.token_ids)
        ended += has[1]
    assert ended >= 3


@ON_ENGINE
async def test_the_last_token_that_an_answer_may_have_can_complete_a_stop_string(engine):
    """With the limit at the very token that completed one, the string ends the answer, not the limit."""

    def ask(i, limit):
        return engine.generate(request(prompt(9, i), limit, f"r{i}-{limit}", stop_strings=PAIRS, temperature=0.0))

    free = await asyncio.gather(*(ask(i, 60) for i in range(16)))
    free = [(i, got) for i, got in enumerate(free) if got.stop_reason == "stop"]
    at_limit = await asyncio.gather(*(ask(i, len(got.token_ids)) for i, got in free))
    below = await asyncio.gather(*(ask(i, len(got.token_ids) - 1) for i, got in free if len(got.token_ids) > 1))
    assert free
    for (_, want), got in zip(free, at_limit, strict=True):
        assert got.token_ids.tolist() == want.token_ids.tolist()
        assert got.stop_reason == "stop"
    assert {got.stop_reason for got in below} <= {"length"}


@ON_ENGINE
async def test_stop_strings_without_a_tokenizer_are_refused(engine, path):
    (path / "tokenizer.json").rename(path / "gone.json")
    try:
        with pytest.raises(EngineError, match=r"no tokenizer\.json"):
            await engine.generate(request(prompt(9), 60, stop_strings=PAIRS))
    finally:
        (path / "gone.json").rename(path / "tokenizer.json")
