"""Chat templates, token-in/token-out: sampled tokens are kept as they are, and never tokenised again.

Before each turn the template renders the conversation, and what is new of it only where that is the same (`GrowingText`). As long
as its text begins with what the model has seen (the **extension property**), only the rest is encoded. Where it does not (a
template that strips earlier thoughts, a history that was compacted), the prompt keeps the tokens up to the first difference, and
every answer that is repeated word for word keeps its own. Where it stands, the template is asked: the same words may be others'.
"""

from __future__ import annotations

import copy
import functools
import inspect
import json
import logging
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jinja2.meta
import jinja2.sandbox
import msgspec
import numpy as np

from r3async.data.tokens import GrowingTokens, Sample, TokenTable
from r3async.envs import REASONING_KEYS, THINK_OPEN_TAG, Message
from r3async.envs.rows import MaskedAnswer

if TYPE_CHECKING:
    from jinja2 import nodes

CACHE_ENTRIES = 32
"""Texts whose tokens, and beginnings of conversations whose text, are remembered."""
MAX_CACHED_MESSAGES = 3
"""Messages of the beginning of a conversation, at most."""
NONDETERMINISTIC_NAMES = ("strftime_now", "now(", "random", "uuid")
"""What a template may call whose text changes with time or by luck."""
MARKER_CHARACTERS = range(0xF0000, 0xFFFFE)
"""Characters for private use: each behind one answer, they show where a template writes it."""
_PROBE_ANSWER, _PROBE_NEXT = "quokka", "wombat"
"""Contents whose places in a template's text are found again."""


class TemplateError(ValueError):
    """A tokenizer or chat template that cannot be used."""


class TextTooLongError(ValueError):
    """A prompt's text that cannot be within the limit of tokens, whatever they are; it was not tokenised."""

    def __init__(self, characters: int, max_tokens: int):
        super().__init__(f"{characters} characters are more than {max_tokens} tokens")
        self.characters = characters


