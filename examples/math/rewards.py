"""The second reward of the recipe. The first is the built-in `number`: 1 if the last number is the row's."""

import re

FORM = re.compile(r"#### -?[\d,.]+\s*$")


def ends_as_asked(completion: str) -> float:
    """1 for an answer that ends with `#### NUMBER`, as the system message asks."""
    return float(FORM.search(completion) is not None)
