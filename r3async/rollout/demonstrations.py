"""Given answers as rows of supervised training: the tokens that a policy would have to sample for them, in the prompts that it
would be given. The chat template writes both, and a row is the beginning of a text of its own."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from r3async.data.records import Sample, TokenTable
from r3async.envs import Message
from r3async.envs.forms import ShownAnswer
from r3async.rollout.chat import ChatRenderer, TemplateError

_MARKS_OF_THOUGHTS = re.compile(r"</?think>")
"""Which a template may replace by others."""


@dataclass
class Demonstration:
    """One conversation. `rows`: token ids, and which of them are answers. A prompt that does not begin with the row before (its
    history was rewritten) begins a new row, whose earlier answers are not learnt again. `unasked`: what a prompt ends with, and
    the template does not write before the answer that is given."""

    rows: list[tuple[list[int], list[bool]]] = field(default_factory=lambda: [([], [])])
    unasked: str = ""

    def turn(self, prompt: Sequence[int], answer: Sequence[int]) -> None:
        """The answer, with its stop token, to that prompt."""
        ids, mask = self.rows[-1]
        if list(prompt[: len(ids)]) != ids:
            ids, mask = [], []
            self.rows.append((ids, mask))
        mask += [False] * (len(prompt) - len(ids)) + [True] * len(answer)
        ids += [*prompt[len(ids) :], *answer]

    def samples(self, name: str) -> list[Sample]:
        """One a row, called `name`, `name/1`, ..."""
        out = []
        for at, (ids, mask) in enumerate(self.rows):
            table = TokenTable.of_tokens(np.asarray(ids)).with_columns(loss_mask=np.asarray(mask, bool))
            out.append(Sample(f"{name}/{at}" if at else name, table))
        return out


def demonstrate(
    renderer: ChatRenderer, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] = ()
) -> Demonstration:
    """A conversation that is known whole, each answer of the assistant that is to be learnt after the prompt that an episode
    would have. Raises `TemplateError`, also for an answer that the template does not write as it is, or does not end."""
    demonstration, template = Demonstration(), _Template(renderer, tools)
    learnt = [i for i, m in enumerate(messages) if m.role == "assistant" and not isinstance(m, ShownAnswer)]
    for at, following in zip(learnt, [*learnt[1:], len(messages)], strict=True):
        prompt, answer = template.write(messages[:at], messages[at], messages[at + 1 : following])
        demonstration.turn(prompt, answer)
    demonstration.unasked = template.unasked
    return demonstration


class _Template:
    """What the template writes of a conversation, turn by turn. `unasked`: see `Demonstration`."""

    def __init__(self, renderer: ChatRenderer, tools: Sequence[Mapping[str, Any]]):
        self._renderer, self._tools = renderer, tools
        self._pieces: list[tuple[str, list[int]]] = []
        """Text and tokens of the turns so far, prompts and answers apart."""
        self.unasked = ""

    def write(
        self, before: Sequence[Message], answer: Message, behind: Sequence[Message]
    ) -> tuple[list[int], list[int]]:
        """The tokens of the prompt of the messages `before`, and of the answer. Turns that the template still writes as it did
        keep their tokens. Raises `TemplateError`."""
        renderer = self._renderer
        prompt = renderer.render(before, self._tools)
        whole = renderer.render_answered([*before, answer], self._tools)
        while not (prompt.startswith(kept := "".join(text for text, _ in self._pieces)) and whole.startswith(kept)):
            self._pieces.pop()
        shared = opened = len(prompt)
        if not whole.startswith(prompt):  # the template opens an answer otherwise than it writes this one
            opened = _common(prompt, renderer.render_answered(before, self._tools))
            shared = _common(prompt, whole)
            if shared < opened:
                raise TemplateError("the chat template writes the messages before an answer otherwise when it is there")
        if not renderer.ends.search(whole, shared):
            whole += self._end_behind(whole, before, answer, behind)
        if ended := renderer.ends.search(whole, shared):
            whole = whole[: ended.end()]
        _check(renderer, answer, whole[opened:])
        given, said = renderer.encode(prompt[len(kept) :]), renderer.encode(whole[shared:])
        if shared < len(prompt):  # what both begin with, in whole tokens
            told = renderer.encode(whole[len(kept) :])
            common = _common(given, told)
            self.unasked = self.unasked or renderer.decode(given[common:])
            given, said = told[:common], told[common:]
        if [i for i, token in enumerate(said) if token in renderer.stop_token_ids] != [len(said) - 1]:
            raise TemplateError(f"the tokenizer does not find the end of the answer in {whole[shared:]!r:.200}")
        seen = [token for _, ids in self._pieces for token in ids]
        if shared < len(prompt):
            self._pieces.append((whole[len(kept) :], [*given, *said]))
        else:
            self._pieces += [(prompt[len(kept) :], given), (whole[shared:], said)]
        return [*seen, *given], said

    def _end_behind(self, whole: str, before: Sequence[Message], answer: Message, behind: Sequence[Message]) -> str:
        """What ends the answer where the template leaves that to the message behind it, which begins with a token of its own."""
        if behind:
            longer = self._renderer.render([*before, answer, *behind], self._tools)
            if longer.startswith(whole):
                return self._renderer.special_at(longer[len(whole) :])
        return self._renderer.end_of_answer(behind[0].role if behind else "user")


def _common(one: Sequence[Any], other: Sequence[Any]) -> int:
    """How many items both begin with."""
    shorter = min(len(one), len(other))
    if one[:shorter] == other[:shorter]:
        return shorter
    return next(i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b)


def _check(renderer: ChatRenderer, answer: Message, written: str) -> None:
    """Raise `TemplateError` unless the template has `written` all of the answer, and ended it."""
    for text in (answer.content, answer.reasoning_content):
        if found := renderer.ends.search(text):
            raise TemplateError(f"the answer has {found[0]!r} in it, which ends an answer")
    if not renderer.ends.search(written):
        raise TemplateError(
            "the chat template writes no token that ends an answer, so that none can be learnt: let it write eos_token behind "
            "each, or add its own to `eos_token_id` in generation_config.json"
        )
    if 0 < answer.content.count("</think>") < written.count("</think>"):
        raise TemplateError(
            "the chat template writes a thought of its own before the one that the answer's `content` has: give that as "
            "`reasoning_content`"
        )
    packed, at = _packed(written), 0
    for part in _parts(answer):
        found_at = packed.find(_packed(part), at)
        if found_at < 0:
            raise TemplateError(f"the chat template leaves this out of the answer, or changes it: {part.strip()!r:.80}")
        at = found_at + len(_packed(part))
    calls = [call.get("function", call) for call in answer.tool_calls]
    for part in _texts([[call.get("name"), call.get("arguments")] for call in calls]):
        if not any(_packed(form) in packed for form in (part, json.dumps(part)[1:-1])):
            raise TemplateError(
                f"the chat template leaves this out of the answer's `tool_calls`, or changes it: {part!r:.80}"
            )


def _packed(text: str) -> str:
    """White space is the template's."""
    return "".join(text.split())


def _parts(answer: Message) -> list[str]:
    return [answer.reasoning_content, *_MARKS_OF_THOUGHTS.split(answer.content)]


def _texts(value: Any) -> Iterator[str]:
    """What names and arguments of calls say."""
    if isinstance(value, Mapping):
        for name, each in value.items():
            yield from (name, *_texts(each))
    elif isinstance(value, list):
        for each in value:
            yield from _texts(each)
    elif isinstance(value, str) or (isinstance(value, int | float) and not isinstance(value, bool)):
        yield str(value)
