"""Invariants of evaluations; see `invariants`. Pure."""

from __future__ import annotations

from r3async.tools.simulate.history import Evaluated, Evaluating, Finished
from r3async.tools.simulate.known import Known
from r3async.tools.simulate.rules import Rule, rule

EVALUATIONS: list[Rule] = []


@rule(EVALUATIONS, "evaluation", Evaluating)
def one_evaluation_at_a_time(known: Known, event: Evaluating) -> str:
    """An evaluation is begun of a step that was made, and when the one before is over."""
    if known.evaluating is not None:
        return f"the evaluation of step {event.step} is begun, and that of step {known.evaluating} is not over"
    if event.step > (made := len(known.branch.steps)):
        return f"the evaluation of step {event.step} is begun, and {made} were made"
    return ""


@rule(EVALUATIONS, "evaluation", Evaluated)
def evaluated_by_the_weights_of_its_step(known: Known, event: Evaluated) -> str:
    """What an evaluation says of a step was sampled by the weights of that step, or by newer ones that were installed meanwhile.
    It poses as many tasks as it is to, the same each time, and none that is trained."""
    made = known.branch.made
    least = max(version for version, steps in made.items() if steps <= event.step)
    if event.oldest < least or event.newest > known.newest:
        return (
            f"the evaluation of step {event.step}, whose weights are version {least}, was sampled by versions {event.oldest} to "
            f"{event.newest}"
        )
    if len(set(event.tasks)) != known.rules.evaluated_tasks or event.tasks != (known.evaluated_tasks or event.tasks):
        return f"the evaluation of step {event.step} poses tasks {event.tasks}, and there was {known.evaluated_tasks}"
    trained = {f.task for playings in known.sent.values() for f in playings.values()}
    if both := trained & set(event.tasks):
        return f"tasks {sorted(both)} are evaluated and trained"
    return ""


@rule(EVALUATIONS, "evaluation", Finished)
def each_step_that_is_due_is_evaluated_once(known: Known, event: Finished) -> str:
    """When the run has ended, its record has each evaluation once, in order. None is missing that was due: not for a stop, nor
    for the end of any process. (A resume begins the last one that was due, if it is missing, at the step from which it
    resumes.) There is none only of a step, but the last, at which the one before was still played; where the generator gave it
    up; or where a disk failed."""
    rules, had = known.rules, event.evaluated
    if event.failed or not rules.evaluate_every:
        return ""
    if list(had) != sorted(set(had)):
        return f"the record has evaluations of steps {list(had)}"
    if known.spoiled:
        return ""
    due = [*range(0 if rules.evaluate_first else rules.evaluate_every, event.steps, rules.evaluate_every), event.steps]
    for step, following in zip(due, [*due[1:], event.steps + 1], strict=True):
        excused = step in known.given_up or (step in known.skipped and step < event.steps)
        if not excused and not any(step <= one < following for one in had):
            return f"the evaluation of step {step} is missing: there are those of steps {list(had)}"
    return ""
