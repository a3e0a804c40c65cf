"""vLLM's tool parsers, by name, in the engine's process, where vLLM is imported already."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

from transformers import AutoTokenizer
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.tool_parsers import ToolParserManager


class VllmToolParser:
    """A callable `(parser, text, tools)` that returns an answer's content and its calls.

    A call is `id, name, arguments` (JSON as text). Text that cannot be parsed is content. Raises
    `ValueError` for an unknown parser, and the parser's own error if it does not fit the tokenizer
    of the model at `model_path`.
    """

    def __init__(self, model_path: str):
        self._model_path = model_path

    @functools.cached_property
    def _tokenizer(self) -> Any:
        return AutoTokenizer.from_pretrained(self._model_path)

    def __call__(
        self, parser: str, text: str, tools: Sequence[Mapping[str, Any]]
    ) -> tuple[str, list[tuple[str, str, str]]]:
        try:
            kind = ToolParserManager.get_tool_parser(parser)
        except KeyError as error:
            raise ValueError(f"vLLM has no tool parser {parser!r}") from error
        request = ChatCompletionRequest(
            messages=[{"role": "user", "content": ""}], tools=list(tools) or None
        )
        # A parser has state, so each answer gets a new one.
        reading = kind(self._tokenizer, request.tools)
        if not text:
            return "", []
        try:
            read = reading.extract_tool_calls(text, request)
        except NotImplementedError:
            raise
        except Exception:
            return text, []
        return read.content or "", [
            (c.id, c.function.name, c.function.arguments) for c in read.tool_calls
        ]
