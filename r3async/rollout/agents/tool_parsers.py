"""Who reads the tool calls of an answer: this library, or the engine's own parser for the model's form.

Hermes' and Qwen's form is read here, without asking the engine. Every other is vLLM's to know.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from r3async.config import ConfigError
from r3async.envs.tool_calls import offered_names, parse_answer, split_thoughts
from r3async.rollout.agents.protocol import chat_call
from r3async.rollout.chat import ChatRenderer
from r3async.rollout.engines import Engine, EngineError
from r3async.untrusted import Malformed, decode_object

BUILT_IN, BY_MODEL = "builtin", "auto"
Calls = list[dict[str, Any]]
Parse = Callable[[str, Sequence[Mapping[str, Any]]], Awaitable[tuple[str, Calls]]]
"""`content, tool_calls` of an answer, in OpenAI's shape."""

FORMS = (
    ("<parameter=", "qwen3_coder"),
    ("<arg_key>", "glm45"),
    ("[TOOL_CALLS]", "mistral"),
    ("<|tool_calls_section_begin|>", "kimi_k2"),
    ("<minimax:tool_call>", "minimax_m2"),
    ("<seed:tool_call>", "seed_oss"),
    ("<｜tool▁calls▁begin｜>", "deepseek_v31"),
    ("<|python_tag|>", "llama3_json"),
    ("<|tool_call|>", "granite"),
)
"""What a chat template writes around a call, and vLLM's parser of that form. The first that a template has counts."""


async def builtin(text: str, tools: Sequence[Mapping[str, Any]]) -> tuple[str, Calls]:
    return parse_answer(text, tools)


def form_of(template: str) -> str:
    """The parser for what a chat template teaches: `builtin` for Hermes' form, and where it teaches none."""
    if "<｜tool▁calls▁begin｜>" in template and "```json" in template:
        return "deepseek_v3"
    return next((parser for marker, parser in FORMS if marker in template), BUILT_IN)


async def tool_parser(
    name: str, engine: Engine, renderer: ChatRenderer, report: Callable[..., object] = lambda event, **fields: None
) -> Parse:
    """What `serving.tool_parser` = `name` asks for. The engine must have started. Raises `ConfigError` for a name that it
    does not have. A parser that was chosen by the template, and that the engine cannot give, is reported, and ours is
    taken."""
    template = renderer.tokenizer.chat_template
    wanted = name
    if name == BY_MODEL:
        wanted = form_of(template if isinstance(template, str) else "\n".join(template.values()))
    if wanted == BUILT_IN:
        return builtin
    of_engine = getattr(engine, "tool_calls", None)
    try:
        if of_engine is None:
            raise EngineError("this engine has no tool parsers")
        await of_engine(wanted, "", [])
    except EngineError as error:
        if name != BY_MODEL:
            raise ConfigError(f"`serving.tool_parser` = {name!r}: {error}") from error
        report("tool_parser_unavailable", parser=wanted, error=str(error))
        return builtin

    async def parse(text: str, tools: Sequence[Mapping[str, Any]]) -> tuple[str, Calls]:
        if not tools:
            return text, []
        thoughts, spoken = split_thoughts(text)
        content, calls = await of_engine(wanted, spoken, tools)
        offered = offered_names(tools)
        if not calls or not all(name in offered and _is_object(arguments) for _, name, arguments in calls):
            return text, []
        return (thoughts + content).strip(), [chat_call(*call) for call in calls]

    return parse


def _is_object(arguments: str) -> bool:
    try:
        decode_object(arguments)
    except Malformed:
        return False
    return True