class ChatRenderer:
    """A tokenizer with its chat template, and the tokens that end an answer: the tokenizer's end-of-sequence token,
    `stop_token_ids`, and the one that the template writes behind answers.

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
        self.eos_token_id: int = tokenizer.eos_token_id
        self.max_token_characters = max(map(len, tokenizer.get_vocab()), default=1)
        """Characters that one token may stand for."""
        template = tokenizer.chat_template
        self._template = template if isinstance(template, str) else "\n".join(template.values())
        self.template_analysis = TemplateAnalysis(self._template)
        """Of the template, as far as its conversations have shown them."""
        # The episodes of a group begin with the same prompt, at about the same time.
        self._reads_thoughts = re.search(rf"""['".]({"|".join(REASONING_KEYS)})\b""", self._template) is not None
        self._is_nondeterministic = any(name in str(template) for name in NONDETERMINISTIC_NAMES)
        self._render_cached = functools.lru_cache(CACHE_ENTRIES)(self._render_plain)
        self.encode_cached = functools.lru_cache(CACHE_ENTRIES)(self._encode_readonly)
        """Of a text: int32 `[T]`, read-only; special tokens are found in it, none is added."""
        self._renderers_by_args: dict[bytes, ChatRenderer] = {}
        self.render([Message("user", "hello")])
        ends = [self.eos_token_id, *stop_token_ids]
        if own := self._find_end_token([self.decode([token]) for token in ends]):
            ends.append(tokenizer.convert_tokens_to_ids(own))
        self.stop_token_ids: tuple[int, ...] = tuple(dict.fromkeys(ends))
        self._stop_texts = {i: self.decode([i]) for i in self.stop_token_ids}
        texts = sorted(filter(None, self._stop_texts.values()), key=len, reverse=True)
        self.stop_pattern = re.compile("|".join(map(re.escape, texts)))
        """The texts of these tokens."""

    @functools.cached_property
    def template_variables(self) -> frozenset[str]:
        """Of the template, that `template_args` may set."""
        theirs = inspect.signature(self.tokenizer.apply_chat_template).parameters
        return find_template_variables(self._template) - {*theirs, *self.tokenizer.special_tokens_map}

    def with_template_args(self, args: Mapping[str, Any]) -> ChatRenderer:
        """Of the same tokenizer, with `args` beside the `template_args`. Raises `TemplateError` for one that the template does
        not have, or refuses."""
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
            other._render_cached = functools.lru_cache(CACHE_ENTRIES)(other._render_plain)
            other.render([Message("user", "hello")])
            while len(self._renderers_by_args) >= CACHE_ENTRIES:
                self._renderers_by_args.pop(next(iter(self._renderers_by_args)))
            self._renderers_by_args[key] = other
        return self._renderers_by_args[key]

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
        if self._is_nondeterministic or tools or len(messages) > MAX_CACHED_MESSAGES:
            return self._apply_template(messages, tools)
        if any(m != Message(m.role, m.content) for m in messages):
            return self._apply_template(messages, tools)
        return self._render_cached(*((m.role, m.content) for m in messages))

    def _render_plain(self, *messages: tuple[str, str]) -> str:
        return self._apply_template([Message(role, content) for role, content in messages], ())

    def render_finished(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] = ()) -> str:
        """The template's text of a conversation that nobody is to go on with. Raises `TemplateError`."""
        return self._apply_template(messages, tools, add_generation_prompt=False)

    def find_answer_end(self, role: str = "") -> str:
        """What the template writes behind an answer, up to its first special token, where a message of `role` follows, or none.
        "" if it writes other text there, or refuses such messages."""
        return self.match_special_token(self._render_behind_answer(role))

    def _find_end_token(self, stop_texts: Sequence[str]) -> str:
        """The token with which the template ends an answer; "" if it writes one of those that are `stop_texts` to."""
        between = self._render_behind_answer("user")
        own = (self.match_special_token(self._render_behind_answer()) or self.match_special_token(between)).strip()
        return "" if own in stop_texts or any(end in between for end in stop_texts) else own

    def _render_behind_answer(self, role: str = "") -> str:
        """What the template writes between an answer and the content of a message of `role`, or the end."""
        behind = [Message(role, _PROBE_NEXT)] if role else []
        try:
            text = self.render_finished([Message("user", "hello"), Message("assistant", _PROBE_ANSWER), *behind])
        except TemplateError:
            return ""
        _, found, rest = text.rpartition(_PROBE_ANSWER)
        return rest.partition(_PROBE_NEXT)[0] if found else ""

    def match_special_token(self, text: str) -> str:
        """The special token that `text` begins with, and white space before it. "" if it begins otherwise."""
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
        try:
            return self.tokenizer.apply_chat_template(
                [_build_template_message(m) for m in messages],
                tools=list(tools) or None,
                tokenize=False,
                add_generation_prompt=add_generation_prompt,
                **self.template_args,
            )
        except Exception as error:  # whatever a template raises: jinja's errors, raise_exception, a missing key
            roles = ", ".join(m.role for m in messages)
            raise TemplateError(f"the chat template refuses messages of roles {roles}: {error}") from error

    def check_length(self, characters: int, max_tokens: int | None) -> None:
        """Raise `TextTooLongError` for a text of more than `max_tokens` tokens of the longest kind: at no cost, before
        `encode`."""
        if max_tokens is not None and characters > max_tokens * self.max_token_characters:
            raise TextTooLongError(characters, max_tokens)

    def encode(self, text: str) -> list[int]:
        """Token ids; special tokens are found in the text, none is added."""
        return self.tokenizer.encode(text, add_special_tokens=False)

    def _encode_readonly(self, text: str) -> np.ndarray:
        token_ids = np.asarray(self.encode(text), np.int32)
        token_ids.flags.writeable = False
        return token_ids

    def decode(self, token_ids: Sequence[int]) -> str:
        return self.tokenizer.decode(token_ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)

    def decode_answer(self, token_ids: Sequence[int]) -> str:
        """The answer's text, its stop token left out."""
        ids = list(token_ids)
        return self.decode(ids[:-1] if ids and ids[-1] in self._stop_texts else ids)

    def find_stop_text(self, token_ids: Sequence[int]) -> str:
        """Of the stop token that an answer ends in; "" if it was cut."""
        return self._stop_texts.get(token_ids[-1], "") if len(token_ids) else ""


