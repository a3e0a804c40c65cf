"""A conversation, token-in/token-out: sampled tokens are kept, and never tokenised again.

Before each turn the template renders the conversation, or only its new part if that gives the same
text (`GrowingText`). As long as the text begins with what the model has seen (the **extension
property**), only the rest is encoded. Otherwise (a template that strips earlier thoughts, a
compacted history) the prompt keeps the tokens up to the first difference, and every answer that is
repeated word for word keeps its own tokens. The template is used to locate such an answer in the
text, because the same words may occur elsewhere.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import numpy as np

from r3async.data.tokens import GrowingTokens
from r3async.envs import THINK_OPEN_TAG, Message
from r3async.rollout.call_forms import MARKER_CHARACTERS
from r3async.rollout.growing_text import GrowingText
from r3async.rollout.renderer import ChatRenderer, TemplateError, TextTooLongError

_WHITESPACE = re.compile(r"\s*")


class Prompt(msgspec.Struct, frozen=True):
    """The prompt of the next answer.

    Attributes:
        token_ids: The prompt's tokens, int32 `[P]`; read-only.
        shared_turn: A turn whose sample shares a prefix with the prompt; -1 if none was compared.
        shared_tokens: Number of leading tokens known to equal those of the sample with the answer
            of `shared_turn`, else 0.
        opens_thought: True if the prompt's text ends within a thought, which the
            template has opened.
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

        White space that a template adds or strips around an answer is no difference: the answer
        keeps the model's own.
        """
        if not self.is_sampled:
            return at + len(self.text) if rendered.startswith(self.text, at) else -1
        stripped = self.text.strip()
        at = _skip_whitespace(rendered, at)
        if not rendered.startswith(stripped, at):
            return -1
        at += len(stripped)
        if not self.stop_text:
            # A cut answer ends with its own trailing white space, unless the template
            # has stripped that.
            own = self.text[len(self.text.rstrip()) :]
            return at + len(own) if rendered.startswith(own, at) else at
        at = _skip_whitespace(rendered, at)
        return at + len(self.stop_text) if rendered.startswith(self.stop_text, at) else -1


def _skip_whitespace(text: str, at: int) -> int:
    blanks = _WHITESPACE.match(text, at)
    return blanks.end() if blanks else at


class Conversation:
    """The messages of one episode, and the token ids of its next prompt.

    Each turn calls `build_prompt`, `add_answer`, then `add_messages` (or `replace_messages`). Not
    for concurrent use.
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
            max_tokens: Limit of tokens. A text that must exceed it is not tokenised, but raises
                `TextTooLongError`.
            answers_by_text: One dictionary that is shared by all conversations that may repeat each
                other's answers.
        """
        self.renderer = renderer
        self.tools = tools
        self._max_tokens = max_tokens
        self._growing_text = GrowingText(
            lambda shown: renderer.render(shown, tools), renderer.template_analysis
        )
        self._new_messages = list(messages)
        self._is_continuation = False
        """Messages that are in no prompt yet, and True if they follow others rather than being the
        whole conversation."""
        self._pieces: list[PromptPiece] = []
        self._tokens = GrowingTokens()
        """Tokens of all pieces."""
        self._answers_by_text = {} if answers_by_text is None else answers_by_text
        """Sampled pieces of each answer text, the newest last."""
        self._has_unrendered_answer = False
        """True if the newest piece is an answer that is in no rendered text yet."""
        self._shared_turn = -1
        self._shared_tokens = 0
        """Values of `Prompt.shared_turn` and `Prompt.shared_tokens` for the next prompt."""

    @property
    def messages(self) -> list[Message]:
        return [
            *(self._growing_text.messages if self._is_continuation else ()),
            *self._new_messages,
        ]

    def adopt_closest(self, others: Sequence[Conversation]) -> None:
        """Adopt the tokens of the conversation among `others` that shares the longest prefix
        with these messages.

        Call it before the first `build_prompt`. Among equals the newest, which is the last, is
        taken. It is for callers that receive whole conversations: requests that branch, run
        concurrently, or edit history. Raises the errors of `build_prompt`.
        """
        rendered, _ = self._render_new()
        like = self
        kept = self._pieces
        furthest = 0
        for other in others:
            pieces, at = other._match_pieces(rendered)
            if at >= furthest:
                like = other
                kept = pieces
                furthest = at
        self._adopt_pieces(like, kept)
        self._append_text(rendered, furthest, self._count_later_answers())

    def build_prompt(self) -> Prompt:
        """Return the prompt for the next answer.

        Raises `TemplateError` if the template refuses the messages, and `TextTooLongError`; the
        conversation is then unchanged.
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

    def add_answer(
        self, token_ids: Sequence[int], message: Message | None = None, turn: int = -1
    ) -> str:
        """Add the answer to the last `build_prompt` and return its text.

        Args:
            message: The message that represents it in the conversation, if not that text (with tool
                calls parsed, for example).
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
        self._shared_turn = turn
        self._shared_tokens = len(self._tokens) if turn >= 0 else 0
        return text

    def add_messages(self, messages: Sequence[Message]) -> None:
        """Add the messages that follow the last answer."""
        self._new_messages += messages

    def replace_messages(self, messages: Sequence[Message]) -> None:
        """Replace the whole conversation."""
        self._new_messages = list(messages)
        self._is_continuation = False

    def _render_new(self) -> tuple[str, bool]:
        """Return the text of the new messages and True if it follows the text before; else the
        whole text and False."""
        rendered, extends = (
            self._growing_text.render_next(self._new_messages)
            if self._is_continuation
            else (self._growing_text.render_first(self._new_messages), False)
        )
        try:
            self.renderer.check_length(self._growing_text.text_length, self._max_tokens)
        except TextTooLongError:
            self._new_messages = self._growing_text.messages
            self._is_continuation = False
            raise
        self._new_messages = []
        self._is_continuation = True
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
        self._pieces = pieces
        self._tokens = GrowingTokens(other._tokens.array[:length])
        self._shared_turn = other._shared_turn
        self._shared_tokens = min(other._shared_tokens, length)

    def _count_later_answers(self) -> int:
        """Return the number of messages of the assistant behind the pieces."""
        spoken = sum(m.role == "assistant" for m in self._growing_text.messages)
        return spoken - sum(piece.assistant_messages for piece in self._pieces)

    def _append_text(self, rendered: str, at: int, assistant_messages: int) -> None:
        """Append `rendered[at:]` in pieces: sampled answers that ended keep their tokens, the
        rest is encoded.

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
            at = start + len(piece.text) + len(piece.stop_text)
            passed = 0
        if at < len(rendered):
            self._append_piece(self._encode_piece(rendered[at:], passed))

    def _find_repeated_answers(
        self, rendered: str, at: int, assistant_messages: int
    ) -> list[tuple[int, PromptPiece] | None]:
        """Find the sampled answers among the last `assistant_messages` messages of the assistant.

        Returns for each message its offset in `rendered` and its sampled piece; None for one
        that was not sampled, or is not written word for word behind `at`. No sampled answer is
        used twice: among equal ones, those that answered the same message are taken first,
        then the newest.
        """
        messages = self._growing_text.messages
        last = (
            [i for i, message in enumerate(messages) if message.role == "assistant"][
                -assistant_messages:
            ]
            if assistant_messages
            else []
        )
        known = {
            text: self._answers_by_text[text]
            for text in {messages[i].content for i in last} & self._answers_by_text.keys() - {""}
        }
        stops = {
            (text, piece.stop_text)
            for text, pieces in known.items()
            for piece in pieces
            if piece.stop_text
        }
        written = {(text, stop) for text, stop in stops if rendered.find(text + stop, at) >= 0}
        texts = {text for text, _ in written}
        ends = (
            self._find_content_ends([i for i in last if messages[i].content in texts], rendered)
            if written
            else {}
        )
        used = {id(piece.token_ids) for piece in self._pieces}
        found: dict[int, tuple[int, PromptPiece]] = {}
        for same in (True, False):
            for i in sorted(ends.keys() - found.keys(), reverse=True):
                text = messages[i].content
                asked = messages[i - 1] if i else None
                starts = [end - len(text.rstrip()) for end in ends[i]]
                fitting = (
                    (start, piece)
                    for piece in reversed(known[text])
                    if id(piece.token_ids) not in used and (text, piece.stop_text) in written
                    if not same or piece.answered_message == asked
                    for start in starts
                    if start >= at and rendered.startswith(text + piece.stop_text, start)
                )
                first = next(fitting, None)
                if first is not None:
                    found[i] = first
                    used.add(id(first[1].token_ids))
        return [found.get(i) for i in last]

    def _find_content_ends(self, indices: Sequence[int], rendered: str) -> dict[int, list[int]]:
        """Return the offsets in `rendered` at which the contents of messages end, without
        trailing blanks.

        `rendered` is the end of the whole text. The result is empty if the template writes
        different text when each content has a mark behind it.
        """
        messages = self._growing_text.messages
        whole = self._growing_text.text
        used = set(whole)
        marks = dict(
            zip(
                (mark for mark in map(chr, MARKER_CHARACTERS) if mark not in used),
                indices,
                strict=False,
            )
        )
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
