"""`reverse-text`: each turn the user sends random letters, and the policy answers with them reversed."""

from __future__ import annotations

import random
import string

from r3async.envs.base import Action, Message, StepResult


def reversal_reward(answer: Action, letters: str) -> float:
    """Fraction of right positions, the end of the answer included: in `0..1`.

    Position `i < len(letters)` is right if the answer's character there is; the end is right if the policy itself
    stopped after exactly `len(letters)` characters. Dense (a half-right answer earns half) and exactly scored.
    """
    want = letters[::-1]
    right = sum(a == b for a, b in zip(answer.text, want, strict=False))
    ended = answer.stop_reason == "stop" and len(answer.text) == len(want)
    return (right + ended) / (len(want) + 1)


class ReverseText:
    """`letters` random lower-case letters a turn, for `turns` turns. Each turn earns its share of at most 1 in all."""

    def __init__(self, letters: int = 4, turns: int = 3):
        if letters < 1 or turns < 1:
            raise ValueError(f"letters and turns must be at least 1, got {letters} and {turns}")
        self.letters, self.turns = letters, turns
        self._words: list[str] = []
        self._turn = 0

    async def reset(self, task_seed: int) -> list[Message]:
        chance = random.Random(task_seed)
        self._words = ["".join(chance.choices(string.ascii_lowercase, k=self.letters)) for _ in range(self.turns)]
        self._turn = 0
        return [Message("user", self._words[0])]

    def oracle(self) -> str:
        return self._words[self._turn][::-1]

    async def step(self, action: Action) -> StepResult:
        reward = reversal_reward(action, self._words[self._turn]) / self.turns
        self._turn += 1
        if self._turn == self.turns:
            return StepResult(reward, done=True)
        return StepResult(reward, [Message("user", self._words[self._turn])])
