"""`guess`: find a number, told `higher` or `lower`; what a win pays is noisy on purpose."""

from __future__ import annotations

import random

from r3async.envs.base import Action, Message, StepResult


class Guess:
    """A secret in `1..highest`; `turns` guesses, by default just enough for bisection.

    Reward, given with the last answer: `(1 - noise) * found + noise * u`, with `found` 1 if the secret was guessed and 0 if
    not, and `u` uniform in `0..1`, drawn from the task and the answers given: in `0..1`, and equal for equal play. The noise is
    there to be learned through: bisection earns `1 - noise / 2` on average, and exactly 1 only with `noise = 0`.
    """

    def __init__(self, highest: int = 16, turns: int | None = None, noise: float = 0.2):
        if highest < 2:
            raise ValueError(f"highest must be at least 2, got {highest}")
        if turns is not None and turns < 1:
            raise ValueError(f"turns must be at least 1, got {turns}")
        if not 0 <= noise <= 1:
            raise ValueError(f"noise must be in 0..1, got {noise}")
        self.highest, self.noise = highest, noise
        self.turns = turns or highest.bit_length()
        self._seed = self._secret = 0
        self._answers: list[str] = []
        self._low, self._high = 1, highest

    async def reset(self, task_seed: int) -> list[Message]:
        self._seed, self._secret = task_seed, random.Random(task_seed).randint(1, self.highest)
        self._answers, self._low, self._high = [], 1, self.highest
        return [Message("user", f"1..{self.highest}?")]

    def oracle(self) -> str:
        """The middle of what is left, as bisection guesses; it does not look at the secret."""
        return str((self._low + self._high) // 2)

    def random_answer(self, chance: random.Random) -> str:
        return str(chance.randint(1, self.highest))

    async def step(self, action: Action) -> StepResult:
        self._answers.append(action.text)
        text = action.text.strip()
        # A number of more digits than the highest one is no guess, and `int` of a very long one would be slow.
        valid = text.isascii() and text.isdigit() and len(text) <= len(str(self.highest))
        guess = int(text) if valid else None
        found = guess == self._secret
        if found or len(self._answers) == self.turns:
            drawn = random.Random(f"{self._seed} {self._answers}").random()
            return StepResult((1 - self.noise) * found + self.noise * drawn, done=True)
        if guess is None:
            return StepResult(0.0, [Message("user", "a number")])
        if guess < self._secret:
            self._low = max(self._low, guess + 1)
            return StepResult(0.0, [Message("user", "higher")])
        self._high = min(self._high, guess - 1)
        return StepResult(0.0, [Message("user", "lower")])
