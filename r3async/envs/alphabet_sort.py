"""`alphabet-sort`: letters arrive turn by turn; each answer is all letters so far, sorted."""

from __future__ import annotations

import random
import string

from r3async.envs.base import Action, Message, StepResult
from r3async.envs.reverse_text import position_reward


class AlphabetSort:
    """`letters` letters in the first turn and `more` in each later one, all different; the answer is *all* of them in order.

    So the second turn can only be answered by who remembers the first. Reward of a turn: the fraction of right positions,
    the end of the answer included (`position_reward`), over `turns`: at most 1 in all.
    """

    def __init__(self, letters: int = 4, more: int = 1, turns: int = 2):
        if letters < 1 or more < 1 or turns < 1:
            raise ValueError(f"letters, more and turns must be at least 1, got {letters}, {more} and {turns}")
        if letters + more * (turns - 1) > len(string.ascii_lowercase):
            raise ValueError("letters + more * (turns - 1) must be at most 26: no letter comes twice")
        self.letters, self.more, self.turns = letters, more, turns
        self._given: list[str] = []
        self._turn = 0

    async def reset(self, task_seed: int) -> list[Message]:
        total = self.letters + self.more * (self.turns - 1)
        drawn = "".join(random.Random(task_seed).sample(string.ascii_lowercase, total))
        ends = [self.letters + self.more * turn for turn in range(self.turns)]
        self._given = [drawn[start:end] for start, end in zip([0, *ends], ends, strict=False)]
        self._turn = 0
        return [Message("user", self._given[0])]

    def oracle(self) -> str:
        return "".join(sorted("".join(self._given[: self._turn + 1])))

    def random_answer(self, chance: random.Random) -> str:
        """The right letters in any order."""
        letters = list(self.oracle())
        chance.shuffle(letters)
        return "".join(letters)

    async def step(self, action: Action) -> StepResult:
        reward = position_reward(action, self.oracle()) / self.turns
        self._turn += 1
        if self._turn == self.turns:
            return StepResult(reward, done=True)
        return StepResult(reward, [Message("user", self._given[self._turn])])
