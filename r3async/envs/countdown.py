"""`countdown`: reach a target from a few numbers with + - * /."""

from __future__ import annotations

import random
from collections import Counter

from r3async.envs.arithmetic import evaluate
from r3async.envs.base import Action, Message, StepResult

FORMAT_REWARD = 0.1


class Countdown:
    """`count` numbers in `1..highest` and a target, as `3 5 7=22`; one answer, an expression such as `3*5+7`.

    Reward: 1 if the expression is worth the target and uses each given number at most once (as often as it is given) and no
    other; 0.1 if it uses the numbers so but misses the target; else 0. Every task has a solution that uses all numbers.
    """

    def __init__(self, count: int = 3, highest: int = 9):
        if count < 2 or highest < 2:
            raise ValueError(f"count and highest must be at least 2, got {count} and {highest}")
        if count > 16 or highest > 999:
            raise ValueError(f"count must be at most 16 and highest at most 999, got {count} and {highest}")
        self.count, self.highest = count, highest
        self._numbers: list[int] = []
        self._target = 0
        self._solution = ""

    async def reset(self, task_seed: int) -> list[Message]:
        chance = random.Random(task_seed)
        self._numbers = [chance.randint(1, self.highest) for _ in range(self.count)]
        while True:
            expression = _expression(self._numbers, chance)
            try:
                value = evaluate(expression)[0]
            except ValueError:  # division by zero
                continue
            if value.denominator == 1 and 0 < value < 1000 * self.highest:
                break
        self._target, self._solution = int(value), expression
        return [Message("user", f"{' '.join(map(str, self._numbers))}={self._target}")]

    def oracle(self) -> str:
        return self._solution

    def random_answer(self, chance: random.Random) -> str:
        """All numbers in any order, with any operators between them."""
        return _expression(self._numbers, chance)

    async def step(self, action: Action) -> StepResult:
        return StepResult(self._reward(action.text), done=True)

    def _reward(self, expression: str) -> float:
        try:
            value, used = evaluate(expression)
        except ValueError:
            return 0.0
        if Counter(used) - Counter(self._numbers):
            return 0.0
        return 1.0 if value == self._target else FORMAT_REWARD


def _expression(numbers: list[int], chance: random.Random) -> str:
    """The numbers in random order, joined by random operators from the left."""
    first, *others = chance.sample(numbers, len(numbers))
    text, sums = str(first), False
    for number in others:
        operator = chance.choice("+-*/")
        if operator in "*/" and sums:
            text = f"({text})"
        sums = operator in "+-"
        text += f"{operator}{number}"
    return text
