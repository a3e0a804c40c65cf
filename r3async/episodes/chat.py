"""Chat templates, token-in/token-out: only what is new is rendered, and sampled tokens are never tokenised again."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from r3async.envs.base import Message

_MARK = "r3async-answer-mark"


class TemplateError(ValueError):
    """A tokenizer or chat template that can not be used turn by turn."""


class ChatRenderer:
    """Renders the messages of one turn to the token ids that follow what the model has seen so far.

    `tokenizer`: a transformers tokenizer with a chat template and an end-of-sequence token that ends an answer.
    """

    def __init__(self, tokenizer: Any, stop_token_ids: Sequence[int] = ()):
        self.tokenizer = tokenizer
        if tokenizer.chat_template is None:
            raise TemplateError("the tokenizer has no chat template; add chat_template.jinja to the model directory")
        if tokenizer.eos_token_id is None:
            raise TemplateError("the tokenizer has no end-of-sequence token")
        self.end_id: int = tokenizer.eos_token_id
        self.stop_token_ids: tuple[int, ...] = tuple(dict.fromkeys([self.end_id, *stop_token_ids]))
        self.following([Message("user", "hello")])  # refuses an unusable template now, not on turn two

    @classmethod
    def from_model(cls, path: str | Path) -> ChatRenderer:
        """Tokenizer and stop tokens of a model directory."""
        from transformers import AutoTokenizer, GenerationConfig

        tokenizer = AutoTokenizer.from_pretrained(path)
        stops: list[int] = []
        if (Path(path) / "generation_config.json").is_file():
            eos = GenerationConfig.from_pretrained(path).eos_token_id
            stops = [eos] if isinstance(eos, int) else list(eos or [])
        return cls(tokenizer, stops)

    def _render(self, messages: Sequence[Message]) -> str:
        plain = [{"role": m.role, "content": m.content} for m in messages]
        return self.tokenizer.apply_chat_template(plain, tokenize=False, add_generation_prompt=True)

    def _encode(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=False)

    def first(self, messages: Sequence[Message]) -> list[int]:
        """Token ids of the first prompt, ready for an answer."""
        return self._encode(self._render(messages))

    def following(self, messages: Sequence[Message]) -> list[int]:
        """Token ids between an answer's end-of-sequence token and the next answer.

        The template is rendered around a marked answer; what stands after that answer's end is new. Raises
        `TemplateError` if the template does not end an answer with the end-of-sequence token.
        """
        rendered = self._render([Message("user", "u"), Message("assistant", _MARK), *messages])
        _, found, after = rendered.partition(_MARK)
        gap, ended, new = after.partition(self.tokenizer.eos_token)
        if not found or not ended or gap.strip():
            raise TemplateError(
                f"the chat template does not end an answer with {self.tokenizer.eos_token!r}; "
                "it can not be continued token by token"
            )
        return self._encode(new)

    def text(self, token_ids: Sequence[int]) -> str:
        """The answer's text, its stop token left out."""
        ids = list(token_ids)
        if ids and ids[-1] in self.stop_token_ids:
            ids.pop()
        return self.tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
