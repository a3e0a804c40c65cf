"""Chat templates, token-in/token-out: sampled tokens are kept as they are, and never tokenised again.

Before each turn the template renders the conversation, or only its new part if that gives the same text
(`GrowingText`). As long as the text begins with what the model has seen (the **extension property**), only the rest is
encoded. Otherwise (a template that strips earlier thoughts, a compacted history) the prompt keeps the tokens up to the
first difference, and every answer that is repeated word for word keeps its own tokens. The template is used to locate
such an answer in the text, because the same words may occur elsewhere.
"""

from __future__ import annotations

import copy
import functools
import inspect
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jinja2.meta
import jinja2.sandbox
import msgspec
import numpy as np

from r3async.data.tokens import GrowingTokens, Sample, TokenTable
from r3async.envs import REASONING_KEYS, THINK_OPEN_TAG, Message
from r3async.envs.rows import MaskedAnswer
from r3async.rollout.call_forms import (
    CALL_FORMS,
    MARKER_CHARACTERS,
    PROBE_TOOL,
    CallForm,
    describe_odd_arguments,
    describe_unwritten_call,
    detect_call_form,
    find_missing_part,
    remove_whitespace,
)
from r3async.rollout.growing_text import GrowingText, TemplateAnalysis

CACHE_ENTRIES = 32
"""Number of cached token sequences of texts, and of cached texts of conversation beginnings."""
MAX_CACHED_MESSAGES = 3
"""Largest number of messages of a conversation beginning whose text is cached."""
NONDETERMINISTIC_NAMES = ("strftime_now", "now(", "random", "uuid")
"""Names by which a template is recognised whose text changes with time or at random."""
_PROBE_ANSWER, _PROBE_NEXT = "quokka", "wombat"
"""Message contents that are looked for in a template's text."""


class TemplateError(ValueError):
    """A tokenizer or chat template that cannot be used."""


class TextTooLongError(ValueError):
    """A prompt's text that exceeds the limit of tokens however it is tokenised; it was not tokenised."""

    def __init__(self, characters: int, max_tokens: int):
        super().__init__(f"{characters} characters are more than {max_tokens} tokens")
        self.characters = characters


