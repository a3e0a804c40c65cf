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
from r3async.envs.forms import MaskedAnswer
from r3async.rollout.chat import ChatRenderer, TemplateError

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
