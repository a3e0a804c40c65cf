"""What must hold of a run whatever happens to it, checked at every event. Pure.

A **branch** is a lineage with the steps that it has behind it (`branches`). An episode is **here** in a lineage if the
learner has acknowledged it, or if the spool kept it from before. A checkpoint is **safe** when it has its name and its
directory is synced. Each rule's docstring (`rules_*.py`) says what it means across
crashes, resumes and lineages; `RULES` has them all, by name."""

from __future__ import annotations

from r3async.tools.simulate.history import Event
from r3async.tools.simulate.known import Known, Rules
from r3async.tools.simulate.rules import Rule, Violated
from r3async.tools.simulate.rules_delivery import DELIVERY
from r3async.tools.simulate.rules_evaluations import EVALUATIONS
from r3async.tools.simulate.rules_training import TRAINING
from r3async.tools.simulate.rules_weights import WEIGHTS

__all__ = ["RULES", "Checker", "Rules", "Violated"]

RULES = [*TRAINING, *DELIVERY, *WEIGHTS, *EVALUATIONS]


class Checker:
    """Judges one event after the other. `seen`: how many."""

    def __init__(self, rules: Rules):
        self.known = Known(rules)
        self.seen = 0
        self._judges: dict[type[Event], list[Rule]] = {}
        for each in RULES:
            for kind in each.events:
                self._judges.setdefault(kind, []).append(each)

    def see(self, event: Event) -> None:
        """Raises `Violated` at the first event that must not be."""
        self.seen += 1
        known = self.known
        if event.at > known.deadline:
            made = len(known.branch.steps) if known.branches else 0
            raise Violated(
                "stuck",
                f"the step after step {made} had to be made by {known.deadline:.1f} s, and it is {event.at:.1f} s",
            )
        for each in self._judges.get(type(event), ()):
            if reason := each.judge(known, event):
                raise Violated(each.name, reason)
        known.apply(event)
