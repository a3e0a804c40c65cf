"""Incremental rendering of a growing conversation, of which only the new part is rendered.

A chat template is a function of all messages. Most templates append a new turn to the earlier text,
and look at nothing but the messages around it. But one may remove thoughts from earlier answers,
merge a system message into the last question, or count. So the template itself must show, on the
conversation's own messages, that a part may be rendered in place of the whole:

* **Window.** The rendered part is the first prompt, the last turns, and one turn for each *shape*
  of a message. The shape is everything by which a template can distinguish messages: role, calls,
  and which of the literals that it searches for occur in the text. If the template changes any
  earlier message, it also changes the message of that shape in the window, whose text then
  differs from before.
* **Elision.** Turns leave the window only if the template, without them, writes the others
  exactly as with them.
* **Audit.** Each time the number of messages has doubled, and at a new shape, the whole
  conversation is rendered and compared.

If a template fails a check, every conversation is rendered whole from then on, and the reason is
logged once. A template that counts or cannot be parsed renders whole conversations from the
beginning. Otherwise the cost of a turn depends on its own length, and not on the turns before it.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

import msgspec

from r3async.envs import Message

if TYPE_CHECKING:
    from jinja2 import nodes

logger = logging.getLogger(__name__)

RECENT_TURNS = 2
"""Number of turns at the end of a conversation that are always rendered."""
MAX_HARMLESS_CONSTANT = 2
"""Largest number with which templates compare (`loop.index0 % 2`); one that compares with more
may count messages."""

MessageShape = tuple[object, ...]


class TemplateAnalysis:
    """An analysis of a template's source that shows if a part of a conversation may be rendered in
    place of the whole.

    `searched_literals` are the literals that the template compares with or searches for, except
    roles and white space.
    """

    def __init__(self, source: str):
        self.searched_literals: tuple[str, ...] = ()
        self.full_render_reason = ""
        """Reason for which every conversation is rendered whole; "" if that is not necessary."""
        from jinja2 import Environment, TemplateError

        # A tag of transformers that jinja2 does not know.
        plain = re.sub(r"\{%-?\s*(end)?generation\s*-?%\}", "", source)
        try:
            tree = Environment(extensions=["jinja2.ext.loopcontrols"]).parse(plain)
        except TemplateError as error:
            self.require_full_render(f"its source cannot be read: {error}")
            return
        constants = list(dict.fromkeys(_iter_constants(tree)))
        self.searched_literals = tuple(
            text for text in constants if isinstance(text, str) and text.strip()
        )
        numbers = [n for n in constants if type(n) is int and n > MAX_HARMLESS_CONSTANT]
        if numbers:
            self.require_full_render(f"it compares with {numbers[0]}, and may count messages")
        elif _has_counter(tree):
            self.require_full_render("it counts")

    def require_full_render(self, reason: str) -> None:
        """Render all conversations of this template whole from now on, and log the first reason."""
        if not self.full_render_reason:
            self.full_render_reason = reason
            logger.warning(
                "with this chat template each turn renders its whole conversation: %s", reason
            )

    def classify_message(self, message: Message) -> MessageShape:
        """Return the shape of a message: everything by which the template can
        distinguish it from others."""
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
    """Yield the constants of everything by which a template can decide.

    These are comparisons, tests, slices, remainders, and arguments of calls and filters, but not
    the identifiers that are compared with names, which are roles.
    """
    from jinja2 import nodes

    for node in tree.find_all(
        (nodes.Compare, nodes.Test, nodes.Slice, nodes.Mod, nodes.FloorDiv, nodes.Call)
    ):
        names = isinstance(node, nodes.Compare) and not isinstance(node.expr, nodes.Const)
        for constant in node.find_all(nodes.Const):
            if not (names and isinstance(constant.value, str) and constant.value.isidentifier()):
                yield constant.value
    for node in tree.find_all(nodes.Filter):
        yield from (
            constant.value for argument in node.args for constant in argument.find_all(nodes.Const)
        )


def _has_counter(tree: nodes.Node) -> bool:
    """Return True if the template adds a number to a variable that it keeps from
    message to message."""
    from jinja2 import nodes

    return any(
        isinstance(node.target, nodes.NSRef)
        and any(node.find_all((nodes.Add, nodes.Sub, nodes.Mul)))
        and any(isinstance(constant.value, int) for constant in node.find_all(nodes.Const))
        for node in tree.find_all(nodes.Assign)
    )


class _RenderedTurn(msgspec.Struct, frozen=True):
    """One turn, or several as one: an answer, the messages that followed it, and the
    template's text for them."""

    messages: list[Message]
    text: str