def _build_template_message(message: Message) -> dict[str, Any]:
    """With its thought under each name that templates have for it."""
    shown = message.to_template_dict()
    return shown | dict.fromkeys(REASONING_KEYS, message.reasoning_content) if message.reasoning_content else shown


_GENERATION_TAG = re.compile(r"\{%-?\s*(end)?generation\s*-?%\}")
"""Blocks of transformers' own, which jinja does not know."""
_TRANSFORMERS_VARIABLES = ("messages", "raise_exception", "strftime_now")
"""What transformers gives a template, beside the parameters of `apply_chat_template` and special tokens."""


def find_template_variables(template: str) -> frozenset[str]:
    """What a template looks up beside what it is given in any case; nothing of one that cannot be read."""
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(extensions=["jinja2.ext.loopcontrols"])
    try:
        names = jinja2.meta.find_undeclared_variables(environment.parse(_GENERATION_TAG.sub("", template)))
    except jinja2.TemplateSyntaxError:
        return frozenset()
    return frozenset(names - {*environment.globals, *_TRANSFORMERS_VARIABLES})


_WHITESPACE = re.compile(r"\s*")


class Prompt(msgspec.Struct, frozen=True):
    """`token_ids` int32 `[P]`, not to be written to. Its first `shared_tokens` tokens are known to be those of the sample in
    which the answer of turn `shared_turn` stands; -1 and 0 where nobody has compared. `opens_thought`: its text ends within a
    thought, which the template has opened."""

    token_ids: np.ndarray
    shared_turn: int = -1
    shared_tokens: int = 0
    opens_thought: bool = False


class PromptPiece(msgspec.Struct, frozen=True):
    """A stretch of the prompt, as text and as tokens. `assistant_messages`: messages of the assistant that end in it. Of an
    answer that was sampled, `stop_text` is the text of its stop token, if it has one, and `answered_message` the message that
    it answered."""

    text: str
    token_ids: np.ndarray
    assistant_messages: int = 0
    is_sampled: bool = False
    stop_text: str = ""
    answered_message: Message | None = None

    def find_end(self, rendered: str, at: int) -> int:
        """Where it ends in `rendered` if it stands at `at`, else -1. White space that a template puts or takes around an answer
        is not a difference: the model's own stays."""
        if not self.is_sampled:
            return at + len(self.text) if rendered.startswith(self.text, at) else -1
        stripped, at = self.text.strip(), _skip_whitespace(rendered, at)
        if not rendered.startswith(stripped, at):
            return -1
        at += len(stripped)
        if not self.stop_text:
            # A cut answer ends where its own white space does, if the template has not taken that.
            own = self.text[len(self.text.rstrip()) :]
            return at + len(own) if rendered.startswith(own, at) else at
        at = _skip_whitespace(rendered, at)
        return at + len(self.stop_text) if rendered.startswith(self.stop_text, at) else -1


def _skip_whitespace(text: str, at: int) -> int:
    blanks = _WHITESPACE.match(text, at)
    return blanks.end() if blanks else at


