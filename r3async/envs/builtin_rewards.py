"""The built-in rewards for an answer, beside the answer of its row."""

from __future__ import annotations

import math
import re
from collections.abc import Callable

_NUMBER_PATTERN = re.compile(r"-?(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?|-?\.\d+")


def reward_exact(completion: str, answer: str) -> float:
    """Return 1 if the completion is `answer`, ignoring white space around both, else 0."""
    return float(completion.strip() == answer.strip())


def reward_contains(completion: str, answer: str) -> float:
    """Return 1 if the completion contains `answer`, else 0."""
    return float(answer.strip() in completion)


def reward_number(completion: str, answer: str) -> float:
    r"""Return 1 if both texts say the same number, to one part in a million, else 0. The
    number of a text is the one in its last `\boxed{}`, else the one after its last `####`,
    else its last number."""
    said = find_last_number(completion)
    wanted = find_last_number(answer)
    return float(
        said is not None
        and wanted is not None
        and math.isclose(said, wanted, rel_tol=1e-6, abs_tol=1e-9)
    )


def find_last_number(text: str) -> float | None:
    """Return the number that a text says (see `reward_number`), or None if there is none. Commas
    between thousands are ignored."""
    for mark in (r"\boxed{", "####"):
        _, there, after = text.rpartition(mark)
        if there:
            found = _NUMBER_PATTERN.search(after.partition("}")[0] if mark != "####" else after)
            if found:
                return _parse_number(found.group())
    every = _NUMBER_PATTERN.findall(text)
    return _parse_number(every[-1]) if every else None


def _parse_number(text: str) -> float:
    return float(text.replace(",", ""))


def reward_math(completion: str, answer: str) -> float:
    """Return 1 if `math-verify` considers both the same mathematical expression, else 0."""
    from math_verify import parse, verify

    # A reference may be LaTeX without delimiters; answers must have them.
    wanted = parse(answer) or parse(f"${answer}$")
    return float(bool(wanted) and verify(wanted, parse(completion)))


BUILTIN_REWARDS: dict[str, Callable[[str, str], float]] = {
    "exact": reward_exact,
    "contains": reward_contains,
    "number": reward_number,
    "math": reward_math,
}
BLOCKING_REWARDS = ("math",)
"""Built-in rewards that are slow."""
