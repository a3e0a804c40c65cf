"""Arithmetic that a policy wrote: parsed, never evaluated as Python, exact, and bounded in size."""

from __future__ import annotations

import ast
from collections.abc import Callable
from fractions import Fraction

MAX_CHARACTERS = 200
MAX_DIGITS = 12

_OPERATORS: dict[type[ast.operator], Callable[[Fraction, Fraction], Fraction]] = {
    ast.Add: lambda a, b: a + b,
    ast.Sub: lambda a, b: a - b,
    ast.Mult: lambda a, b: a * b,
    ast.Div: lambda a, b: a / b,
}


def evaluate(expression: str) -> tuple[Fraction, list[int]]:
    """The exact value of `expression`, and the whole numbers in it from left to right.

    Allowed are whole numbers of at most 12 digits, `+ - * /`, signs and parentheses, 200 characters in all; there are no
    powers, so a value has no more digits than the expression has characters. Raises `ValueError` with a short reason.
    """
    if len(expression) > MAX_CHARACTERS:
        raise ValueError(f"longer than {MAX_CHARACTERS} characters")
    try:
        tree = ast.parse(expression.strip(), mode="eval")
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise ValueError("not an expression") from error
    numbers: list[int] = []

    def value(node: ast.expr) -> Fraction:
        match node:
            case ast.Constant(value=int(number)) if not isinstance(number, bool):
                if number >= 10**MAX_DIGITS:
                    raise ValueError(f"a number of more than {MAX_DIGITS} digits")
                numbers.append(number)
                return Fraction(number)
            case ast.UnaryOp(op=ast.UAdd() | ast.USub() as sign, operand=inner):
                return value(inner) if isinstance(sign, ast.UAdd) else -value(inner)
            case ast.BinOp(left=left, op=operator, right=right) if type(operator) in _OPERATORS:
                return _OPERATORS[type(operator)](value(left), value(right))
        raise ValueError("only whole numbers, + - * / and parentheses")

    try:
        return value(tree.body), numbers
    except ZeroDivisionError as error:
        raise ValueError("division by zero") from error


def written(value: Fraction) -> str:
    """`7`, or `7/2` where it is not whole."""
    return str(value)