class Conversation:
    """One episode's messages, and the token ids of its next prompt.

    In turns: `build_prompt`, `add_answer`, then `add_messages` (or `replace_messages`). Not for concurrent use.
    """

    def __init__(
        self,
        renderer: ChatRenderer,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] = (),
        max_tokens: int | None = None,
        answers_by_text: dict[str, list[PromptPiece]] | None = None,
    ):
        """`max_tokens`: a text that must have more is not tokenised, but raises `TextTooLongError`. `answers_by_text`: one
        dictionary for all conversations that may repeat each other's answers."""
        self.renderer, self.tools, self._max_tokens = renderer, tools, max_tokens
        self._growing_text = GrowingText(lambda shown: renderer.render(shown, tools), renderer.template_analysis)
        self._new_messages, self._is_continuation = list(messages), False
        """Messages that are in no prompt yet; whether they follow others, or are the whole conversation."""
        self._pieces: list[PromptPiece] = []
        self._tokens = GrowingTokens()
        """Those of the pieces."""
        self._answers_by_text = {} if answers_by_text is None else answers_by_text
        """By text: how each answer of that text was sampled, the newest last."""
        self._has_unrendered_answer = False
        """The newest piece is an answer that no rendered text has shown."""
        self._shared_turn, self._shared_tokens = -1, 0
        """See `Prompt`."""

    @property
    def messages(self) -> list[Message]:
        return [*(self._growing_text.messages if self._is_continuation else ()), *self._new_messages]

    def adopt_closest(self, others: Sequence[Conversation]) -> None:
        """Before the first `build_prompt`: take over the tokens of that one of `others` which shares most with these
        messages. Among equals the newest counts, which is the last.

        For whoever is handed whole conversations: requests that branch, run beside each other, or edit history. Raises what
        `build_prompt` raises.
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
        """The prompt for the next answer. Raises `TemplateError` if the template refuses the messages, and
        `TextTooLongError`; the conversation is then as before."""
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
        """Take the answer to the last `build_prompt`; returns its text. `message`: how it stands in the conversation, if not as
        that text (with tool calls taken out of it, say). `turn`: in the episode's samples (`EpisodeSamples.finish_call`)."""
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
        """What follows the last answer."""
        self._new_messages += messages

    def replace_messages(self, messages: Sequence[Message]) -> None:
        """Replace the whole conversation."""
        self._new_messages, self._is_continuation = list(messages), False

    def _render_new(self) -> tuple[str, bool]:
        """The text of the messages that are in no prompt, and True if it follows the text before; else the whole text."""
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
        """The pieces that `rendered` begins with, and where the rest begins."""
        at = 0
        for i, piece in enumerate(self._pieces):
            end = piece.find_end(rendered, at)
            if end < 0:
                return self._pieces[:i], at
            at = end
        return list(self._pieces), at

    def _adopt_pieces(self, other: Conversation, pieces: list[PromptPiece]) -> None:
        """Go on from `pieces`, which are the first of `other`."""
        length = sum(len(piece.token_ids) for piece in pieces)
        self._pieces, self._tokens = pieces, GrowingTokens(other._tokens.array[:length])
        self._shared_turn, self._shared_tokens = other._shared_turn, min(other._shared_tokens, length)

    def _count_later_answers(self) -> int:
        """Messages of the assistant behind the pieces."""
        spoken = sum(m.role == "assistant" for m in self._growing_text.messages)
        return spoken - sum(piece.assistant_messages for piece in self._pieces)

    def _append_text(self, rendered: str, at: int, assistant_messages: int) -> None:
        """Append `rendered[at:]`, in which `assistant_messages` messages of the assistant are, in pieces: answers that were
        sampled and ended keep their tokens, the rest is encoded."""
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
        """Of each of the last `assistant_messages` messages of the assistant, where it stands in `rendered` and how it was
        sampled; None for one that was not, or is not written word for word behind `at`. No answer stands twice: of equal ones
        those count that answered the same message, then the newest."""
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
        """Where in `rendered`, the end of the whole text, the contents of messages end, without blanks behind them. Nowhere, if
        the template writes something else when each has a mark behind it."""
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


# The template's text of a conversation that grows, of which only what is new is rendered.
#
# A chat template is a function of all messages. Most write a new turn behind the text that there was, and look at nothing but the
# messages around it. But one may take thoughts out of earlier answers, merge a system message into the last question, or
# count. So the template itself has to show, on the conversation's own messages, that a part may be rendered in place of the
# whole:
#
# * **Window.** What is rendered is the first prompt, the last turns, and one turn for each *shape* of a message: what a template
# can tell messages apart by, which is role, calls, and which of the literals that it searches for stand in the text. What it does
# to any earlier message, it does to the one of that shape in the window, whose text then is no longer what it was.
# * **Elision.** Turns leave the window only if the template, without them, writes the others exactly as with them.
# * **Audit.** Each time the number of messages has doubled, and at a new shape, the whole conversation is rendered and compared.
#
# A template that fails there renders every conversation whole from then on, and the reason is logged once; so does, from the
# beginning, one that counts or cannot be read. Where a part may be rendered, a turn costs what it is long, and
# not what came before it.


logger = logging.getLogger(__name__)

