"""Chat templates, token-in/token-out: sampled tokens are kept as they are, and never tokenised again.

Before each turn the template renders the whole conversation. As long as what it writes begins with what the model has seen
(the **extension property**), only the rest is encoded. Where it does not (a template that strips earlier thoughts, a
history that was compacted), the prompt keeps the tokens up to the first difference, and every answer that is repeated word
for word keeps its own.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from r3async.envs import Message


class TemplateError(ValueError):
    """A tokenizer or chat template that cannot be used."""


class TextTooLong(ValueError):
    """A prompt's text that cannot be within the limit of tokens, whatever they are; it was not tokenised."""

    def __init__(self, characters: int, most_tokens: int):
        super().__init__(f"{characters} characters are more than {most_tokens} tokens")
        self.characters = characters


class ChatRenderer:
    """A tokenizer with its chat template, and the tokens that end an answer.

    `tokenizer`: of transformers, with a chat template and an end-of-sequence token. `template_args`: further variables of
    the template (`{"enable_thinking": False}`). Raises `TemplateError` for a tokenizer that has no template, no
    end-of-sequence token, or whose template fails on one plain message.
    """

    def __init__(
        self, tokenizer: Any, stop_token_ids: Sequence[int] = (), template_args: Mapping[str, Any] | None = None
    ):
        self.tokenizer = tokenizer
        self.template_args = dict(template_args or {})
        if tokenizer.chat_template is None:
            raise TemplateError("the tokenizer has no chat template; add chat_template.jinja to the model directory")
        if tokenizer.eos_token_id is None:
            raise TemplateError("the tokenizer has no end-of-sequence token")
        self.end_id: int = tokenizer.eos_token_id
        self.stop_token_ids: tuple[int, ...] = tuple(dict.fromkeys([self.end_id, *stop_token_ids]))
        self.longest_token = max(map(len, tokenizer.get_vocab()), default=1)
        """Characters that one token may stand for."""
        self.render([Message("user", "hello")])

    @classmethod
    def from_model(cls, path: str | Path, template_args: Mapping[str, Any] | None = None) -> ChatRenderer:
        """Tokenizer and stop tokens of a model directory."""
        from transformers import AutoTokenizer, GenerationConfig

        tokenizer = AutoTokenizer.from_pretrained(path)
        stops: list[int] = []
        if (Path(path) / "generation_config.json").is_file():
            eos = GenerationConfig.from_pretrained(path).eos_token_id
            stops = [eos] if isinstance(eos, int) else list(eos or [])
        return cls(tokenizer, stops, template_args)

    def render(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] = ()) -> str:
        """The template's text, ready for an answer. Raises `TemplateError` with what the template raised."""
        try:
            return self.tokenizer.apply_chat_template(
                [m.for_template() for m in messages],
                tools=list(tools) or None,
                tokenize=False,
                add_generation_prompt=True,
                **self.template_args,
            )
        except Exception as error:  # whatever a template raises: jinja's errors, raise_exception, a missing key
            roles = ", ".join(m.role for m in messages)
            raise TemplateError(f"the chat template refuses messages of roles {roles}: {error}") from error

    def check_length(self, text: str, most_tokens: int | None) -> None:
        """Raise `TextTooLong` for a text of more than `most_tokens` tokens of the longest kind: at no cost, before `encode`."""
        if most_tokens is not None and len(text) > most_tokens * self.longest_token:
            raise TextTooLong(len(text), most_tokens)

    def encode(self, text: str) -> list[int]:
        """Token ids; special tokens are found in the text, none is added."""
        return self.tokenizer.encode(text, add_special_tokens=False)

    def decode(self, token_ids: Sequence[int]) -> str:
        return self.tokenizer.decode(token_ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)

    def text(self, token_ids: Sequence[int]) -> str:
        """The answer's text, its stop token left out."""
        ids = list(token_ids)
        if ids and ids[-1] in self.stop_token_ids:
            ids.pop()
        return self.decode(ids)


class _Piece(msgspec.Struct, frozen=True):
    """A stretch of the prompt, as text and as tokens. Of an answer: `stop` is the text of its stop token, if it has one."""

    text: str
    token_ids: list[int]
    sampled: bool = False
    stop: str = ""


