"""An agent with the `openai` package before the real engine: every recorded number is what transformers computes."""

import asyncio
import json

import numpy as np
import openai
import pytest
from transformers import AutoTokenizer

from r3async.config import ConfigError, EnvConfig, EpisodeConfig, ServingConfig
from r3async.rollout.agent_player import open_agent_player
from r3async.rollout.endpoint.tool_parser_choice import select_tool_parser
from r3async.rollout.engine import EngineError
from r3async.rollout.episode import EpisodeTask
from r3async.rollout.play_context import PlayContext
from r3async.rollout.renderer import ChatRenderer
from tests.helpers.engine import Reference

pytestmark = pytest.mark.asyncio(loop_scope="session")

TEMPLATE = "{% for m in messages %}{{ m['role'] }}:{{ m['content'] }}<|end|>{% endfor %}assistant:"
SETTINGS = EpisodeConfig(max_turns=6, max_new_tokens=8, max_prompt_tokens=128, max_total_tokens=256, temperature=0.8)


async def plays(base_url, api_key, task_seed):
    """Two turns, then two answers at once to the second, and one completion of what the first began with."""
    async with openai.AsyncOpenAI(base_url=base_url, api_key=api_key) as client:

        async def say(messages):
            answer = await client.chat.completions.create(model="m", messages=messages)
            return answer.choices[0].message

        history = [{"role": "user", "content": f"abc {task_seed}"}]
        history += [await say(history), {"role": "user", "content": "more"}]
        await asyncio.gather(say(history), say(history))
        await client.completions.create(model="m", prompt="user:abc", max_tokens=4)
        return 1.0


async def test_what_an_agent_causes_is_recorded_as_transformers_would_compute_it(vllm_engine, tiny_model):
    assert vllm_engine.version == -1, "this file runs before other weights are installed in the suite's engine"
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    tokenizer.chat_template = TEMPLATE
    env = EnvConfig(name="agent:tests.engine.test_serving_on_vllm:plays")
    async with open_agent_player(
        env, SETTINGS, ServingConfig(), PlayContext(vllm_engine, ChatRenderer(tokenizer))
    ) as play:
        trajectory = await play(EpisodeTask(0, 0, 7))
    assert [turn.index for turn in trajectory.turns] == [0, 1, 2, 3]
    assert len(trajectory.samples) == 3  # the conversation, its second ending, and the completion
    reference = Reference(tiny_model)
    recorded = trained = 0
    for sample in trajectory.samples:
        table = sample.table
        ids, at = table["token_ids"], np.flatnonzero(table["loss_mask"])
        known = table["routing_recorded"]
        recorded += int(known[at - 1].sum())
        trained += len(at)
        assert np.abs(table["rollout_logprobs"][at] - reference.score(ids, temperature=0.8)[at - 1]).max() < 1e-4
        routes = np.sort(table["routed_experts"], axis=-1)
        assert np.array_equal(routes[known], reference.routes(ids)[known])
    assert recorded / trained >= 0.95


TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "add",
            "parameters": {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}},
        },
    }
]
ARGUMENTS = {"a": 1, "b": 2}
QWEN = "".join(f"<parameter={name}>\n{value}\n</parameter>\n" for name, value in ARGUMENTS.items())
GLM = "".join(f"<arg_key>{name}</arg_key>\n<arg_value>{value}</arg_value>\n" for name, value in ARGUMENTS.items())
WRITTEN = {
    "hermes": f'<tool_call>{{"name": "add", "arguments": {json.dumps(ARGUMENTS)}}}</tool_call>',
    "qwen3_coder": f"<tool_call>\n<function=add>\n{QWEN}</function>\n</tool_call>",
    "glm45": f"<tool_call>add\n{GLM}</tool_call>",
    "pythonic": "[add(a=1, b=2)]",
}
"""The same call by the forms of four families of models."""


async def test_the_engines_own_parsers_read_the_calls_of_each_family(vllm_engine, tiny_model):
    chat = ChatRenderer(AutoTokenizer.from_pretrained(tiny_model, chat_template=TEMPLATE))
    for name, text in WRITTEN.items():
        parse = await select_tool_parser(name, vllm_engine, chat)
        for before in ("", "See. ") if name != "pythonic" else ("",):
            content, calls = await parse(before + text, TOOLS)
            (call,) = calls
            assert (content, call["function"]["name"], call["type"]) == (before.strip(), "add", "function")
            assert json.loads(call["function"]["arguments"]) == ARGUMENTS
        assert await parse("no call", TOOLS) == ("no call", [])
        assert await parse(text, []) == (text, [])
    with pytest.raises(EngineError, match="no tool parser 'guess'"):
        await vllm_engine.parse_tool_calls("guess", "", [])
    with pytest.raises(ConfigError, match=r"`serving\.tool_parser` = 'mistral'"):
        await select_tool_parser("mistral", vllm_engine, chat)
    reports = []
    taught = ChatRenderer(AutoTokenizer.from_pretrained(tiny_model, chat_template="[TOOL_CALLS]" + TEMPLATE))
    parse = await select_tool_parser(
        "auto", vllm_engine, taught, lambda event, **fields: reports.append((event, fields["parser"]))
    )
    assert reports == [("tool_parser_unavailable", "mistral")], "the tokenizer of this model has no such token"
    assert len((await parse(WRITTEN["hermes"], TOOLS))[1]) == 1