class ChatRenderer:
    """A tokenizer with its chat template, and the tokens that end an answer.

    An answer ends with the tokenizer's end-of-sequence token, one of `stop_token_ids`, or the token that the template
    writes after answers. Raises `TemplateError` for a tokenizer that has no template or no end-of-sequence token, or
    whose template fails on one plain message.

    Args:
        tokenizer: A tokenizer of transformers, with a chat template and an end-of-sequence token.
        template_args: Further variables of the template (`{"enable_thinking": False}`).
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
        self.eos_token_id: int = tokenizer.eos_token_id
        self.max_token_characters = max(map(len, tokenizer.get_vocab()), default=1)
        """Largest number of characters for which one token may stand."""
        template = tokenizer.chat_template
        self._template = template if isinstance(template, str) else "\n".join(template.values())
        self.template_analysis = TemplateAnalysis(self._template)
        """Properties of the template, as far as its conversations have shown them."""
        # The episodes of a group begin with the same prompt, at about the same time.
        self._reads_thoughts = re.search(rf"""['".]({"|".join(REASONING_KEYS)})\b""", self._template) is not None
        self._is_nondeterministic = any(name in str(template) for name in NONDETERMINISTIC_NAMES)
        self._render_cached = functools.lru_cache(CACHE_ENTRIES)(self._render_plain)
        self.encode_cached = functools.lru_cache(CACHE_ENTRIES)(self._encode_readonly)
        """Function that returns the tokens of a text, int32 `[T]`, read-only. Special tokens in the text are
        recognised, none is added."""
        self._renderers_by_args: dict[bytes, ChatRenderer] = {}
        self._call_forms: dict[bool, CallForm | None] = {}
        """Form in which the template writes calls, without and with tools; None if it writes none."""
        self.render([Message("user", "hello")])
        ends = [self.eos_token_id, *stop_token_ids]
        if own := self._find_end_token([self.decode([token]) for token in ends]):
            ends.append(tokenizer.convert_tokens_to_ids(own))
        self.stop_token_ids: tuple[int, ...] = tuple(dict.fromkeys(ends))
        self._stop_texts = {i: self.decode([i]) for i in self.stop_token_ids}
        texts = sorted(filter(None, self._stop_texts.values()), key=len, reverse=True)
        self.stop_pattern = re.compile("|".join(map(re.escape, texts)))
        """Pattern that matches the texts of the stop tokens."""

    @functools.cached_property
    def template_variables(self) -> frozenset[str]:
        """The variables of the template that `template_args` may set."""
        theirs = inspect.signature(self.tokenizer.apply_chat_template).parameters
        return find_template_variables(self._template) - {*theirs, *self.tokenizer.special_tokens_map}

    def with_template_args(self, args: Mapping[str, Any]) -> ChatRenderer:
        """Return a renderer of the same tokenizer with `args` in addition to `template_args`.

        Raises `TemplateError` for a variable that the template does not have, or refuses.
        """
        args = {name: value for name, value in args.items() if self.template_args.get(name) != value}
        if not args:
            return self
        if unknown := sorted(set(args) - self.template_variables):
            known = f"only {', '.join(sorted(self.template_variables))}" if self.template_variables else "and no other"
            raise TemplateError(f"the chat template has no variable {unknown[0]!r}, {known}")
        key = msgspec.json.encode(args, order="sorted")
        if key not in self._renderers_by_args:
            other = copy.copy(self)
            other.template_args = {**self.template_args, **args}
            other.template_analysis, other._renderers_by_args = TemplateAnalysis(self._template), {}
            other._call_forms = {}
            other._render_cached = functools.lru_cache(CACHE_ENTRIES)(other._render_plain)
            other.render([Message("user", "hello")])
            while len(self._renderers_by_args) >= CACHE_ENTRIES:
                self._renderers_by_args.pop(next(iter(self._renderers_by_args)))
            self._renderers_by_args[key] = other
        return self._renderers_by_args[key]

    @classmethod
    def from_model(cls, path: str | Path, template_args: Mapping[str, Any] | None = None) -> ChatRenderer:
        """Return a renderer with the tokenizer and the stop tokens of a model directory."""
        from transformers import AutoTokenizer, GenerationConfig

        tokenizer = AutoTokenizer.from_pretrained(path)
        stops: list[int] = []
        if (Path(path) / "generation_config.json").is_file():
            eos = GenerationConfig.from_pretrained(path).eos_token_id
            stops = [eos] if isinstance(eos, int) else list(eos or [])
        return cls(tokenizer, stops, template_args)

    def render(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] = ()) -> str:
        """Return the template's text with the generation prompt.

        Raises `TemplateError` with the template's own error.
        """
        if self._is_nondeterministic or tools or len(messages) > MAX_CACHED_MESSAGES:
            return self._apply_template(messages, tools)
        if any(m != Message(m.role, m.content) for m in messages):
            return self._apply_template(messages, tools)
        return self._render_cached(*((m.role, m.content) for m in messages))

    def _render_plain(self, *messages: tuple[str, str]) -> str:
        return self._apply_template([Message(role, content) for role, content in messages], ())

    def render_finished(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] = ()) -> str:
        """Return the template's text of a finished conversation, with no generation prompt. Raises `TemplateError`."""
        return self._apply_template(messages, tools, add_generation_prompt=False)

    def find_answer_end(self, role: str = "") -> str:
        """Return the template's text behind an answer, up to and including its first special token.

        The answer is followed by a message of `role`, or by none. Returns "" if the template writes other text there,
        or refuses such messages.
        """
        return self.match_special_token(self._render_behind_answer(role))

    def _find_end_token(self, stop_texts: Sequence[str]) -> str:
        """Return the token with which the template ends an answer; "" if the template writes one of `stop_texts`
        there."""
        between = self._render_behind_answer("user")
        own = (self.match_special_token(self._render_behind_answer()) or self.match_special_token(between)).strip()
        return "" if own in stop_texts or any(end in between for end in stop_texts) else own

    def _render_behind_answer(self, role: str = "") -> str:
        """Return the template's text between an answer and the content of a following message of `role`, or the end."""
        behind = [Message(role, _PROBE_NEXT)] if role else []
        try:
            text = self.render_finished([Message("user", "hello"), Message("assistant", _PROBE_ANSWER), *behind])
        except TemplateError:
            return ""
        _, found, rest = text.rpartition(_PROBE_ANSWER)
        return rest.partition(_PROBE_NEXT)[0] if found else ""

    def match_special_token(self, text: str) -> str:
        """Return the special token with which `text` begins, with white space before it; "" if there is none."""
        rest = text.lstrip()
        found = max(
            (token for token in self.tokenizer.get_added_vocab() if rest.startswith(token)), key=len, default=""
        )
        return text[: len(text) - len(rest)] + found if found else ""

    def _apply_template(
        self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]], add_generation_prompt: bool = True
    ) -> str:
        if not self._reads_thoughts and any(m.reasoning_content for m in messages):
            raise TemplateError(
                f"the chat template reads no `{REASONING_KEYS[0]}`: write the thought into `content`, as the model is to say it"
            )
        if not any(message.tool_calls for message in messages):
            return self._render_form(messages, tools, CALL_FORMS[0], add_generation_prompt)
        form = self._find_call_form(bool(tools))

        def render(shown: Sequence[Message], form: CallForm) -> str:
            return self._render_form(shown, tools, form, add_generation_prompt)

        text = render(messages, form or CALL_FORMS[0])
        unwritten = describe_unwritten_call(messages, text, form, render)
        if unwritten:
            raise TemplateError(unwritten)
        return text

    def _find_call_form(self, has_tools: bool) -> CallForm | None:
        """Return the form in which the template writes calls, without or with tools; None if it writes none."""
        if has_tools not in self._call_forms:
            tools = [PROBE_TOOL] if has_tools else []
            self._call_forms[has_tools] = detect_call_form(lambda *asked: self._render_form(asked[0], tools, asked[1]))
        return self._call_forms[has_tools]

    def _render_form(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]],
        form: CallForm,
        add_generation_prompt: bool = True,
    ) -> str:
        shown = [_add_thought_keys(form.build_message(message), message) for message in messages]
        options = {"add_generation_prompt": add_generation_prompt, **self.template_args}
        try:
            if form.has_null_content:
                return self._render_null_content(shown, list(tools) or None, options)
            return self.tokenizer.apply_chat_template(shown, tools=list(tools) or None, tokenize=False, **options)
        except Exception as error:  # whatever a template raises: jinja's errors, raise_exception, a missing key
            roles = ", ".join(m.role for m in messages)
            hint = describe_odd_arguments(messages)
            raise TemplateError(f"the chat template refuses messages of roles {roles}: {error}{hint}") from error

    def _render_null_content(self, messages: list[dict[str, Any]], tools: Any, options: Mapping[str, Any]) -> str:
        """Render messages whose `content` may be null, which `apply_chat_template` leaves out of a message."""
        from transformers.utils.chat_template_utils import render_jinja_template

        template = self.tokenizer.get_chat_template(None, tools)
        variables = {**self.tokenizer.special_tokens_map, **options}
        (text,), _ = render_jinja_template([messages], tools=tools, chat_template=template, **variables)
        return text

    def check_length(self, characters: int, max_tokens: int | None) -> None:
        """Raise `TextTooLongError` for a text longer than `max_tokens` tokens of maximal length.

        The check costs nothing and comes before `encode`.
        """
        if max_tokens is not None and characters > max_tokens * self.max_token_characters:
            raise TextTooLongError(characters, max_tokens)

    def encode(self, text: str) -> list[int]:
        """Return the token ids of a text. Special tokens in it are recognised, none is added."""
        return self.tokenizer.encode(text, add_special_tokens=False)

    def encode_plain(self, text: str) -> list[int]:
        """Return the token ids of a text that no template wrote (`encode_plain`)."""
        return encode_plain(self.tokenizer, text)

    def _encode_readonly(self, text: str) -> np.ndarray:
        token_ids = np.asarray(self.encode(text), np.int32)
        token_ids.flags.writeable = False
        return token_ids

    def decode(self, token_ids: Sequence[int]) -> str:
        return self.tokenizer.decode(token_ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)

    def decode_answer(self, token_ids: Sequence[int]) -> str:
        """Return the text of an answer without its stop token."""
        ids = list(token_ids)
        return self.decode(ids[:-1] if ids and ids[-1] in self._stop_texts else ids)

    def find_stop_text(self, token_ids: Sequence[int]) -> str:
        """Return the text of the stop token that ends an answer; "" if the answer was cut."""
        return self._stop_texts.get(token_ids[-1], "") if len(token_ids) else ""


