"""The template's text of a conversation that grows, of which only what is new is rendered.

A chat template is a function of all messages. Most write a new turn behind the text that there was, and look at nothing but the
messages around it. But one may take thoughts out of earlier answers, merge a system message into the last question, or count. So
the template itself has to show, on the conversation's own messages, that a part may be rendered in place of the whole:

* **Window.** What is rendered is the first prompt, the last turns, and one turn for each *shape* of a message: what a template
  can tell messages apart by, which is role, calls, and which of the literals that it searches for stand in the text. What it does
  to any earlier message, it does to the one of that shape in the window, whose text then is no longer what it was.
* **Elision.** Turns leave the window only if the template, without them, writes the others exactly as with them.
* **Audit.** Each time the number of messages has doubled, and at a new shape, the whole conversation is rendered and compared.

A template that fails there renders every conversation whole from then on, and the reason is logged once; so does, from the
beginning, one that counts or cannot be read. Where a part may be rendered, a turn costs what it is long, and
not what came before it.
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

RECENT = 2
"""Turns at the end of a conversation that are always rendered."""
LARGEST_NUMBER = 2
"""Templates compare with 0, 1 and 2 (`loop.index0 % 2`); one that compares with more may count messages."""

Shape = tuple[object, ...]


class TemplateHabits:
    """What a template's source says of how it reads messages; and whether a part of a conversation may be rendered for all of it.

    `marks`: literals that it compares with or searches for, apart from roles and white space.
    """

    def __init__(self, source: str):
        self.marks: tuple[str, ...] = ()
        self.whole = ""
        """Why every conversation is rendered whole; "" if none has to be."""
        from jinja2 import Environment, TemplateError

        # transformers' own tag, which jinja2 does not know.
        plain = re.sub(r"\{%-?\s*(end)?generation\s*-?%\}", "", source)
        try:
            tree = Environment(extensions=["jinja2.ext.loopcontrols"]).parse(plain)
        except TemplateError as error:
            self.render_whole(f"its source cannot be read: {error}")
            return
        constants = list(dict.fromkeys(_constants(tree)))
        self.marks = tuple(text for text in constants if isinstance(text, str) and text.strip())
        if numbers := [n for n in constants if type(n) is int and n > LARGEST_NUMBER]:
            self.render_whole(f"it compares with {numbers[0]}, and may count messages")
        elif _counts(tree):
            self.render_whole("it counts")

    def render_whole(self, reason: str) -> None:
        """From now on, all conversations of this template."""
        if not self.whole:
            self.whole = reason
            logger.warning("with this chat template each turn renders its whole conversation: %s", reason)

    def shape(self, message: Message) -> Shape:
        """What the template can tell it by."""
        calls = tuple(type(c.get("function", c).get("arguments")) for c in message.tool_calls[:2])
        return (
            message.role,
            calls,
            bool(message.tool_call_id),
            bool(message.name),
            bool(message.reasoning_content),
            bool(message.content),
            *(mark in message.content for mark in self.marks),
        )


def _constants(tree: nodes.Node) -> Iterator[object]:
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


def _counts(tree: nodes.Node) -> bool:
    """Whether it adds a number to what it remembers from message to message."""
    from jinja2 import nodes

    return any(
        isinstance(node.target, nodes.NSRef)
        and any(node.find_all((nodes.Add, nodes.Sub, nodes.Mul)))
        and any(isinstance(constant.value, int) for constant in node.find_all(nodes.Const))
        for node in tree.find_all(nodes.Assign)
    )


class _Turn(msgspec.Struct, frozen=True):
    """An answer with the messages that followed it, and the text that the template wrote for them; or several turns as one."""

    messages: list[Message]
    text: str


class GrowingText:
    """The text of a conversation. `render` is the template; `habits` are those of all conversations of that template.

    Begins with `begin`. Not for concurrent use.
    """

    def __init__(self, render: Callable[[Sequence[Message]], str], habits: TemplateHabits):
        self._render, self._habits = render, habits
        self._head = self._window_all = _Turn([], "")
        """The first prompt, and what is rendered: it and the window together."""
        self._turns: list[_Turn] = []
        self._window: list[int] = []
        """Turns that are rendered, in order."""
        self._newest: dict[Shape, int] = {}
        """Turn with a message of that shape."""
        self._messages = self._audited = 0
        self.length = 0
        """Characters of the whole text."""

    @property
    def text(self) -> str:
        return "".join([self._head.text, *(turn.text for turn in self._turns)])

    @property
    def messages(self) -> list[Message]:
        return [m for turn in (self._head, *self._turns) for m in turn.messages]

    @property
    def last_message(self) -> Message | None:
        return self._window_all.messages[-1] if self._window_all.messages else None

    def begin(self, messages: Sequence[Message]) -> str:
        """Render a conversation, which takes the place of the one before. Returns its text. Raises what `render` raises."""
        return self._restart(list(messages), self._render(messages))

    def follow(self, messages: Sequence[Message]) -> tuple[str, bool]:
        """`messages` follow those before. Returns what the template writes behind its text before, and True; or, where that is no
        longer how its text begins, the whole text and False. If `render` raises `ValueError`, so does this, changing nothing."""
        if self._habits.whole:
            self._show_all()
        shown, whole = [*self._window_all.messages, *messages], len(self._window) == len(self._turns)
        try:
            text = self._render(shown)
        except ValueError as error:
            if whole:
                raise
            return self._follow_whole(messages, f"without earlier turns it says: {error}")
        if not text.startswith(self._window_all.text):
            return (self._split(messages, text), False) if whole else self._follow_whole(messages)
        added = text[len(self._window_all.text) :]
        shapes = list(map(self._habits.shape, messages))
        if not whole and (self._messages >= 2 * self._audited or any(shape not in self._newest for shape in shapes)):
            everything = self._render([*self.messages, *messages])
            if everything != self.text + added:
                self._habits.render_whole("text of a turn depends on turns long before it")
                return self._split(messages, everything), False
            self._audited = self._messages
        self._window_all = _Turn(shown, text)
        self._append(_Turn(list(messages), added), shapes)
        self._elide()
        return added, True

    def _follow_whole(self, messages: Sequence[Message], reason: str = "") -> tuple[str, bool]:
        text = self._render([*self.messages, *messages])
        if reason:
            self._habits.render_whole(reason)
        return self._split(messages, text), False

    def _show_all(self) -> None:
        if len(self._window) < len(self._turns):
            self._window, self._window_all = list(range(len(self._turns))), _Turn(self.messages, self.text)

    def _restart(self, messages: list[Message], text: str) -> str:
        self._head = self._window_all = _Turn(messages, text)
        self._turns, self._window, self._newest = [], [], {}
        self._messages = self._audited = len(messages)
        self.length = len(text)
        return text

    def _split(self, messages: Sequence[Message], text: str) -> str:
        """`text` is that of the whole conversation, `messages` included, and does not extend the one before: the template has
        changed earlier turns. They are one turn from now on, if its text can be told from what comes before and behind it."""
        head, between = self._head, self.messages[len(self._head.messages) :]
        self._restart([*head.messages, *between, *messages], text)
        if self._habits.whole or not between or not text.startswith(head.text):
            return text
        try:
            alone = self._render([*head.messages, *messages])
        except ValueError:
            return text
        last, at = alone[len(head.text) :], len(text) - len(alone) + len(head.text)
        if alone.startswith(head.text) and at >= len(head.text) and text.endswith(last):
            self._head = head
            for turn in (_Turn(between, text[len(head.text) : at]), _Turn(list(messages), last)):
                self._append(turn, list(map(self._habits.shape, turn.messages)))
            self._messages = len(self._window_all.messages)
            self.length = len(text)
        return text

    def _append(self, turn: _Turn, shapes: Sequence[Shape]) -> None:
        self._window.append(len(self._turns))
        self._newest |= dict.fromkeys(shapes, len(self._turns))
        self._turns.append(turn)
        self._messages += len(turn.messages)
        self.length += len(turn.text)

    def _elide(self) -> None:
        """Let turns leave the window, if that halves it and the template writes the same without them."""
        kept = sorted({*self._newest.values(), *self._window[-RECENT:]})
        turns = [self._head, *(self._turns[i] for i in kept)]
        messages = sum(len(turn.messages) for turn in turns)
        if self._habits.whole or len(self._window_all.messages) < 2 * messages:
            return
        if len(self._window) == len(self._turns):
            self._audited = self._messages  # all of it was rendered just now
        window = _Turn([m for turn in turns for m in turn.messages], "".join(turn.text for turn in turns))
        try:
            same = self._render(window.messages) == window.text
        except ValueError as error:
            self._habits.render_whole(f"without earlier turns it says: {error}")
            return
        if same:
            self._window, self._window_all = kept, window
        else:
            self._habits.render_whole("text of a turn depends on turns before it")