RECENT_TURNS = 2
"""Turns at the end of a conversation that are always rendered."""
MAX_HARMLESS_CONSTANT = 2
"""Templates compare with 0, 1 and 2 (`loop.index0 % 2`); one that compares with more may count messages."""

MessageShape = tuple[object, ...]


class TemplateAnalysis:
    """What a template's source says of how it reads messages; and whether a part of a conversation may be rendered for all of it.

    `searched_literals`: literals that it compares with or searches for, apart from roles and white space.
    """

    def __init__(self, source: str):
        self.searched_literals: tuple[str, ...] = ()
        self.full_render_reason = ""
        """Why every conversation is rendered whole; "" if none has to be."""
        from jinja2 import Environment, TemplateError

        # transformers' own tag, which jinja2 does not know.
        plain = re.sub(r"\{%-?\s*(end)?generation\s*-?%\}", "", source)
        try:
            tree = Environment(extensions=["jinja2.ext.loopcontrols"]).parse(plain)
        except TemplateError as error:
            self.require_full_render(f"its source cannot be read: {error}")
            return
        constants = list(dict.fromkeys(_iter_constants(tree)))
        self.searched_literals = tuple(text for text in constants if isinstance(text, str) and text.strip())
        if numbers := [n for n in constants if type(n) is int and n > MAX_HARMLESS_CONSTANT]:
            self.require_full_render(f"it compares with {numbers[0]}, and may count messages")
        elif _has_counter(tree):
            self.require_full_render("it counts")

    def require_full_render(self, reason: str) -> None:
        """From now on, all conversations of this template."""
        if not self.full_render_reason:
            self.full_render_reason = reason
            logger.warning("with this chat template each turn renders its whole conversation: %s", reason)

    def classify_message(self, message: Message) -> MessageShape:
        """What the template can tell it by."""
        calls = tuple(type(c.get("function", c).get("arguments")) for c in message.tool_calls[:2])
        return (
            message.role,
            calls,
            bool(message.tool_call_id),
            bool(message.name),
            bool(message.reasoning_content),
            bool(message.content),
            *(mark in message.content for mark in self.searched_literals),
        )


def _iter_constants(tree: nodes.Node) -> Iterator[object]:
    """Of everything by which a template can decide: comparisons, tests, slices, remainders, arguments of calls and filters; but
    not what `==` compares with names, which are roles."""
    from jinja2 import nodes

    for node in tree.find_all((nodes.Compare, nodes.Test, nodes.Slice, nodes.Mod, nodes.FloorDiv, nodes.Call)):
        names = isinstance(node, nodes.Compare) and not isinstance(node.expr, nodes.Const)
        for constant in node.find_all(nodes.Const):
            if not (names and isinstance(constant.value, str) and constant.value.isidentifier()):
                yield constant.value
    for node in tree.find_all(nodes.Filter):
        yield from (constant.value for argument in node.args for constant in argument.find_all(nodes.Const))


def _has_counter(tree: nodes.Node) -> bool:
    """Whether it adds a number to what it remembers from message to message."""
    from jinja2 import nodes

    return any(
        isinstance(node.target, nodes.NSRef)
        and any(node.find_all((nodes.Add, nodes.Sub, nodes.Mul)))
        and any(isinstance(constant.value, int) for constant in node.find_all(nodes.Const))
        for node in tree.find_all(nodes.Assign)
    )


class _RenderedTurn(msgspec.Struct, frozen=True):
    """An answer with the messages that followed it, and the text that the template wrote for them; or several turns as one."""

    messages: list[Message]
    text: str