class GrowingText:
    """The text of a growing conversation, rendered incrementally. The first call is `render_first`.

    `render` is the template; `analysis` is shared by all conversations of that template. Not
    for concurrent use.
    """

    def __init__(self, render: Callable[[Sequence[Message]], str], analysis: TemplateAnalysis):
        self._render = render
        self._analysis = analysis
        self._first_prompt = self._rendered_window = _RenderedTurn([], "")
        """First prompt, and the rendered part: the first prompt and the window together."""
        self._turns: list[_RenderedTurn] = []
        self._window: list[int] = []
        """Indices of the turns that are rendered, in order."""
        self._newest_by_shape: dict[MessageShape, int] = {}
        """Index of the newest turn with a message of each shape."""
        self._message_count = self._audited_count = 0
        self.text_length = 0
        """Number of characters of the whole text."""

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
        """Render a conversation, which replaces the one before, and return its text. Raises the
        errors of `render`."""
        return self._reset_to(list(messages), self._render(messages))

    def render_next(self, messages: Sequence[Message]) -> tuple[str, bool]:
        """Add `messages`, and return the text that the template appends, and True.

        If the new text does not begin with the text before, return the whole text, and False. If
        `render` raises `ValueError`, so does this, without a change.
        """
        if self._analysis.full_render_reason:
            self._widen_window()
        shown = [*self._rendered_window.messages, *messages]
        whole = len(self._window) == len(self._turns)
        try:
            text = self._render(shown)
        except ValueError as error:
            if whole:
                raise
            return self._render_everything(messages, f"without earlier turns it says: {error}")
        if not text.startswith(self._rendered_window.text):
            return (
                (self._reset_rewritten(messages, text), False)
                if whole
                else self._render_everything(messages)
            )
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
            self._window, self._rendered_window = (
                list(range(len(self._turns))),
                _RenderedTurn(self.messages, self.text),
            )

    def _reset_to(self, messages: list[Message], text: str) -> str:
        self._first_prompt = self._rendered_window = _RenderedTurn(messages, text)
        self._turns = []
        self._window = []
        self._newest_by_shape = {}
        self._message_count = self._audited_count = len(messages)
        self.text_length = len(text)
        return text

    def _reset_rewritten(self, messages: Sequence[Message], text: str) -> str:
        """Reset to `text`, the whole text including `messages`, which does not extend the text
        before, and return it.

        The template has changed earlier turns. They become one turn, if its text can be separated
        from the first prompt before and the new messages behind it.
        """
        head = self._first_prompt
        between = self.messages[len(self._first_prompt.messages) :]
        self._reset_to([*head.messages, *between, *messages], text)
        if self._analysis.full_render_reason or not between or not text.startswith(head.text):
            return text
        try:
            alone = self._render([*head.messages, *messages])
        except ValueError:
            return text
        last = alone[len(head.text) :]
        at = len(text) - len(alone) + len(head.text)
        if alone.startswith(head.text) and at >= len(head.text) and text.endswith(last):
            self._first_prompt = head
            for turn in (
                _RenderedTurn(between, text[len(head.text) : at]),
                _RenderedTurn(list(messages), last),
            ):
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
        """Let turns leave the window, if that halves it and the template writes the
        same without them."""
        kept = sorted({*self._newest_by_shape.values(), *self._window[-RECENT_TURNS:]})
        turns = [self._first_prompt, *(self._turns[i] for i in kept)]
        messages = sum(len(turn.messages) for turn in turns)
        if self._analysis.full_render_reason or len(self._rendered_window.messages) < 2 * messages:
            return
        if len(self._window) == len(self._turns):
            self._audited_count = self._message_count  # all of it was rendered just now
        window = _RenderedTurn(
            [m for turn in turns for m in turn.messages], "".join(turn.text for turn in turns)
        )
        try:
            same = self._render(window.messages) == window.text
        except ValueError as error:
            self._analysis.require_full_render(f"without earlier turns it says: {error}")
            return
        if same:
            self._window = kept
            self._rendered_window = window
        else:
            self._analysis.require_full_render("text of a turn depends on turns before it")
