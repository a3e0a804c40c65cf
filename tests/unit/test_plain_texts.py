"""Texts that no chat template wrote, for a tokenizer that begins texts with a token of its own."""

import openai
import pytest
from tokenizers.processors import TemplateProcessing

from r3async.config import EpisodeConfig
from r3async.rollout.renderer import ChatRenderer, encode_plain
from r3async.tools.diagnose.command import make_prompt
from r3async.tools.init_model import build_byte_tokenizer
from r3async.weights.probe import make_probe_text
from tests.helpers.serving import TASK, answer_ids, client_of, finished, ready, serving, trained_tokens

POST_PROCESSORS = {"first": "<bos> $A", "both": "<bos> $A <end>", "two": "<bos> <end> $A", "none": "$A"}


def beginning_tokenizer(single: str = "<bos> $A"):
    tokenizer = build_byte_tokenizer()
    tokenizer.add_special_tokens({"bos_token": "<bos>"})
    tokenizer.add_tokens(["<end>"], special_tokens=True)
    named = [(token, tokenizer.convert_tokens_to_ids(token)) for token in ("<bos>", "<end>")]
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single=single, special_tokens=named)
    return tokenizer, named[0][1]


@pytest.mark.parametrize("name", POST_PROCESSORS)
def test_a_plain_text_begins_as_the_tokenizer_begins_texts_once_and_ends_with_nothing(name):
    tokenizer, first = beginning_tokenizer(POST_PROCESSORS[name])
    chat = ChatRenderer(tokenizer)
    whole = tokenizer("Once").input_ids
    ids = chat.encode_plain("Once")
    assert ids == (whole[:-1] if name == "both" else whole)
    assert chat.encode_plain(chat.decode(ids)) == ids
    assert ids.count(first) == (name != "none")
    assert first not in chat.encode("Once"), "what a template wrote has the beginning that it wrote"
    assert encode_plain(tokenizer, "") == ids[: len(ids) - len("Once")]


async def completed(*prompts):
    """Return the tokens of each sample after completions of `prompts`, and the tokenizer's first token."""
    tokenizer, first = beginning_tokenizer()
    chat = ChatRenderer(tokenizer)
    settings = EpisodeConfig(max_turns=8, max_new_tokens=40, max_prompt_tokens=60, max_total_tokens=100)
    async with serving(await ready(answer_ids(chat, *["fine"] * len(prompts))), chat, settings) as server:
        session = server.open_session(TASK)
        async with client_of(server, session.key) as client:
            for prompt in prompts:
                await client.completions.create(model="m", prompt=prompt, max_tokens=8)
        samples = finished(session).samples
    return [sample.table["token_ids"].tolist() for sample in samples], first, samples


@pytest.mark.parametrize("prompt", ["Once upon", "<bos>Once upon"])
async def test_a_prompt_of_completions_has_its_first_token_once(prompt):
    (ids,), first, _ = await completed(prompt)
    assert (ids[0], ids.count(first)) == (first, 1)


async def test_token_ids_are_taken_as_they_are():
    (ids,), _, _ = await completed([65, 66])
    assert ids[:2] == [65, 66]


async def test_a_text_that_goes_on_has_no_second_first_token_and_stays_one_conversation():
    (one, other), first, samples = await completed("Once", "Oncefine, then")
    assert other[: len(one) - 1] == one[:-1], "all but the token that ended the first answer"
    assert other.count(first) == 1
    assert [len(trained_tokens(sample.table)) for sample in samples] == [5, 5]


async def test_the_first_token_counts_towards_the_longest_prompt():
    await completed("x" * 59)
    with pytest.raises(openai.BadRequestError, match="61 tokens"):
        await completed("x" * 60)


def test_the_texts_of_probe_and_diagnosis_begin_so_too(tmp_path):
    tokenizer, first = beginning_tokenizer()
    tokenizer.save_pretrained(tmp_path)
    from r3async.config import Config

    prompt = make_prompt(tmp_path, Config(), 300)
    assert (
        prompt.tolist() == [first, *tokenizer.encode(make_probe_text(10_000), add_special_tokens=False)][: len(prompt)]
    )