class GrowingText:
    """The text of a conversation. `render` is the template; `analysis` are those of all conversations of that template.

    Begins with `render_first`. Not for concurrent use.
    """

    def __init__(self, render: Callable[[Sequence[Message]], str], analysis: TemplateAnalysis):
        self._render, self._analysis = render, analysis
        self._first_prompt = self._rendered_window = _RenderedTurn([], "")
        """The first prompt, and what is rendered: it and the window together."""
        self._turns: list[_RenderedTurn] = []
        self._window: list[int] = []
        """Turns that are rendered, in order."""
        self._newest_by_shape: dict[MessageShape, int] = {}
        """Turn with a message of that shape."""
        self._message_count = self._audited_count = 0
        self.text_length = 0
        """Characters of the whole text."""

    @property
    def text(self) -> str:
        return "".join([self._first_prompt.text, *(turn.text for turn in self._turns)])

    @property
    def messages(self) -> list[Message]:
        return [m for turn in (self._first_prompt, *self._turns) for m in turn.messages]

    @property
    def last_message(self) -> Message | None:
        return self._rendered_window.messages[-1] if self._rendered_window.messages else None

    def render_first(self, messages: Sequence[Message]) -> str:
        """Render a conversation, which takes the place of the one before. Returns its text. Raises what `render` raises."""
        return self._reset_to(list(messages), self._render(messages))

    def render_next(self, messages: Sequence[Message]) -> tuple[str, bool]:
        """`messages` follow those before. Returns what the template writes behind its text before, and True; or, where that is no
        longer how its text begins, the whole text and False. If `render` raises `ValueError`, so does this, changing nothing."""
        if self._analysis.full_render_reason:
            self._widen_window()
        shown, whole = [*self._rendered_window.messages, *messages], len(self._window) == len(self._turns)
        try:
            text = self._render(shown)
        except ValueError as error:
            if whole:
                raise
            return self._render_everything(messages, f"without earlier turns it says: {error}")
        if not text.startswith(self._rendered_window.text):
            return (self._reset_rewritten(messages, text), False) if whole else self._render_everything(messages)
        added = text[len(self._rendered_window.text) :]
        shapes = list(map(self._analysis.classify_message, messages))
        if not whole and (
            self._message_count >= 2 * self._audited_count
            or any(shape not in self._newest_by_shape for shape in shapes)
        ):
            everything = self._render([*self.messages, *messages])
            if everything != self.text + added:
                self._analysis.require_full_render("text of a turn depends on turns long before it")
                return self._reset_rewritten(messages, everything), False
            self._audited_count = self._message_count
        self._rendered_window = _RenderedTurn(shown, text)
        self._append_turn(_RenderedTurn(list(messages), added), shapes)
        self._shrink_window()
        return added, True

    def _render_everything(self, messages: Sequence[Message], reason: str = "") -> tuple[str, bool]:
        text = self._render([*self.messages, *messages])
        if reason:
            self._analysis.require_full_render(reason)
        return self._reset_rewritten(messages, text), False

    def _widen_window(self) -> None:
        if len(self._window) < len(self._turns):
            self._window, self._rendered_window = list(range(len(self._turns))), _RenderedTurn(self.messages, self.text)

    def _reset_to(self, messages: list[Message], text: str) -> str:
        self._first_prompt = self._rendered_window = _RenderedTurn(messages, text)
        self._turns, self._window, self._newest_by_shape = [], [], {}
        self._message_count = self._audited_count = len(messages)
        self.text_length = len(text)
        return text

    def _reset_rewritten(self, messages: Sequence[Message], text: str) -> str:
        """`text` is that of the whole conversation, `messages` included, and does not extend the one before: the template has
        changed earlier turns. They are one turn from now on, if its text can be told from what comes before and behind it."""
        head, between = self._first_prompt, self.messages[len(self._first_prompt.messages) :]
        self._reset_to([*head.messages, *between, *messages], text)
        if self._analysis.full_render_reason or not between or not text.startswith(head.text):
            return text
        try:
            alone = self._render([*head.messages, *messages])
        except ValueError:
            return text
        last, at = alone[len(head.text) :], len(text) - len(alone) + len(head.text)
        if alone.startswith(head.text) and at >= len(head.text) and text.endswith(last):
            self._first_prompt = head
            for turn in (_RenderedTurn(between, text[len(head.text) : at]), _RenderedTurn(list(messages), last)):
                self._append_turn(turn, list(map(self._analysis.classify_message, turn.messages)))
            self._message_count = len(self._rendered_window.messages)
            self.text_length = len(text)
        return text

    def _append_turn(self, turn: _RenderedTurn, shapes: Sequence[MessageShape]) -> None:
        self._window.append(len(self._turns))
        self._newest_by_shape |= dict.fromkeys(shapes, len(self._turns))
        self._turns.append(turn)
        self._message_count += len(turn.messages)
        self.text_length += len(turn.text)

    def _shrink_window(self) -> None:
        """Let turns leave the window, if that halves it and the template writes the same without them."""
        kept = sorted({*self._newest_by_shape.values(), *self._window[-RECENT_TURNS:]})
        turns = [self._first_prompt, *(self._turns[i] for i in kept)]
        messages = sum(len(turn.messages) for turn in turns)
        if self._analysis.full_render_reason or len(self._rendered_window.messages) < 2 * messages:
            return
        if len(self._window) == len(self._turns):
            self._audited_count = self._message_count  # all of it was rendered just now
        window = _RenderedTurn([m for turn in turns for m in turn.messages], "".join(turn.text for turn in turns))
        try:
            same = self._render(window.messages) == window.text
        except ValueError as error:
            self._analysis.require_full_render(f"without earlier turns it says: {error}")
            return
        if same:
            self._window, self._rendered_window = kept, window
        else:
            self._analysis.require_full_render("text of a turn depends on turns before it")