def encode_plain(tokenizer: Any, text: str) -> list[int]:
    """Return the token ids of a text that no template wrote: as a tokenizer of transformers begins texts, once, and
    with nothing behind it, because it is continued."""
    plain, whole = tokenizer.encode("a", add_special_tokens=False), tokenizer.encode("a", add_special_tokens=True)
    starts = range(len(whole) - len(plain) + 1)
    beginning: list[int] = next((whole[:at] for at in starts if whole[at : at + len(plain)] == plain), [])
    token_ids: list[int] = tokenizer.encode(text, add_special_tokens=False)
    return token_ids if token_ids[: len(beginning)] == beginning else [*beginning, *token_ids]


def _add_thought_keys(shown: dict[str, Any], message: Message) -> dict[str, Any]:
    """Return the message as templates take it, with its thought under each key that templates use for it."""
    return shown | dict.fromkeys(REASONING_KEYS, message.reasoning_content) if message.reasoning_content else shown


_GENERATION_TAG = re.compile(r"\{%-?\s*(end)?generation\s*-?%\}")
"""Template blocks of transformers that jinja does not know."""
_TRANSFORMERS_VARIABLES = ("messages", "raise_exception", "strftime_now")
"""Variables that transformers passes to a template, besides parameters of `apply_chat_template` and special tokens."""


