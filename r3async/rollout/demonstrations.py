"""Given answers as rows of supervised training: the tokens that a policy would have to sample for them, in the prompts that it
would be given."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from r3async.data.records import Sample, TokenTable
from r3async.envs import Message
from r3async.rollout.chat import ChatRenderer, Conversation


@dataclass
class Demonstration:
    """One conversation. `rows`: token ids, and which of them are answers. A prompt that does not begin with the row before (its
    history was rewritten) begins a new row, whose earlier answers are not learnt again."""

    rows: list[tuple[list[int], list[bool]]] = field(default_factory=lambda: [([], [])])

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
    """A conversation that is known whole, each answer of the assistant after the prompt that an episode would have. Raises
    `TemplateError`."""
    demonstration = Demonstration()
    ends = [i for i, m in enumerate(messages) if m.role == "assistant"]
    conversation, begin = Conversation(renderer, messages[: ends[0]], tools), ends[0]
    for end in ends:
        if end != begin:
            conversation.observe(messages[begin + 1 : end])
            begin = end
        prompt = conversation.prompt().token_ids.tolist()
        answer = [*renderer.encode(messages[end].content), renderer.end_id]
        demonstration.turn(prompt, answer)
        conversation.answered(answer)
    return demonstration