# Given answers as rows of supervised training: the tokens that a policy would have to sample for them, in the prompts that it
# would be given. The chat template writes both, and a row is the beginning of a text of its own.


_THOUGHT_TAGS = re.compile(r"</?think>")
"""Which a template may replace by others."""


@dataclass
class Demonstration:
    """One conversation. `rows`: token ids, and which of them are answers. A prompt that does not begin with the row before (its
    history was rewritten) begins a new row, whose earlier answers are not learnt again. `unwritten_prompt_end`: what a prompt
    ends with, and the template does not write before the answer that is given."""

    rows: list[tuple[list[int], list[bool]]] = field(default_factory=lambda: [([], [])])
    unwritten_prompt_end: str = ""

    def add_turn(self, prompt: Sequence[int], answer: Sequence[int]) -> None:
        """The answer, with its stop token, to that prompt."""
        ids, mask = self.rows[-1]
        if list(prompt[: len(ids)]) != ids:
            ids, mask = [], []
            self.rows.append((ids, mask))
        mask += [False] * (len(prompt) - len(ids)) + [True] * len(answer)
        ids += [*prompt[len(ids) :], *answer]

    def build_samples(self, name: str) -> list[Sample]:
        """One a row, called `name`, `name/1`, ..."""
        out = []
        for at, (ids, mask) in enumerate(self.rows):
            table = TokenTable.from_tokens(np.asarray(ids)).with_columns(loss_mask=np.asarray(mask, bool))
            out.append(Sample(f"{name}/{at}" if at else name, table))
        return out


def build_demonstration(
    renderer: ChatRenderer, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] = ()
) -> Demonstration:
    """A conversation that is known whole, each answer of the assistant that is to be learnt after the prompt that an episode
    would have. Raises `TemplateError`, also for an answer that the template does not write as it is, or does not end."""
    demonstration, template = Demonstration(), _DemonstrationWriter(renderer, tools)
    learnt = [i for i, m in enumerate(messages) if m.role == "assistant" and not isinstance(m, MaskedAnswer)]
    for at, following in zip(learnt, [*learnt[1:], len(messages)], strict=True):
        prompt, answer = template.write_turn(messages[:at], messages[at], messages[at + 1 : following])
        demonstration.add_turn(prompt, answer)
    demonstration.unwritten_prompt_end = template.unwritten_prompt_end
    return demonstration