def find_template_variables(template: str) -> frozenset[str]:
    """Return the variables of a template that are not always set; none for a template that cannot be parsed."""
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(extensions=["jinja2.ext.loopcontrols"])
    try:
        names = jinja2.meta.find_undeclared_variables(environment.parse(_GENERATION_TAG.sub("", template)))
    except jinja2.TemplateSyntaxError:
        return frozenset()
    return frozenset(names - {*environment.globals, *_TRANSFORMERS_VARIABLES})


_WHITESPACE = re.compile(r"\s*")


class Prompt(msgspec.Struct, frozen=True):
    """The prompt of the next answer.

    Attributes:
        token_ids: The prompt's tokens, int32 `[P]`; read-only.
        shared_turn: A turn whose sample shares a prefix with the prompt; -1 if none was compared.
        shared_tokens: Number of leading tokens known to equal those of the sample with the answer of `shared_turn`,
            else 0.
        opens_thought: True if the prompt's text ends within a thought, which the template has opened.
    """

    token_ids: np.ndarray
    shared_turn: int = -1
    shared_tokens: int = 0
    opens_thought: bool = False


class PromptPiece(msgspec.Struct, frozen=True):
    """A part of the prompt, as text and as tokens.

    Attributes:
        assistant_messages: Number of messages of the assistant that end in it.
        is_sampled: True if it is a sampled answer.
        stop_text: Text of the stop token of a sampled answer, if it has one.
        answered_message: The message to which a sampled answer replies.
    """

    text: str
    token_ids: np.ndarray
    assistant_messages: int = 0
    is_sampled: bool = False
    stop_text: str = ""
    answered_message: Message | None = None

    def find_end(self, rendered: str, at: int) -> int:
        """Return the end of this piece in `rendered` if it begins at `at`, else -1.

        White space that a template adds or strips around an answer is no difference: the answer keeps the model's own.
        """
        if not self.is_sampled:
            return at + len(self.text) if rendered.startswith(self.text, at) else -1
        stripped, at = self.text.strip(), _skip_whitespace(rendered, at)
        if not rendered.startswith(stripped, at):
            return -1
        at += len(stripped)
        if not self.stop_text:
            # A cut answer ends with its own trailing white space, unless the template has stripped that.
            own = self.text[len(self.text.rstrip()) :]
            return at + len(own) if rendered.startswith(own, at) else at
        at = _skip_whitespace(rendered, at)
        return at + len(self.stop_text) if rendered.startswith(self.stop_text, at) else -1


def _skip_whitespace(text: str, at: int) -> int:
    blanks = _WHITESPACE.match(text, at)
    return blanks.end() if blanks else at


