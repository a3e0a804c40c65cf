"""Selection of the parser for an answer's tool calls.

Hermes' and Qwen's form is parsed here, without the engine. Every other form is left to vLLM's
parsers.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from r3async.config import ConfigError
from r3async.envs.tool_call_parser import list_tool_names, parse_tool_calls, split_reasoning
from r3async.rollout.endpoint.protocol import build_tool_call
from r3async.rollout.engine import Engine, EngineError
from r3async.rollout.renderer import ChatRenderer
from r3async.untrusted import MalformedError, decode_json_object
from r3async.world import EventReporter, ignore_event

BUILTIN_PARSER = "builtin"
AUTO_PARSER = "auto"
ChatToolCalls = list[dict[str, Any]]
ParseToolCalls = Callable[[str, Sequence[Mapping[str, Any]]], Awaitable[tuple[str, ChatToolCalls]]]
"""Function that parses an answer into `content, tool_calls`, in OpenAI's form."""

PARSER_BY_MARKER = (
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
"""Marker that a chat template writes around a call, and vLLM's parser of that form. The first match
in a template counts."""


async def parse_builtin(text: str, tools: Sequence[Mapping[str, Any]]) -> tuple[str, ChatToolCalls]:
    return parse_tool_calls(text, tools)


def detect_parser(template: str) -> str:
    """Return the parser for a chat template's form of tool calls: `builtin` for Hermes' form,
    and if it has none."""
    if "<｜tool▁calls▁begin｜>" in template and "```json" in template:
        return "deepseek_v3"
    return next(
        (parser for marker, parser in PARSER_BY_MARKER if marker in template), BUILTIN_PARSER
    )


async def select_tool_parser(
    name: str, engine: Engine, renderer: ChatRenderer, report_event: EventReporter = ignore_event
) -> ParseToolCalls:
    """Return the parser of `serving.tool_parser` = `name`. The engine must have started.

    Raises `ConfigError` for a name that the engine does not have. If the template selects a parser
    that the engine lacks, that is reported and the built-in parser is used.
    """
    template = renderer.tokenizer.chat_template
    wanted = name
    if name == AUTO_PARSER:
        wanted = detect_parser(
            template if isinstance(template, str) else "\n".join(template.values())
        )
    if wanted == BUILTIN_PARSER:
        return parse_builtin
    of_engine = getattr(engine, "parse_tool_calls", None)
    try:
        if of_engine is None:
            raise EngineError("this engine has no tool parsers")
        await of_engine(wanted, "", [])
    except EngineError as error:
        if name != AUTO_PARSER:
            raise ConfigError(f"`serving.tool_parser` = {name!r}: {error}") from error
        report_event("tool_parser_unavailable", parser=wanted, error=str(error))
        return parse_builtin

    async def parse_with_engine(
        text: str, tools: Sequence[Mapping[str, Any]]
    ) -> tuple[str, ChatToolCalls]:
        if not tools:
            return text, []
        thoughts, spoken = split_reasoning(text)
        content, calls = await of_engine(wanted, spoken, tools)
        offered = list_tool_names(tools)
        if not calls or not all(
            name in offered and _is_json_object(arguments) for _, name, arguments in calls
        ):
            return text, []
        return (thoughts + content).strip(), [build_tool_call(*call) for call in calls]

    return parse_with_engine


def _is_json_object(arguments: str) -> bool:
    try:
        decode_json_object(arguments)
    except MalformedError:
        return False
    return True
