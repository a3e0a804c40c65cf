"""`tool-calculator`: a sum to work out with a calculator that is called in JSON."""

from __future__ import annotations

import json
import random
from typing import Any

from r3async.envs.arithmetic import evaluate, written
from r3async.envs.base import Action, Message, StepResult

TOOL = "calculate"


class ToolCalculator:
    """An expression of `terms` numbers in `1..highest`. Each answer is one JSON object, and nothing else:

    `{"tool": "calculate", "args": {"expression": "3*4"}}` is answered by a message with role `tool`;
    `{"answer": 12}` ends the episode. At most `turns` answers.

    Reward, given with the last answer: 1 if the final answer is right, less `cost` for every earlier answer that was no valid
    call (which is told what is wrong), and at least 0. A wrong or missing final answer earns 0. In `0..1`.
    """

    def __init__(self, terms: int = 3, highest: int = 99, turns: int = 4, cost: float = 0.1):
        if terms < 2 or highest < 1 or turns < 1:
            raise ValueError(
                f"terms must be at least 2, highest and turns at least 1, got {terms}, {highest} and {turns}"
            )
        if terms > 16 or highest > 9999:
            raise ValueError(f"terms must be at most 16 and highest at most 9999, got {terms} and {highest}")
        if not 0 <= cost <= 1:
            raise ValueError(f"cost must be in 0..1, got {cost}")
        self.terms, self.highest, self.turns, self.cost = terms, highest, turns, cost
        self._expression, self._result = "", 0
        self._turn = self._errors = 0
        self._known: str | None = None

    async def reset(self, task_seed: int) -> list[Message]:
        chance = random.Random(task_seed)
        numbers = [str(chance.randint(1, self.highest)) for _ in range(self.terms)]
        self._expression = numbers[0] + "".join(chance.choice("+-*") + number for number in numbers[1:])
        self._result = int(evaluate(self._expression)[0])
        self._turn = self._errors = 0
        self._known = None
        return [Message("user", self._expression)]

    def oracle(self) -> str:
        """Calls the calculator, and then repeats what it said. With one turn only, it has to know."""
        if self._known is None and self._turn + 1 < self.turns:
            return json.dumps({"tool": TOOL, "args": {"expression": self._expression}})
        return json.dumps({"answer": self._result})

    def random_answer(self, chance: random.Random) -> str:
        """A call or a final answer, with a random number."""
        number = chance.randint(-self.highest, self.highest**2)
        call = {"tool": TOOL, "args": {"expression": str(number)}}
        return json.dumps(chance.choice([call, {"answer": number}]))

    async def step(self, action: Action) -> StepResult:
        self._turn += 1
        try:
            said = self._call(action.text)
        except ValueError as error:
            self._errors += 1
            said = f"error: {error}"
        if isinstance(said, int):
            right = said == self._result
            return StepResult(max(0.0, 1 - self.cost * self._errors) if right else 0.0, done=True)
        if self._turn == self.turns:
            return StepResult(0.0, done=True)
        return StepResult(0.0, [Message("tool", said, name=TOOL)])

    def _call(self, text: str) -> str | int:
        """What the calculator says, or the final answer. Raises `ValueError` with what is wrong, for the policy to read."""
        try:
            said: Any = json.loads(text)
        except (ValueError, RecursionError):
            said = None
        match said:
            case {"answer": int(number), **rest} if not rest and not isinstance(number, bool):
                return number
            case {"tool": str(tool)} if tool != TOOL:
                raise ValueError(f"no such tool, there is {TOOL}")
            case {"tool": str(), "args": {"expression": str(expression), **more}, **rest} if not more and not rest:
                self._known = written(evaluate(expression)[0])
                return self._known
            case None:
                raise ValueError("not JSON")
        raise ValueError("not a call")