class Conversation:
    """One episode's messages, and the token ids of its next prompt.

    In turns: `prompt`, `answered`, then `observe` (or `rewrite`). Not for concurrent use.
    """

    def __init__(
        self,
        renderer: ChatRenderer,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] = (),
        most_tokens: int | None = None,
    ):
        """`most_tokens`: a text that must have more is not tokenised, but raises `TextTooLong`."""
        self.renderer, self.tools, self._most_tokens = renderer, tools, most_tokens
        self.messages = list(messages)
        self._pieces: list[_Piece] = []
        self._answers: dict[str, _Piece] = {}
        """By text: how the newest answer of that text was sampled."""

    def begin_like(self, others: Sequence[Conversation]) -> None:
        """Before the first `prompt`: take over the tokens of that one of `others` which shares most with these messages, and of
        every answer of theirs that is repeated word for word. Among equals the newest counts, which is the last.

        For whoever is handed whole conversations: requests that branch, run beside each other, or edit history.
        """
        rendered = self._rendered()
        furthest = -1
        for other in others:
            self._answers |= other._answers
            kept, at = other._seen(rendered)
            if at >= furthest:
                self._pieces, furthest = kept, at

    def prompt(self) -> list[int]:
        """Token ids of the prompt for the next answer. Raises `TemplateError` if the template refuses the messages."""
        rendered = self._rendered()
        kept, at = self._seen(rendered)
        self._pieces = [*kept, *self._unseen(rendered, at, sum(piece.sampled for piece in kept))]
        return [token for piece in self._pieces for token in piece.token_ids]

    def _rendered(self) -> str:
        text = self.renderer.render(self.messages, self.tools)
        self.renderer.check_length(text, self._most_tokens)
        return text

    def answered(self, token_ids: Sequence[int], message: Message | None = None) -> str:
        """Take the answer to the last `prompt`; returns its text. `message`: how it stands in the conversation, if not as
        that text (with tool calls taken out of it, say)."""
        ids = list(token_ids)
        ended = bool(ids) and ids[-1] in self.renderer.stop_token_ids
        text = self.renderer.text(ids)
        piece = _Piece(text, ids, sampled=True, stop=self.renderer.decode(ids[-1:]) if ended else "")
        self._pieces.append(piece)
        self._answers[text] = piece
        self.messages.append(message or Message("assistant", text))
        return text

    def observe(self, messages: Sequence[Message]) -> None:
        """What follows the last answer."""
        self.messages += messages

    def rewrite(self, messages: Sequence[Message]) -> None:
        """Replace the whole conversation."""
        self.messages = list(messages)

    def _seen(self, rendered: str) -> tuple[list[_Piece], int]:
        """The pieces that `rendered` begins with, and where the rest begins. White space that a template puts or takes around an
        answer is not a difference: the model's own stays."""
        kept: list[_Piece] = []
        at = 0
        for piece in self._pieces:
            if not piece.sampled:
                if not rendered.startswith(piece.text, at):
                    return kept, at
                at += len(piece.text)
                kept.append(piece)
                continue
            text = piece.text.strip()
            # A cut answer ends where its own white space does, if the template has not taken that.
            own = "(?:" + re.escape(piece.text[len(piece.text.rstrip()) :]) + ")?"
            end = r"\s*" + re.escape(piece.stop) if piece.stop else own
            match = re.compile(r"\s*" + re.escape(text) + end).match(rendered, at)
            if match is None:
                return kept, at
            kept.append(piece)
            at = match.end()
        return kept, at

    def _unseen(self, rendered: str, at: int, skipped: int) -> Iterator[_Piece]:
        """`rendered[at:]` in pieces: answers that were sampled and ended keep their tokens, the rest is encoded.

        `skipped`: answers that stand before `at`."""
        spoken = [m for m in self.messages if m.role == "assistant"][skipped:]
        for message in spoken:
            piece = self._answers.get(message.content)
            if piece is None or not piece.text or not piece.stop:
                continue
            found = rendered.find(piece.text + piece.stop, at)
            if found < 0:
                continue
            if found > at:
                yield self._encoded(rendered[at:found])
            yield piece
            at = found + len(piece.text) + len(piece.stop)
        if at < len(rendered):
            yield self._encoded(rendered[at:])

    def _encoded(self, text: str) -> _Piece:
        return _Piece(text, self.renderer.encode(text))
