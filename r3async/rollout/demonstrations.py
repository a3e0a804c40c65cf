"""Given answers as rows of supervised training.

They are the tokens that a policy would have to sample, after the prompts that it would get. The
chat template writes both, and a row is the beginning of a text that it writes.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from r3async.data.tokens import Sample, TokenTable
from r3async.envs import Message
from r3async.envs.row_tasks import MaskedAnswer
from r3async.rollout.call_forms import find_missing_part, remove_whitespace
from r3async.rollout.renderer import ChatRenderer, TemplateError

_THOUGHT_TAGS = re.compile(r"</?think>")
"""Tags around thoughts, which a template may replace by others."""


@dataclass
class Demonstration:
    """The training rows of one conversation.

    A prompt that does not begin with the row before (its history was rewritten) begins a new row,
    whose earlier answers are not learnt again.

    Attributes:
        rows: Token ids of each row, and a mask that is True for answers.
        unwritten_prompt_end: The end of a prompt that the template does not write before
            the given answer.
    """

    rows: list[tuple[list[int], list[bool]]] = field(default_factory=lambda: [([], [])])
    unwritten_prompt_end: str = ""

    def add_turn(self, prompt: Sequence[int], answer: Sequence[int]) -> None:
        """Add a prompt and the answer to it, with its stop token."""
        ids, mask = self.rows[-1]
        if list(prompt[: len(ids)]) != ids:
            ids = []
            mask = []
            self.rows.append((ids, mask))
        mask += [False] * (len(prompt) - len(ids)) + [True] * len(answer)
        ids += [*prompt[len(ids) :], *answer]

    def build_samples(self, name: str) -> list[Sample]:
        """Return one sample per row, named `name`, `name/1`, ..."""
        out = []
        for at, (ids, mask) in enumerate(self.rows):
            table = TokenTable.from_tokens(np.asarray(ids)).with_columns(
                loss_mask=np.asarray(mask, bool)
            )
            out.append(Sample(f"{name}/{at}" if at else name, table))
        return out


def build_demonstration(
    renderer: ChatRenderer, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] = ()
) -> Demonstration:
    """Encode a complete conversation, with each answer to be learnt after the prompt that an
    episode would have.

    Raises `TemplateError`, also for an answer that the template does not write unchanged,
    or does not end.
    """
    demonstration = Demonstration()
    template = _DemonstrationWriter(renderer, tools)
    learnt = [
        i
        for i, m in enumerate(messages)
        if m.role == "assistant" and not isinstance(m, MaskedAnswer)
    ]
    for at, following in zip(learnt, [*learnt[1:], len(messages)], strict=True):
        prompt, answer = template.write_turn(
            messages[:at], messages[at], messages[at + 1 : following]
        )
        demonstration.add_turn(prompt, answer)
    demonstration.unwritten_prompt_end = template.unwritten_prompt_end
    return demonstration


class _DemonstrationWriter:
    """A writer of a given conversation, turn by turn. `unwritten_prompt_end` is that of
    `Demonstration`."""

    def __init__(self, renderer: ChatRenderer, tools: Sequence[Mapping[str, Any]]):
        self._renderer = renderer
        self._tools = tools
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
        # The answer begins behind the prompt, unless the template begins it in another way than the
        # generation prompt.
        common_length = answer_start = len(prompt)
        is_prefix = written.startswith(prompt)
        if not is_prefix:
            common_length, answer_start = self._compare_beginnings(prompt, written, before)
        # It ends with its stop token, which the template may leave to the start of
        # the next message.
        if not renderer.stop_pattern.search(written, common_length):
            written += self._find_end_behind(written, before, answer, behind)
        answer_end = renderer.stop_pattern.search(written, common_length)
        if answer_end:
            written = written[: answer_end.end()]
        _check_written_answer(renderer, answer, written[answer_start:])
        # Prompt and answer are encoded separately, as in an episode, and so are kept separately.
        prompt_tokens = renderer.encode(prompt[kept_length:])
        if is_prefix:
            answer_tokens = renderer.encode(written[common_length:])
            pieces = [
                (prompt[kept_length:], prompt_tokens),
                (written[common_length:], answer_tokens),
            ]
        else:
            prompt_tokens, answer_tokens = self._split_common_tokens(
                prompt_tokens, written[kept_length:]
            )
            pieces = [(written[kept_length:], [*prompt_tokens, *answer_tokens])]
        # A model that learns the answer must learn to end it, once.
        if [i for i, token in enumerate(answer_tokens) if token in renderer.stop_token_ids] != [
            len(answer_tokens) - 1
        ]:
            raise TemplateError(
                "the tokenizer does not find the end of the answer in "
                f"{written[common_length:]!r:.200}"
            )
        kept_tokens = [token for _, tokens in self._pieces for token in tokens]
        self._pieces += pieces
        return [*kept_tokens, *prompt_tokens], answer_tokens

    def _drop_rewritten_turns(self, prompt: str, written: str) -> int:
        """Drop the last turns until both texts begin with those that are left. Returns the
        length of their text."""
        while True:
            kept_text = "".join(text for text, _ in self._pieces)
            if prompt.startswith(kept_text) and written.startswith(kept_text):
                return len(kept_text)
            self._pieces.pop()

    def _compare_beginnings(
        self, prompt: str, written: str, before: Sequence[Message]
    ) -> tuple[int, int]:
        """Return the length of the text that `prompt` and `written` share, and where the generation
        prompt begins. Raises `TemplateError` if they differ before that."""
        generation_start = _common_prefix_length(
            prompt, self._renderer.render_finished(before, self._tools)
        )
        common_length = _common_prefix_length(prompt, written)
        if common_length < generation_start:
            raise TemplateError(
                "the chat template writes the messages before an answer otherwise when it is there"
            )
        return common_length, generation_start

    def _split_common_tokens(
        self, prompt_tokens: list[int], written: str
    ) -> tuple[list[int], list[int]]:
        """Return the tokens of `written` that the prompt has, too, and the others,
        in whole tokens."""
        written_tokens = self._renderer.encode(written)
        common_count = _common_prefix_length(prompt_tokens, written_tokens)
        if not self.unwritten_prompt_end:
            self.unwritten_prompt_end = self._renderer.decode(prompt_tokens[common_count:])
        return written_tokens[:common_count], written_tokens[common_count:]

    def _find_end_behind(
        self, written: str, before: Sequence[Message], answer: Message, behind: Sequence[Message]
    ) -> str:
        """Return the token that ends the answer if the template leaves that to the start of
        the next message."""
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
    """Raise `TemplateError` unless the template's text `written` has the whole answer and a stop
    token behind it."""
    for text in (answer.content, answer.reasoning_content):
        found = renderer.stop_pattern.search(text)
        if found:
            raise TemplateError(f"the answer has {found[0]!r} in it, which ends an answer")
    if not renderer.stop_pattern.search(written):
        raise TemplateError(
            "the chat template writes no token that ends an answer, so that none can be learnt: "
            "let it write eos_token behind each, or add its own to `eos_token_id` in "
            "generation_config.json"
        )
    if 0 < answer.content.count("</think>") < written.count("</think>"):
        raise TemplateError(
            "the chat template writes a thought of its own before the one that the answer's "
            "`content` has: give that as `reasoning_content`"
        )
    packed = remove_whitespace(written)
    at = 0
    for part in _split_answer(answer):
        found_at = packed.find(remove_whitespace(part), at)
        if found_at < 0:
            raise TemplateError(
                "the chat template leaves this out of the answer, or changes it: "
                f"{part.strip()!r:.80}"
            )
        at = found_at + len(remove_whitespace(part))
    for part in filter(None, (find_missing_part(call, packed) for call in answer.tool_calls)):
        raise TemplateError(
            "the chat template leaves this out of the answer's `tool_calls`, or changes "
            f"it: {part!r:.80}"
        )


def _split_answer(answer: Message) -> list[str]:
    return [answer.reasoning_content, *_THOUGHT_TAGS.split(answer.content)]
