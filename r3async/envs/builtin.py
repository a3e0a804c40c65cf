"""Built-in tasks: one class for each built-in name of `env.name`
(`factory.BUILTIN_ENVIRONMENTS`)."""

from __future__ import annotations

import ast
import json
import random
import string
from collections import Counter
from collections.abc import Callable
from fractions import Fraction
from typing import Any

from r3async.envs import Action, Message, StepResult
from r3async.untrusted import MalformedError, decode_json

MAX_EXPRESSION_CHARACTERS = 200
MAX_DIGITS = 12
FORMAT_REWARD = 0.1
CALCULATOR_TOOL = "calculate"


def score_positions(answer: Action, expected: str) -> float:
    """Return the fraction of right positions, the end of the answer included: in `0..1`.

    Position `i < len(expected)` is right if the answer's character there is; the end is right if
    the policy itself stopped after exactly `len(expected)` characters. The score is dense (a
    half-right answer earns half) and exact.
    """
    right = sum(a == b for a, b in zip(answer.text, expected, strict=False))
    ended = answer.stop_reason == "stop" and len(answer.text) == len(expected)
    return (right + ended) / (len(expected) + 1)


class _SpellingTask:
    """Base class of tasks that show letters in each turn and ask for an answer made from them.

    The reward of a turn is the fraction of right positions, the end of the answer included
    (`score_positions`), divided by `turns`: at most 1 in all.
    """

    def __init__(self, turns: int):
        self.turns = turns
        self._turn_letters: list[str] = []
        self._turn = 0

    def _start_episode(self, turn_letters: list[str]) -> list[Message]:
        self._turn_letters = turn_letters
        self._turn = 0
        return [Message("user", turn_letters[0])]

    def oracle(self) -> str:
        raise NotImplementedError

    async def step(self, action: Action) -> StepResult:
        reward = score_positions(action, self.oracle()) / self.turns
        self._turn += 1
        if self._turn == self.turns:
            return StepResult(reward, done=True)
        return StepResult(reward, [Message("user", self._turn_letters[self._turn])])


class ReverseText(_SpellingTask):
    """The task `reverse-text`: each of `turns` turns shows `letters` random lower-case letters; the
    answer is these letters reversed."""

    def __init__(self, letters: int = 4, turns: int = 3):
        if letters < 1 or turns < 1:
            raise ValueError(f"letters and turns must be at least 1, got {letters} and {turns}")
        super().__init__(turns)
        self.letters = letters

    async def reset(self, task_seed: int) -> list[Message]:
        rng = random.Random(task_seed)
        return self._start_episode(
            [
                "".join(rng.choices(string.ascii_lowercase, k=self.letters))
                for _ in range(self.turns)
            ]
        )

    def oracle(self) -> str:
        return self._turn_letters[self._turn][::-1]

    def random_answer(self, rng: random.Random) -> str:
        """Return random letters, as many as the task shows."""
        return "".join(rng.choices(string.ascii_lowercase, k=self.letters))


class AlphabetSort(_SpellingTask):
    """The task `alphabet-sort`: sort *all* letters shown so far.

    The first turn shows `letters` letters and each later one `more`, all different. Thus only a
    policy that remembers the first turn can answer the second.
    """

    def __init__(self, letters: int = 4, more: int = 1, turns: int = 2):
        if letters < 1 or more < 1 or turns < 1:
            raise ValueError(
                f"letters, more and turns must be at least 1, got {letters}, {more} and {turns}"
            )
        if letters + more * (turns - 1) > len(string.ascii_lowercase):
            raise ValueError(
                "letters + more * (turns - 1) must be at most 26: no letter comes twice"
            )
        super().__init__(turns)
        self.letters = letters
        self.more = more

    async def reset(self, task_seed: int) -> list[Message]:
        total = self.letters + self.more * (self.turns - 1)
        drawn = "".join(random.Random(task_seed).sample(string.ascii_lowercase, total))
        ends = [self.letters + self.more * turn for turn in range(self.turns)]
        return self._start_episode(
            [drawn[start:end] for start, end in zip([0, *ends], ends, strict=False)]
        )

    def oracle(self) -> str:
        return "".join(sorted("".join(self._turn_letters[: self._turn + 1])))

    def random_answer(self, rng: random.Random) -> str:
        """Return the right letters in random order."""
        letters = list(self.oracle())
        rng.shuffle(letters)
        return "".join(letters)