class Conversation:
    """The messages of one episode, and the token ids of its next prompt.

    Each turn calls `build_prompt`, `add_answer`, then `add_messages` (or `replace_messages`). Not for concurrent use.
    """

    def __init__(
        self,
        renderer: ChatRenderer,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] = (),
        max_tokens: int | None = None,
        answers_by_text: dict[str, list[PromptPiece]] | None = None,
    ):
        """Begin a conversation with `messages`.

        Args:
            max_tokens: Limit of tokens. A text that must exceed it is not tokenised, but raises `TextTooLongError`.
            answers_by_text: One dictionary that is shared by all conversations that may repeat each other's answers.
        """
        self.renderer, self.tools, self._max_tokens = renderer, tools, max_tokens
        self._growing_text = GrowingText(lambda shown: renderer.render(shown, tools), renderer.template_analysis)
        self._new_messages, self._is_continuation = list(messages), False
        """Messages that are in no prompt yet, and True if they follow others rather than being the whole
        conversation."""
        self._pieces: list[PromptPiece] = []
        self._tokens = GrowingTokens()
        """Tokens of all pieces."""
        self._answers_by_text = {} if answers_by_text is None else answers_by_text
        """Sampled pieces of each answer text, the newest last."""
        self._has_unrendered_answer = False
        """True if the newest piece is an answer that is in no rendered text yet."""
        self._shared_turn, self._shared_tokens = -1, 0
        """Values of `Prompt.shared_turn` and `Prompt.shared_tokens` for the next prompt."""

    @property
    def messages(self) -> list[Message]:
        return [*(self._growing_text.messages if self._is_continuation else ()), *self._new_messages]

    def adopt_closest(self, others: Sequence[Conversation]) -> None:
        """Adopt the tokens of the conversation among `others` that shares the longest prefix with these messages.

        Call it before the first `build_prompt`. Among equals the newest, which is the last, is taken. It is for callers
        that receive whole conversations: requests that branch, run concurrently, or edit history. Raises the errors of
        `build_prompt`.
        """
        rendered, _ = self._render_new()
        like, kept, furthest = self, self._pieces, 0
        for other in others:
            pieces, at = other._match_pieces(rendered)
            if at >= furthest:
                like, kept, furthest = other, pieces, at
        self._adopt_pieces(like, kept)
        self._append_text(rendered, furthest, self._count_later_answers())

    def build_prompt(self) -> Prompt:
        """Return the prompt for the next answer.

        Raises `TemplateError` if the template refuses the messages, and `TextTooLongError`; the conversation is then
        unchanged.
        """
        if self._new_messages or not self._is_continuation:
            spoken = sum(m.role == "assistant" for m in self._new_messages)
            rendered, extends = self._render_new()
            if extends:
                at = self._pieces[-1].find_end(rendered, 0) if self._has_unrendered_answer else -1
                if self._has_unrendered_answer and at < 0:
                    self._adopt_pieces(self, self._pieces[:-1])
                self._append_text(rendered, max(0, at), spoken - (at >= 0))
            else:
                kept, at = self._match_pieces(rendered)
                if len(kept) < len(self._pieces):
                    self._adopt_pieces(self, kept)
                self._append_text(rendered, at, self._count_later_answers())
            self._has_unrendered_answer = False
        thinking = bool(self._pieces) and self._pieces[-1].text.rstrip().endswith(THINK_OPEN_TAG)
        return Prompt(self._tokens.array, self._shared_turn, self._shared_tokens, thinking)

    def add_answer(self, token_ids: Sequence[int], message: Message | None = None, turn: int = -1) -> str:
        """Add the answer to the last `build_prompt` and return its text.

        Args:
            message: The message that represents it in the conversation, if not that text (with tool calls parsed, for
                example).
            turn: Its turn in the episode's samples (`EpisodeSamples.finish_call`).
        """
        ids = list(token_ids)
        text = self.renderer.decode_answer(ids)
        stop = self.renderer.find_stop_text(ids)
        piece = PromptPiece(
            text,
            np.asarray(ids, np.int32),
            1,
            is_sampled=True,
            stop_text=stop,
            answered_message=self._growing_text.last_message,
        )
        self._append_piece(piece)
        self._answers_by_text.setdefault(text, []).append(piece)
        self._new_messages.append(message or Message("assistant", text))
        self._has_unrendered_answer = True
        self._shared_turn, self._shared_tokens = turn, len(self._tokens) if turn >= 0 else 0
        return text

    def add_messages(self, messages: Sequence[Message]) -> None:
        """Add the messages that follow the last answer."""
        self._new_messages += messages

    def replace_messages(self, messages: Sequence[Message]) -> None:
        """Replace the whole conversation."""
        self._new_messages, self._is_continuation = list(messages), False

    def _render_new(self) -> tuple[str, bool]:
        """Return the text of the new messages and True if it follows the text before; else the whole text and False."""
        rendered, extends = (
            self._growing_text.render_next(self._new_messages)
            if self._is_continuation
            else (self._growing_text.render_first(self._new_messages), False)
        )
        try:
            self.renderer.check_length(self._growing_text.text_length, self._max_tokens)
        except TextTooLongError:
            self._new_messages, self._is_continuation = self._growing_text.messages, False
            raise
        self._new_messages, self._is_continuation = [], True
        return rendered, extends

    def _match_pieces(self, rendered: str) -> tuple[list[PromptPiece], int]:
        """Return the pieces with which `rendered` begins, and the offset of the rest."""
        at = 0
        for i, piece in enumerate(self._pieces):
            end = piece.find_end(rendered, at)
            if end < 0:
                return self._pieces[:i], at
            at = end
        return list(self._pieces), at

    def _adopt_pieces(self, other: Conversation, pieces: list[PromptPiece]) -> None:
        """Continue from `pieces`, which are the first ones of `other`."""
        length = sum(len(piece.token_ids) for piece in pieces)
        self._pieces, self._tokens = pieces, GrowingTokens(other._tokens.array[:length])
        self._shared_turn, self._shared_tokens = other._shared_turn, min(other._shared_tokens, length)

    def _count_later_answers(self) -> int:
        """Return the number of messages of the assistant behind the pieces."""
        spoken = sum(m.role == "assistant" for m in self._growing_text.messages)
        return spoken - sum(piece.assistant_messages for piece in self._pieces)

    def _append_text(self, rendered: str, at: int, assistant_messages: int) -> None:
        """Append `rendered[at:]` in pieces: sampled answers that ended keep their tokens, the rest is encoded.

        `assistant_messages` is the number of messages of the assistant in that text.
        """
        passed = 0
        for repeated in self._find_repeated_answers(rendered, at, assistant_messages):
            passed += 1
            if repeated is None or repeated[0] < at:
                continue
            start, piece = repeated
            if start > at:
                self._append_piece(self._encode_piece(rendered[at:start]))
            self._append_piece(msgspec.structs.replace(piece, assistant_messages=passed))
            at, passed = start + len(piece.text) + len(piece.stop_text), 0
        if at < len(rendered):
            self._append_piece(self._encode_piece(rendered[at:], passed))

    def _find_repeated_answers(
        self, rendered: str, at: int, assistant_messages: int
    ) -> list[tuple[int, PromptPiece] | None]:
        """Find the sampled answers among the last `assistant_messages` messages of the assistant.

        Returns for each message its offset in `rendered` and its sampled piece; None for one that was not sampled, or
        is not written word for word behind `at`. No sampled answer is used twice: among equal ones, those that answered
        the same message are taken first, then the newest.
        """
        messages = self._growing_text.messages
        last = (
            [i for i, message in enumerate(messages) if message.role == "assistant"][-assistant_messages:]
            if assistant_messages
            else []
        )
        known = {
            text: self._answers_by_text[text]
            for text in {messages[i].content for i in last} & self._answers_by_text.keys() - {""}
        }
        stops = {(text, piece.stop_text) for text, pieces in known.items() for piece in pieces if piece.stop_text}
        written = {(text, stop) for text, stop in stops if rendered.find(text + stop, at) >= 0}
        texts = {text for text, _ in written}
        ends = self._find_content_ends([i for i in last if messages[i].content in texts], rendered) if written else {}
        used = {id(piece.token_ids) for piece in self._pieces}
        found: dict[int, tuple[int, PromptPiece]] = {}
        for same in (True, False):
            for i in sorted(ends.keys() - found.keys(), reverse=True):
                text, asked = messages[i].content, messages[i - 1] if i else None
                starts = [end - len(text.rstrip()) for end in ends[i]]
                fitting = (
                    (start, piece)
                    for piece in reversed(known[text])
                    if id(piece.token_ids) not in used and (text, piece.stop_text) in written
                    if not same or piece.answered_message == asked
                    for start in starts
                    if start >= at and rendered.startswith(text + piece.stop_text, start)
                )
                if (first := next(fitting, None)) is not None:
                    found[i] = first
                    used.add(id(first[1].token_ids))
        return [found.get(i) for i in last]

    def _find_content_ends(self, indices: Sequence[int], rendered: str) -> dict[int, list[int]]:
        """Return the offsets in `rendered` at which the contents of messages end, without trailing blanks.

        `rendered` is the end of the whole text. The result is empty if the template writes different text when each
        content has a mark behind it.
        """
        messages, whole = self._growing_text.messages, self._growing_text.text
        used = set(whole)
        marks = dict(zip((mark for mark in map(chr, MARKER_CHARACTERS) if mark not in used), indices, strict=False))
        for mark, i in marks.items():
            content = messages[i].content.rstrip()
            marked = content + mark + messages[i].content[len(content) :]
            messages[i] = msgspec.structs.replace(messages[i], content=marked)
        try:
            parts = re.split(f"([{''.join(marks)}])", self.renderer.render(messages, self.tools))
        except TemplateError:
            return {}
        if "".join(parts[::2]) != whole:
            return {}
        ends: dict[int, list[int]] = {}
        end = len(rendered) - len(whole)
        for part, mark in zip(parts[::2], parts[1::2], strict=False):
            end += len(part)
            ends.setdefault(marks[mark], []).append(end)
        return ends

    def _encode_piece(self, text: str, assistant_messages: int = 0) -> PromptPiece:
        return PromptPiece(text, self.renderer.encode_cached(text), assistant_messages)

    def _append_piece(self, piece: PromptPiece) -> None:
        self._pieces.append(piece)
        self._tokens.extend(piece.token_ids)