class _DemonstrationWriter:
    """What the template writes of a conversation, turn by turn. `unwritten_prompt_end`: see `Demonstration`."""

    def __init__(self, renderer: ChatRenderer, tools: Sequence[Mapping[str, Any]]):
        self._renderer, self._tools = renderer, tools
        self._pieces: list[tuple[str, list[int]]] = []
        """Text and tokens of the turns so far, prompts and answers apart."""
        self.unwritten_prompt_end = ""

    def write_turn(
        self, before: Sequence[Message], answer: Message, behind: Sequence[Message]
    ) -> tuple[list[int], list[int]]:
        """The tokens of the prompt of the messages `before`, and of the answer. Turns that the template still writes as it did
        keep their tokens. Raises `TemplateError`."""
        renderer = self._renderer
        prompt = renderer.render(before, self._tools)
        whole = renderer.render_finished([*before, answer], self._tools)
        while not (prompt.startswith(kept := "".join(text for text, _ in self._pieces)) and whole.startswith(kept)):
            self._pieces.pop()
        shared = opened = len(prompt)
        if not whole.startswith(prompt):  # the template opens an answer otherwise than it writes this one
            opened = _common_prefix_length(prompt, renderer.render_finished(before, self._tools))
            shared = _common_prefix_length(prompt, whole)
            if shared < opened:
                raise TemplateError("the chat template writes the messages before an answer otherwise when it is there")
        if not renderer.stop_pattern.search(whole, shared):
            whole += self._find_end_behind(whole, before, answer, behind)
        if ended := renderer.stop_pattern.search(whole, shared):
            whole = whole[: ended.end()]
        _check_written_answer(renderer, answer, whole[opened:])
        given, said = renderer.encode(prompt[len(kept) :]), renderer.encode(whole[shared:])
        if shared < len(prompt):  # what both begin with, in whole tokens
            told = renderer.encode(whole[len(kept) :])
            common = _common_prefix_length(given, told)
            self.unwritten_prompt_end = self.unwritten_prompt_end or renderer.decode(given[common:])
            given, said = told[:common], told[common:]
        if [i for i, token in enumerate(said) if token in renderer.stop_token_ids] != [len(said) - 1]:
            raise TemplateError(f"the tokenizer does not find the end of the answer in {whole[shared:]!r:.200}")
        seen = [token for _, ids in self._pieces for token in ids]
        if shared < len(prompt):
            self._pieces.append((whole[len(kept) :], [*given, *said]))
        else:
            self._pieces += [(prompt[len(kept) :], given), (whole[shared:], said)]
        return [*seen, *given], said

    def _find_end_behind(
        self, whole: str, before: Sequence[Message], answer: Message, behind: Sequence[Message]
    ) -> str:
        """What ends the answer where the template leaves that to the message behind it, which begins with a token of its own."""
        if behind:
            longer = self._renderer.render([*before, answer, *behind], self._tools)
            if longer.startswith(whole):
                return self._renderer.match_special_token(longer[len(whole) :])
        return self._renderer.find_answer_end(behind[0].role if behind else "user")


def _common_prefix_length(one: Sequence[Any], other: Sequence[Any]) -> int:
    """How many items both begin with."""
    shorter = min(len(one), len(other))
    if one[:shorter] == other[:shorter]:
        return shorter
    return next(i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b)


def _check_written_answer(renderer: ChatRenderer, answer: Message, written: str) -> None:
    """Raise `TemplateError` unless the template has `written` all of the answer, and ended it."""
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
    packed, at = _remove_whitespace(written), 0
    for part in _split_answer(answer):
        found_at = packed.find(_remove_whitespace(part), at)
        if found_at < 0:
            raise TemplateError(f"the chat template leaves this out of the answer, or changes it: {part.strip()!r:.80}")
        at = found_at + len(_remove_whitespace(part))
    calls = [call.get("function", call) for call in answer.tool_calls]
    for part in _iter_argument_texts([[call.get("name"), call.get("arguments")] for call in calls]):
        if not any(_remove_whitespace(form) in packed for form in (part, json.dumps(part)[1:-1])):
            raise TemplateError(
                f"the chat template leaves this out of the answer's `tool_calls`, or changes it: {part!r:.80}"
            )


def _remove_whitespace(text: str) -> str:
    """White space is the template's."""
    return "".join(text.split())


def _split_answer(answer: Message) -> list[str]:
    return [answer.reasoning_content, *_THOUGHT_TAGS.split(answer.content)]


def _iter_argument_texts(value: Any) -> Iterator[str]:
    """What names and arguments of calls say."""
    if isinstance(value, Mapping):
        for name, each in value.items():
            yield from (name, *_iter_argument_texts(each))
    elif isinstance(value, list):
        for each in value:
            yield from _iter_argument_texts(each)
    elif isinstance(value, str) or (isinstance(value, int | float) and not isinstance(value, bool)):
        yield str(value)
