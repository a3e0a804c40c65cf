"""`reverse-text`: each turn the user sends random letters, and the policy answers with them reversed."""

from __future__ import annotations

import random
import string

from r3async.envs.base import Action, Message, StepResult


def position_reward(answer: Action, want: str) -> float:
    """Fraction of right positions, the end of the answer included: in `0..1`.

    Position `i < len(want)` is right if the answer's character there is; the end is right if the policy itself
    stopped after exactly `len(want)` characters. Dense (a half-right answer earns half) and exactly scored.
    """
    right = sum(a == b for a, b in zip(answer.text, want, strict=False))
    ended = answer.stop_reason == "stop" and len(answer.text) == len(want)
    return (right + ended) / (len(want) + 1)


class ReverseText:
    """`letters` random lower-case letters a turn, for `turns` turns.

    Reward of a turn: the fraction of right positions of the reversed letters, the end of the answer included
    (`position_reward`), over `turns`: at most 1 in all.
    """

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

    def random_answer(self, chance: random.Random) -> str:
        """Random letters, as many as were asked for."""
        return "".join(chance.choices(string.ascii_lowercase, k=self.letters))

    async def step(self, action: Action) -> StepResult:
        reward = position_reward(action, self.oracle()) / self.turns
        self._turn += 1
        if self._turn == self.turns:
            return StepResult(reward, done=True)
        return StepResult(reward, [Message("user", self._words[self._turn])])