# Given answers as rows of supervised training: the tokens that a policy would have to sample for them, after the
# prompts that it would get. The chat template writes both, and a row is the beginning of a text that it writes.


_THOUGHT_TAGS = re.compile(r"</?think>")
"""Tags around thoughts, which a template may replace by others."""


@dataclass
class Demonstration:
    """The training rows of one conversation.

    A prompt that does not begin with the row before (its history was rewritten) begins a new row, whose earlier answers
    are not learnt again.

    Attributes:
        rows: Token ids of each row, and a mask that is True for answers.
        unwritten_prompt_end: The end of a prompt that the template does not write before the given answer.
    """

    rows: list[tuple[list[int], list[bool]]] = field(default_factory=lambda: [([], [])])
    unwritten_prompt_end: str = ""

    def add_turn(self, prompt: Sequence[int], answer: Sequence[int]) -> None:
        """Add a prompt and the answer to it, with its stop token."""
        ids, mask = self.rows[-1]
        if list(prompt[: len(ids)]) != ids:
            ids, mask = [], []
            self.rows.append((ids, mask))
        mask += [False] * (len(prompt) - len(ids)) + [True] * len(answer)
        ids += [*prompt[len(ids) :], *answer]

    def build_samples(self, name: str) -> list[Sample]:
        """Return one sample per row, named `name`, `name/1`, ..."""
        out = []
        for at, (ids, mask) in enumerate(self.rows):
            table = TokenTable.from_tokens(np.asarray(ids)).with_columns(loss_mask=np.asarray(mask, bool))
            out.append(Sample(f"{name}/{at}" if at else name, table))
        return out


