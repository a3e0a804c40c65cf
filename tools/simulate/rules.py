"""A rule: what must hold of the next event, given what is known. Pure."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from r3async.tools.simulate.history import Event
from r3async.tools.simulate.known import Known


class Violated(Exception):
    """An invariant does not hold. `name`: of the rule; `reason`: for a person."""

    def __init__(self, name: str, reason: str):
        super().__init__(f"{name}: {reason}")
        self.name, self.reason = name, reason


Judge = Callable[[Known, Any], str]
"""What is wrong with an event that is about to be applied; "" if nothing is."""


class Rule(NamedTuple):
    name: str
    events: tuple[type[Event], ...]
    judge: Judge


def rule(rules: list[Rule], name: str, *events: type[Event]) -> Callable[[Judge], Judge]:
    """Add to `rules` one that judges these events."""

    def add(judge: Judge) -> Judge:
        rules.append(Rule(name, events, judge))
        return judge

    return add
