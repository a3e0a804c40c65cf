"""Real vLLM: an answer ends with the token that completes a stop string, and with no other."""

from __future__ import annotations

import asyncio
import string

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel

from r3async.rollout.engine import EngineError
from r3async.rollout.vllm.core import StopStringMatcher
from r3async.rollout.vllm.engine import VllmEngine
from tests.helpers.engine import END, make_model, prompt, request

pytestmark = pytest.mark.engine
PAIRS = tuple(a + b for a in string.ascii_lowercase for b in string.ascii_lowercase)


@pytest.fixture(scope="module")
def of_bytes() -> Tokenizer:
    tokenizer = Tokenizer(BPE({c: i for i, c in enumerate(sorted(ByteLevel.alphabet()))}, []))
    tokenizer.pre_tokenizer, tokenizer.decoder = ByteLevel(add_prefix_space=False), ByteLevelDecoder()
    return tokenizer


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


def test_answers_end_with_the_token_that_completes_a_stop_string(tmp_path):
    path = make_model(tmp_path / "model")

    async def play():
        engine = VllmEngine(
            str(path), dtype="float32", concurrency=16, max_model_len=128, kv_cache_gib=0.1, record_sampling_masks=True
        )
        try:
            await engine.start()
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
            (path / "tokenizer.json").rename(path / "gone.json")
            with pytest.raises(EngineError, match=r"no tokenizer\.json"):
                await engine.generate(calls[0])
            return made, plain
        finally:
            await engine.stop()

    made, plain = asyncio.run(play())
    tokenizer = Tokenizer.from_file(str(path / "gone.json"))
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


def test_the_last_token_that_an_answer_may_have_can_complete_a_stop_string(tmp_path):
    """With the limit at the very token that completed one, the string ends the answer, not the limit."""
    path = make_model(tmp_path / "model")

    async def play():
        engine = VllmEngine(str(path), dtype="float32", concurrency=16, max_model_len=128, kv_cache_gib=0.1)
        try:
            await engine.start()

            def ask(i, limit):
                return engine.generate(
                    request(prompt(9, i), limit, f"r{i}-{limit}", stop_strings=PAIRS, temperature=0.0)
                )

            free = await asyncio.gather(*(ask(i, 60) for i in range(16)))
            free = [(i, got) for i, got in enumerate(free) if got.stop_reason == "stop"]
            at_limit = await asyncio.gather(*(ask(i, len(got.token_ids)) for i, got in free))
            below = await asyncio.gather(*(ask(i, len(got.token_ids) - 1) for i, got in free if len(got.token_ids) > 1))
            return free, at_limit, below
        finally:
            await engine.stop()

    free, at_limit, below = asyncio.run(play())
    assert free
    for (_, want), got in zip(free, at_limit, strict=True):
        assert got.token_ids.tolist() == want.token_ids.tolist()
        assert got.stop_reason == "stop"
    assert {got.stop_reason for got in below} <= {"length"}