def build_demonstration(
    renderer: ChatRenderer, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] = ()
) -> Demonstration:
    """Encode a complete conversation, with each answer to be learnt after the prompt that an episode would have.

    Raises `TemplateError`, also for an answer that the template does not write unchanged, or does not end.
    """
    demonstration, template = Demonstration(), _DemonstrationWriter(renderer, tools)
    learnt = [i for i, m in enumerate(messages) if m.role == "assistant" and not isinstance(m, MaskedAnswer)]
    for at, following in zip(learnt, [*learnt[1:], len(messages)], strict=True):
        prompt, answer = template.write_turn(messages[:at], messages[at], messages[at + 1 : following])
        demonstration.add_turn(prompt, answer)
    demonstration.unwritten_prompt_end = template.unwritten_prompt_end
    return demonstration


class _DemonstrationWriter:
    """A writer of a given conversation, turn by turn. `unwritten_prompt_end` is that of `Demonstration`."""

    def __init__(self, renderer: ChatRenderer, tools: Sequence[Mapping[str, Any]]):
        self._renderer, self._tools = renderer, tools
        self._pieces: list[tuple[str, list[int]]] = []
        """Text and tokens of the turns so far, with prompts and answers separate."""
        self.unwritten_prompt_end = ""

    def write_turn(
        self, before: Sequence[Message], answer: Message, behind: Sequence[Message]
    ) -> tuple[list[int], list[int]]:
        """Return the tokens of the prompt with the messages `before`, and those of the answer.

        Turns that the template still writes as before keep their tokens. Raises `TemplateError`.
        """
        renderer = self._renderer
        prompt = renderer.render(before, self._tools)
        written = renderer.render_finished([*before, answer], self._tools)
        # Turns that the template writes as before keep their tokens.
        kept_length = self._drop_rewritten_turns(prompt, written)
        # The answer begins behind the prompt, unless the template begins it in another way than the generation prompt.
        common_length = answer_start = len(prompt)
        is_prefix = written.startswith(prompt)
        if not is_prefix:
            common_length, answer_start = self._compare_beginnings(prompt, written, before)
        # It ends with its stop token, which the template may leave to the start of the next message.
        if not renderer.stop_pattern.search(written, common_length):
            written += self._find_end_behind(written, before, answer, behind)
        if answer_end := renderer.stop_pattern.search(written, common_length):
            written = written[: answer_end.end()]
        _check_written_answer(renderer, answer, written[answer_start:])
        # Prompt and answer are encoded separately, as in an episode, and so are kept separately.
        prompt_tokens = renderer.encode(prompt[kept_length:])
        if is_prefix:
            answer_tokens = renderer.encode(written[common_length:])
            pieces = [(prompt[kept_length:], prompt_tokens), (written[common_length:], answer_tokens)]
        else:
            prompt_tokens, answer_tokens = self._split_common_tokens(prompt_tokens, written[kept_length:])
            pieces = [(written[kept_length:], [*prompt_tokens, *answer_tokens])]
        # A model that learns the answer must learn to end it, once.
        if [i for i, token in enumerate(answer_tokens) if token in renderer.stop_token_ids] != [len(answer_tokens) - 1]:
            raise TemplateError(
                f"the tokenizer does not find the end of the answer in {written[common_length:]!r:.200}"
            )
        kept_tokens = [token for _, tokens in self._pieces for token in tokens]
        self._pieces += pieces
        return [*kept_tokens, *prompt_tokens], answer_tokens

    def _drop_rewritten_turns(self, prompt: str, written: str) -> int:
        """Drop the last turns until both texts begin with those that are left. Returns the length of their text."""
        while True:
            kept_text = "".join(text for text, _ in self._pieces)
            if prompt.startswith(kept_text) and written.startswith(kept_text):
                return len(kept_text)
            self._pieces.pop()

    def _compare_beginnings(self, prompt: str, written: str, before: Sequence[Message]) -> tuple[int, int]:
        """Return the length of the text that `prompt` and `written` share, and where the generation prompt begins.
        Raises `TemplateError` if they differ before that."""
        generation_start = _common_prefix_length(prompt, self._renderer.render_finished(before, self._tools))
        common_length = _common_prefix_length(prompt, written)
        if common_length < generation_start:
            raise TemplateError("the chat template writes the messages before an answer otherwise when it is there")
        return common_length, generation_start

    def _split_common_tokens(self, prompt_tokens: list[int], written: str) -> tuple[list[int], list[int]]:
        """Return the tokens of `written` that the prompt has, too, and the others, in whole tokens."""
        written_tokens = self._renderer.encode(written)
        common_count = _common_prefix_length(prompt_tokens, written_tokens)
        if not self.unwritten_prompt_end:
            self.unwritten_prompt_end = self._renderer.decode(prompt_tokens[common_count:])
        return written_tokens[:common_count], written_tokens[common_count:]

    def _find_end_behind(
        self, written: str, before: Sequence[Message], answer: Message, behind: Sequence[Message]
    ) -> str:
        """Return the token that ends the answer if the template leaves that to the start of the next message."""
        if behind:
            longer = self._renderer.render([*before, answer, *behind], self._tools)
            if longer.startswith(written):
                return self._renderer.match_special_token(longer[len(written) :])
        return self._renderer.find_answer_end(behind[0].role if behind else "user")