class GuessNumber:
    """The task `guess`: find a secret number in `1..highest` from the replies `higher` and `lower`,
    in at most `turns` guesses, by default just enough for bisection.

    The reward comes with the last answer: `(1 - noise) * found + noise * u`, where `found` is 1 if
    the secret was guessed and else 0, and `u` is uniform in `0..1`, drawn from the task and the
    answers given. It is in `0..1`, and equal for equal play. The policy has to learn in spite of
    the noise: bisection earns `1 - noise / 2` on average, and exactly 1 only with `noise = 0`.
    """

    def __init__(self, highest: int = 16, turns: int | None = None, noise: float = 0.2):
        if highest < 2:
            raise ValueError(f"highest must be at least 2, got {highest}")
        if turns is not None and turns < 1:
            raise ValueError(f"turns must be at least 1, got {turns}")
        if not 0 <= noise <= 1:
            raise ValueError(f"noise must be in 0..1, got {noise}")
        self.highest = highest
        self.noise = noise
        self.turns = turns or highest.bit_length()
        self._seed = self._secret = 0
        self._answers: list[str] = []
        self._low = 1
        self._high = highest

    async def reset(self, task_seed: int) -> list[Message]:
        self._secret = random.Random(task_seed).randint(1, self.highest)
        self._seed = task_seed
        self._answers = []
        self._low = 1
        self._high = self.highest
        return [Message("user", f"1..{self.highest}?")]

    def oracle(self) -> str:
        """Return the middle of the remaining range, as bisection guesses; the
        secret is not used."""
        return str((self._low + self._high) // 2)

    def random_answer(self, rng: random.Random) -> str:
        return str(rng.randint(1, self.highest))

    async def step(self, action: Action) -> StepResult:
        self._answers.append(action.text)
        text = action.text.strip()
        # A number of more digits than the highest one is no guess, and `int` of a very long
        # one would be slow.
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


_OPERATORS: dict[type[ast.operator], Callable[[Fraction, Fraction], Fraction]] = {
    ast.Add: lambda a, b: a + b,
    ast.Sub: lambda a, b: a - b,
    ast.Mult: lambda a, b: a * b,
    ast.Div: lambda a, b: a / b,
}


def evaluate_expression(expression: str) -> tuple[Fraction, list[int]]:
    """Return the exact value of `expression`, and the whole numbers in it from left to right.

    Allowed are whole numbers of at most 12 digits, `+ - * /`, signs and parentheses, 200 characters
    in all; there are no powers, so a value has no more digits than the expression has characters.
    Raises `ValueError` with a short reason.
    """
    if len(expression) > MAX_EXPRESSION_CHARACTERS:
        raise ValueError(f"longer than {MAX_EXPRESSION_CHARACTERS} characters")
    try:
        tree = ast.parse(expression.strip(), mode="eval")
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise ValueError("not an expression") from error
    numbers: list[int] = []

    def evaluate_node(node: ast.expr) -> Fraction:
        match node:
            case ast.Constant(value=int(number)) if not isinstance(number, bool):
                if number >= 10**MAX_DIGITS:
                    raise ValueError(f"a number of more than {MAX_DIGITS} digits")
                numbers.append(number)
                return Fraction(number)
            case ast.UnaryOp(op=ast.UAdd() | ast.USub() as sign, operand=inner):
                return evaluate_node(inner) if isinstance(sign, ast.UAdd) else -evaluate_node(inner)
            case ast.BinOp(left=left, op=operator, right=right) if type(operator) in _OPERATORS:
                return _OPERATORS[type(operator)](evaluate_node(left), evaluate_node(right))
        raise ValueError("only whole numbers, + - * / and parentheses")

    try:
        return evaluate_node(tree.body), numbers
    except ZeroDivisionError as error:
        raise ValueError("division by zero") from error


class Countdown:
    """The task `countdown`: combine `count` numbers in `1..highest` to reach a target.

    The prompt looks like `3 5 7=22`; the one answer is an expression such as `3*5+7`.

    The reward is 1 if the value of the expression is the target and it uses each given number at
    most once (as often as it is given) and no other number; 0.1 if it uses the numbers correctly
    but misses the target; else 0. Every task has a solution that uses all numbers.
    """

    def __init__(self, count: int = 3, highest: int = 9):
        if count < 2 or highest < 2:
            raise ValueError(f"count and highest must be at least 2, got {count} and {highest}")
        if count > 16 or highest > 999:
            raise ValueError(
                f"count must be at most 16 and highest at most 999, got {count} and {highest}"
            )
        self.count = count
        self.highest = highest
        self._numbers: list[int] = []
        self._target = 0
        self._solution = ""

    async def reset(self, task_seed: int) -> list[Message]:
        rng = random.Random(task_seed)
        self._numbers = [rng.randint(1, self.highest) for _ in range(self.count)]
        while True:
            expression = _random_expression(self._numbers, rng)
            try:
                value = evaluate_expression(expression)[0]
            except ValueError:  # division by zero
                continue
            if value.denominator == 1 and 0 < value < 1000 * self.highest:
                break
        self._target = int(value)
        self._solution = expression
        return [Message("user", f"{' '.join(map(str, self._numbers))}={self._target}")]

    def oracle(self) -> str:
        return self._solution

    def random_answer(self, rng: random.Random) -> str:
        """Return an expression of all numbers in random order, with random
        operators between them."""
        return _random_expression(self._numbers, rng)

    async def step(self, action: Action) -> StepResult:
        return StepResult(self._score_expression(action.text), done=True)

    def _score_expression(self, expression: str) -> float:
        try:
            value, used = evaluate_expression(expression)
        except ValueError:
            return 0.0
        if Counter(used) - Counter(self._numbers):
            return 0.0
        return 1.0 if value == self._target else FORMAT_REWARD


def _random_expression(numbers: list[int], rng: random.Random) -> str:
    """Return the numbers in random order, joined from the left by random operators."""
    first, *others = rng.sample(numbers, len(numbers))
    text = str(first)
    sums = False
    for number in others:
        operator = rng.choice("+-*/")
        if operator in "*/" and sums:
            text = f"({text})"
        sums = operator in "+-"
        text += f"{operator}{number}"
    return text


class ToolCalculator:
    """The task `tool-calculator`: evaluate an expression of `terms` numbers in `1..highest`. Each
    answer is one JSON object and nothing else, and there are at most `turns` answers:

    * `{"tool": "calculate", "args": {"expression": "3*4"}}` is answered by a message with
      the role `tool`.
    * `{"answer": 12}` ends the episode.

    The reward comes with the last answer: 1 if the final answer is right, less `cost` for every
    earlier answer that was not a valid call (each is answered by an error message), and at least 0.
    A wrong or missing final answer earns 0. The reward is in `0..1`.
    """

    def __init__(self, terms: int = 3, highest: int = 99, turns: int = 4, cost: float = 0.1):
        if terms < 2 or highest < 1 or turns < 1:
            raise ValueError(
                f"terms must be at least 2, highest and turns at least 1, got {terms}, "
                f"{highest} and {turns}"
            )
        if terms > 16 or highest > 9999:
            raise ValueError(
                f"terms must be at most 16 and highest at most 9999, got {terms} and {highest}"
            )
        if not 0 <= cost <= 1:
            raise ValueError(f"cost must be in 0..1, got {cost}")
        self.terms = terms
        self.highest = highest
        self.turns = turns
        self.cost = cost
        self._expression = ""
        self._result = 0
        self._turn = self._errors = 0
        self._tool_result: str | None = None

    async def reset(self, task_seed: int) -> list[Message]:
        rng = random.Random(task_seed)
        numbers = [str(rng.randint(1, self.highest)) for _ in range(self.terms)]
        self._expression = numbers[0] + "".join(
            rng.choice("+-*") + number for number in numbers[1:]
        )
        self._result = int(evaluate_expression(self._expression)[0])
        self._turn = self._errors = 0
        self._tool_result = None
        return [Message("user", self._expression)]

    def oracle(self) -> str:
        """Return a call of the calculator, then an answer with its result. With only one turn,
        return the answer at once."""
        if self._tool_result is None and self._turn + 1 < self.turns:
            return json.dumps({"tool": CALCULATOR_TOOL, "args": {"expression": self._expression}})
        return json.dumps({"answer": self._result})

    def random_answer(self, rng: random.Random) -> str:
        """Return a call or a final answer with a random number."""
        number = rng.randint(-self.highest, self.highest**2)
        call = {"tool": CALCULATOR_TOOL, "args": {"expression": str(number)}}
        return json.dumps(rng.choice([call, {"answer": number}]))

    async def step(self, action: Action) -> StepResult:
        self._turn += 1
        try:
            result = self._handle_call(action.text)
        except ValueError as error:
            self._errors += 1
            result = f"error: {error}"
        if isinstance(result, int):
            right = result == self._result
            return StepResult(max(0.0, 1 - self.cost * self._errors) if right else 0.0, done=True)
        if self._turn == self.turns:
            return StepResult(0.0, done=True)
        return StepResult(0.0, [Message("tool", result, name=CALCULATOR_TOOL)])

    def _handle_call(self, text: str) -> str | int:
        """Return the calculator's result, or the final answer as an int. Raises `ValueError` that
        tells the policy what is wrong."""
        try:
            call: Any = decode_json(text)
        except MalformedError:
            call = None
        match call:
            case {"answer": int(number), **rest} if not rest and not isinstance(number, bool):
                return number
            case {"tool": str(tool)} if tool != CALCULATOR_TOOL:
                raise ValueError(f"no such tool, there is {CALCULATOR_TOOL}")
            case {"tool": str(), "args": {"expression": str(expression), **more}, **rest} if (
                not more and not rest
            ):
                self._tool_result = str(evaluate_expression(expression)[0])
                return self._tool_result
            case None:
                raise ValueError("not JSON")
        raise ValueError("not a call")