def _common_prefix_length(one: Sequence[Any], other: Sequence[Any]) -> int:
    """Return the length of two sequences' common prefix."""
    shorter = min(len(one), len(other))
    if one[:shorter] == other[:shorter]:
        return shorter
    return next(i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b)


def _check_written_answer(renderer: ChatRenderer, answer: Message, written: str) -> None:
    """Raise `TemplateError` unless the template's text `written` has the whole answer and a stop token behind it."""
    for text in (answer.content, answer.reasoning_content):
        if found := renderer.stop_pattern.search(text):
            raise TemplateError(f"the answer has {found[0]!r} in it, which ends an answer")
    if not renderer.stop_pattern.search(written):
        raise TemplateError(
            "the chat template writes no token that ends an answer, so that none can be learnt: let it write eos_token behind "
            "each, or add its own to `eos_token_id` in generation_config.json"
        )
    if 0 < answer.content.count("</think>") < written.count("</think>"):
        raise TemplateError(
            "the chat template writes a thought of its own before the one that the answer's `content` has: give that as "
            "`reasoning_content`"
        )
    packed, at = remove_whitespace(written), 0
    for part in _split_answer(answer):
        found_at = packed.find(remove_whitespace(part), at)
        if found_at < 0:
            raise TemplateError(f"the chat template leaves this out of the answer, or changes it: {part.strip()!r:.80}")
        at = found_at + len(remove_whitespace(part))
    for part in filter(None, (find_missing_part(call, packed) for call in answer.tool_calls)):
        raise TemplateError(
            f"the chat template leaves this out of the answer's `tool_calls`, or changes it: {part!r:.80}"
        )


def _split_answer(answer: Message) -> list[str]:
    return [answer.reasoning_content, *_THOUGHT_TAGS.split(answer.content)]
