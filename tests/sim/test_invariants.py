"""The checker of simulated runs: it passes what is right, and names what is not at the first event that shows it."""

from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import pytest

from dev.simulation.history import (
    CheckpointSaved,
    EvaluationBegan,
    EvaluationEnded,
    EvaluationRemoved,
    FaultsOver,
    GaveUp,
    GroupsLeased,
    GroupsLimited,
    InstallRequested,
    LineageBegan,
    MissingReported,
    ParentAssigned,
    ParentRequested,
    PlayRequested,
    PowerFailed,
    ProcessEnded,
    PublishedRemoved,
    RunEvent,
    RunFinished,
    SlotsReported,
    SpoolFileGrew,
    SpoolFileRemoved,
    StepBegan,
    StepTrained,
    TimePassed,
    TrajectoriesAcknowledged,
    TrajectoriesDelivered,
    TrajectoryRefused,
    TrajectorySent,
    VersionArrived,
    VersionFetched,
    VersionRemoved,
    WeightsInstalled,
    WeightsPublished,
)
from dev.simulation.invariants import RULES as ALL
from dev.simulation.invariants import (
    InvariantChecker,
    InvariantViolated,
    RunGuarantees,
    each_step_that_is_due_is_evaluated_once,
    groups_are_replaced_for_want_of_contrast,
    results_of_lost_weights_are_gone,
)
from dev.simulation.observed_state import LineageBranch, leads_to, same_weights
from r3async.data.tokens import format_trajectory_id
from tests.sim.histories import RULES, Writer, good, pair, playing


def see(events: Sequence[RunEvent], rules: RunGuarantees = RULES) -> InvariantChecker:
    checker = InvariantChecker(rules)
    for event in events:
        checker.check_event(event)
    return checker


def broken(events: Sequence[RunEvent], rules: RunGuarantees = RULES) -> InvariantViolated:
    with pytest.raises(InvariantViolated) as found:
        see(events, rules)
    return found.value


def of(events: Sequence[RunEvent], kind: type[RunEvent], number: int = 0) -> int:
    """Index of the event of that kind; of several, that number of them."""
    return [i for i, event in enumerate(events) if isinstance(event, kind)][number]


def edited(kind: type[RunEvent], number: int = 0, **facts: object) -> list[RunEvent]:
    events = good()
    at = of(events, kind, number)
    return [*events[:at], msgspec.structs.replace(events[at], **facts), *events[at + 1 :]]


def inserted(kind: type[RunEvent], number: int, *new: tuple[Any, ...] | Callable[[float], RunEvent]) -> list[RunEvent]:
    """Before that event, each at its time: the kind of the new one and its facts, or what makes one for a time."""
    events = good()
    at = of(events, kind, number)
    made = [each(events[at].at) if callable(each) else each[0](events[at].at, *each[1:]) for each in new]
    return [*events[:at], *made, *events[at:]]


def test_a_run_that_resumes_and_trains_what_it_kept_keeps_every_invariant():
    checker = see(good())
    assert checker.event_count == len(good())
    assert len(checker.state.current_branch.steps) == 4
    assert checker.state.current_branch.steps[1] is checker.state.branches[1].steps[1]
    assert checker.state.current_branch.steps[2] is not checker.state.branches[1].steps[2]


SPOILED: dict[str, tuple[str, Sequence[RunEvent]]] = {
    "a number is taken twice": ("lineage", edited(LineageBegan, 1, lineage=1)),
    "a parent that never began": ("lineage", edited(LineageBegan, 1, parent=7)),
    "a checkpoint of steps that were not made": ("lineage", edited(LineageBegan, 1, step=4)),
    "a checkpoint with other groups": ("lineage", edited(LineageBegan, 1, consumed=3)),
    "a checkpoint with another version": ("lineage", edited(LineageBegan, 1, version=1)),
    "the learner of an old start trains on": ("lineage", edited(StepBegan, 3, lineage=1)),
    "a step is left out": ("lineage", edited(StepBegan, 1, step=3)),
    "a safe checkpoint is passed over": ("checkpoint", edited(LineageBegan, 1, step=1, version=1, consumed=1)),
    "weights of a checkpoint are other weights": ("checkpoint", edited(WeightsPublished, 3, weights=7)),
    "a group is trained twice": ("twice", edited(StepBegan, 1, groups=(0,))),
    "a group is twice in a step": ("twice", edited(StepBegan, 0, groups=(0, 0))),
    "an episode is missing": ("whole", edited(StepTrained, 0, groups=(pair(0, 1, 0)[:1],))),
    "a step of two groups": ("whole", edited(StepTrained, 0, groups=(pair(0, 1, 0), pair(1, 1, 0)))),
    "too few differ": ("replaced", good()),
    "episodes of a group play two tasks": (
        "task",
        edited(StepTrained, 0, groups=((msgspec.structs.replace(pair(0, 1, 0)[0], task=2), pair(0, 1, 0)[1]),)),
    ),
    "beyond the window": ("window", edited(StepBegan, 0, groups=(2,))),
    "an older one is complete": ("window", edited(StepBegan, 0, groups=(1,))),
    "weights that were taken back": ("weights", edited(StepTrained, 4, groups=(pair(3, 1, 3),))),
    "a lineage that never was": ("weights", edited(StepTrained, 4, groups=(pair(3, 9, 2),))),
    "other log-probs": (
        "weights",
        edited(StepTrained, 0, groups=((msgspec.structs.replace(pair(0, 1, 0)[0], wrong="no"), pair(0, 1, 0)[1]),)),
    ),
    "as nobody sent it": ("content", edited(StepTrained, 0, groups=((playing(0, 0, 1, 0, take=1), pair(0, 1, 0)[1]),))),
    "acknowledged, and never sent": (
        "content",
        inserted(StepBegan, 0, (TrajectoriesAcknowledged, "a", (format_trajectory_id(9, 0),))),
    ),
    "too old": ("age", good()),
    "a version is counted twice": ("version", edited(StepBegan, 1, version=2)),
    "published before it is made": ("version", edited(WeightsPublished, 1, version=2)),
    "published again": ("version", edited(WeightsPublished, 1, version=0)),
    "old weights under a new number": ("version", edited(WeightsPublished, 1, weights=100)),
    "installed from another lineage": ("version", edited(WeightsInstalled, 6, lineage=1)),
    "installed backwards": ("version", inserted(StepBegan, 1, (WeightsInstalled, "a", 1, 0, 100))),
    "installed, not published": ("version", edited(WeightsInstalled, 2, version=9)),
    "other weights installed": ("version", edited(WeightsInstalled, 2, weights=9)),
    "sampled by weights that it had not": ("generator", edited(TrajectorySent, 0, trajectory=playing(0, 0, 1, 1))),
    "named of another lineage": ("generator", edited(TrajectorySent, 0, trajectory=playing(0, 0, 2, 0))),
    "acknowledged and lost": ("lost", edited(MissingReported, 0, missing={2: [1]})),
    "what was kept is played again": ("again", inserted(StepBegan, 3, (GroupsLeased, "a", ((3, (1,)),)))),
    "what is here is played again": ("again", inserted(StepBegan, 0, (GroupsLeased, "a", ((1, (0,)),)))),
    "what was trained is played again": ("again", inserted(StepBegan, 1, (GroupsLeased, "a", ((0, (0,)),)))),
    "two generators have it": ("again", inserted(TrajectorySent, 0, (GroupsLeased, "b", ((0, (1,)),)))),
    "a call of an earlier process is told to ask again": (
        "process",
        inserted(StepBegan, 0, (GroupsLeased, "a", (), False, (), 2, True)),
    ),
    "a slot is freed early": (
        "slots",
        inserted(WeightsPublished, 1, *((GroupsLeased, "a", ((g, (0, 1)),)) for g in (2, 3))),
    ),
    "a group is passed over": ("slots", inserted(StepBegan, 0, (GroupsLeased, "a", ((3, (0, 1)),)))),
    "more slots than there are": ("slots", inserted(StepBegan, 0, (SlotsReported, 4, 3))),
    "something sound is refused": (
        "refused",
        inserted(TrajectoriesAcknowledged, 0, (TrajectoryRefused, "a", format_trajectory_id(0, 0), "no")),
    ),
    "removed before a checkpoint": ("store", inserted(CheckpointSaved, 0, (SpoolFileRemoved, 1, "1-1"))),
    "what is refused is in no quarantine": (
        "quarantine",
        inserted(StepBegan, 0, (SpoolFileGrew, 7, "7-1", 100), (SpoolFileRemoved, 7, "7-1")),
    ),
    "the spool keeps what is trained": (
        "store",
        [e for e in good() if not isinstance(e, SpoolFileRemoved) or e.group != 2],
    ),
    "the run fails": ("ended", edited(RunFinished, 0, failed="no")),
    "a host fetches other weights": ("arrived", inserted(StepBegan, 1, (VersionArrived, "a", 1, 9))),
    "a host lacks what a delta changes": ("arrived", inserted(StepBegan, 1, (GaveUp, "a", "FileNotFoundError: base"))),
    "old versions stay on a host": ("kept", inserted(StepBegan, 1, (VersionArrived, "a", 0, 100, 3))),
    "old versions stay at the learner": ("kept", edited(WeightsPublished, 1, files=4, used=1)),
    "a version that is being installed is withdrawn": (
        "read",
        inserted(StepBegan, 1, (InstallRequested, "a", 1, 0), (PublishedRemoved, 0)),
    ),
    "a version that is used is removed": (
        "held",
        inserted(StepBegan, 1, (VersionFetched, "a", "h: v"), (VersionRemoved, "b", "h: v")),
    ),
    "a parent that failed": ("parent", inserted(StepBegan, 0, (ParentAssigned, "a", "tcp://b", ("tcp://b",)))),
    "it plays with old weights": (
        "current",
        inserted(StepBegan, 1, (ProcessEnded, "a"), (WeightsInstalled, "a", 1, 0, 100), (PlayRequested, "a")),
    ),
    "an installation does not end": (
        "prompt",
        inserted(WeightsPublished, 4, (InstallRequested, "a", 2, 3), lambda at: TimePassed(at + 97.0)),
    ),
    "one is left with old weights": (
        "prompt",
        [
            *inserted(WeightsPublished, 4, (PlayRequested, "b"))[: of(good(), WeightsPublished, 4) + 3],
            TimePassed(good()[of(good(), FaultsOver)].at + 98.0),
        ],
    ),
    "a parent is silent": ("prompt", inserted(StepBegan, 0, (ParentRequested, "a"), lambda at: TimePassed(at + 21.0))),
    "a silent one keeps what it has": (
        "prompt",
        inserted(TrajectorySent, 0, *(lambda at, i=i: GroupsLeased(at + 9.0 * i, "b", free=2) for i in range(1, 6))),
    ),
    "of a session that is over": (
        "session",
        inserted(TrajectoriesAcknowledged, 0, (TrajectoriesDelivered, "a", (format_trajectory_id(0, 0),), False)),
    ),
    "given up too soon": (
        "failed",
        inserted(StepBegan, 0, (TrajectorySent, "a", msgspec.structs.replace(playing(0, 0, 1), reward=None))),
    ),
    "two evaluations at a time": ("evaluation", inserted(StepBegan, 2, (EvaluationBegan, 1), (EvaluationBegan, 2))),
    "evaluated with old weights": ("evaluation", inserted(StepBegan, 2, (EvaluationEnded, 2, (7,), 1, 2))),
    "other tasks are evaluated": (
        "evaluation",
        inserted(StepBegan, 2, (EvaluationEnded, 1, (7,), 1, 2), (EvaluationEnded, 2, (9,), 2, 2)),
    ),
    "trained tasks are evaluated": ("evaluation", inserted(StepBegan, 2, (EvaluationEnded, 2, (0,), 2, 2))),
    "an evaluation is missing": ("evaluation", edited(RunFinished, 0, evaluated=(4,))),
    "that of the last step is missing": ("evaluation", edited(RunFinished, 0, evaluated=(2,))),
    "an evaluation is there twice": ("evaluation", edited(RunFinished, 0, evaluated=(2, 2, 4))),
    "steps are missing at the end": ("ended", edited(RunFinished, 0, steps=3)),
    "no step after the last fault": ("stuck", inserted(WeightsPublished, 4, lambda at: TimePassed(at + 101.0))),
    "no step after a step": ("stuck", inserted(CheckpointSaved, 1, lambda at: TimePassed(at + 51.0))),
}


@pytest.mark.parametrize("what", SPOILED)
def test_what_must_not_be_is_named(what: str):
    name, events = SPOILED[what]
    soon = {"install_seconds": 3.0, "fetch_seconds": 20.0}
    every = {"evaluate_every": 2, "evaluated_tasks": 1}
    other = {"age": {"age_bound": 0}, "replaced": {"replaced_groups": 1}, "prompt": soon, "evaluation": every}.get(
        name, {}
    )
    assert broken(events, msgspec.structs.replace(RULES, **other)).name == name


def test_a_start_that_keeps_the_results_of_steps_that_it_takes_back_is_named():
    state, resumed = see(good()[:1]).state, LineageBegan(9.0, 2, 1, step=2)
    for step in (2, 3, 4):
        state.apply_event(EvaluationEnded(5.0, step, (7,), 0, 0))
    assert results_of_lost_weights_are_gone(state, resumed).endswith("with the evaluations of steps [3, 4]")
    for step in (3, 4):
        state.apply_event(EvaluationRemoved(8.0, step))
    assert not results_of_lost_weights_are_gone(state, resumed)


@pytest.mark.parametrize(
    ("every", "start", "evaluated", "missing"),
    [
        (2, 4, (4,), None),
        (2, 3, (4,), 2),
        (2, 4, (2,), 4),
        (2, 4, (), 2),
        (1, 4, (1, 2, 4), None),
        (1, 4, (1, 3, 4), 2),
        (1, 4, (1, 4), 2),
        (9, 4, (4,), None),
    ],
)
def test_a_resume_at_the_last_step_makes_one_evaluation_of_a_missing_one_and_the_last(every, start, evaluated, missing):
    *before, end = good()
    state = see(before, msgspec.structs.replace(RULES, evaluate_every=every, evaluated_tasks=1)).state
    whole = state.current_branch
    assert len(whole.steps) == end.steps == 4
    state.apply_event(LineageBegan(9.0, 3, 2, whole.steps[start - 1].version, start))
    for step in whole.steps[start:]:
        state.current_branch.add_step(step.groups, makes_version=True)
    says = each_step_that_is_due_is_evaluated_once(state, msgspec.structs.replace(end, evaluated=evaluated))
    assert says.partition(":")[0] == (f"the evaluation of step {missing} is missing" if missing else "")


@pytest.mark.parametrize(
    ("differing", "says"),
    [
        ([True], ""),
        ([False, True], ""),
        ([False, False], ""),  # the budget is spent
        ([False], "trains 1 groups, 0 that differ, and may take 2"),
        ([True, True], "takes group 1, though 1 before it differ"),
        ([False, False, True], "trains 3 groups, and may take 2"),
    ],
)
def test_a_step_replaces_groups_until_enough_differ_or_its_budget_is_spent(differing, says):
    rules = msgspec.structs.replace(RULES, replaced_groups=1)
    groups = tuple(
        tuple(msgspec.structs.replace(f, reward=float(differs * f.episode)) for f in pair(group, 1, 0))
        for group, differs in enumerate(differing)
    )
    known = see(good()[:1], rules).state
    assert groups_are_replaced_for_want_of_contrast(known, StepTrained(1.0, 1, 1, 0, groups)).endswith(says)
    assert says or not groups_are_replaced_for_want_of_contrast(known, StepTrained(1.0, 1, 1, 0, groups))


def begun(leased: int = 0) -> Writer:
    """A history in which generator `a` has the first weights, and so many groups."""
    w = Writer()
    w.begin(1)
    w.publish(0, 100, "a")
    for group in range(leased):
        w.add(GroupsLeased, "a", ((group, (0, 1)),))
    return w


def test_every_rule_has_a_history_that_breaks_it():
    assert {rule.name for rule in ALL} | {"stuck"} == {name for name, _ in SPOILED.values()} | {"memory", "disk"}
    assert all(rule.judge.__doc__ for rule in ALL)


def test_what_a_start_found_in_the_spool_is_there_for_the_next_one_though_nobody_was_told():
    w = begun(leased=1)
    w.add(TrajectorySent, "a", playing(0, 0, 1, 0))
    w.add(ProcessEnded, "learner")
    w.begin(2)
    w.add(MissingReported, {0: [1]})
    see(w.events)
    w.add(ProcessEnded, "learner")
    w.begin(3)
    w.add(MissingReported, {0: [0, 1]})
    assert broken(w.events).name == "lost"
    w.events[-1] = MissingReported(w.events[-1].at, {0: [1]})
    see(w.events)


def test_without_a_spool_what_was_acknowledged_goes_with_the_learner_and_may_be_played_again():
    w = begun()
    w.play("a", 0, 0)
    w.add(ProcessEnded, "learner")
    w.begin(2)
    w.publish(0, 100, "a")
    w.add(MissingReported, {0: [0, 1]})
    w.play("a", 0, 0)
    see(w.events, msgspec.structs.replace(RULES, durable="nothing"))
    assert broken(w.events).name == "lost"


def test_without_fsync_a_power_failure_takes_what_was_acknowledged():
    events = good()
    at = of(events, LineageBegan, 1)
    events[at : at + 2] = [
        PowerFailed(events[at].at),
        events[at],
        msgspec.structs.replace(events[at + 1], missing={3: [0]}),
    ]
    see(events[: at + 3])
    assert broken(events, msgspec.structs.replace(RULES, durable="power")).name == "lost"


def test_a_name_that_was_not_synced_does_not_let_the_spool_go_where_power_may_fail():
    w = begun()
    w.play("a", 0, 0)
    w.train(1, 0, *pair(0, 1, 0))
    w.begin(2, 1, 1, 1, 1)  # from a checkpoint that has its name, and nobody synced it
    w.add(SpoolFileRemoved, 0, "0-1")
    see(w.events)
    assert broken(w.events, msgspec.structs.replace(RULES, durable="power")).name == "store"


def test_what_came_after_the_learner_was_asked_may_be_leased_again():
    events = inserted(
        TrajectorySent,
        0,
        (ProcessEnded, "a"),
        (MissingReported, {0: [0, 1]}),
        (WeightsInstalled, "a", 1, 0, 100),
    )
    at = of(events, TrajectoriesAcknowledged, 0)
    events.insert(at + 1, GroupsLeased(events[at].at, "b", ((0, (0, 1)),)))
    see(events[: at + 2])
    again = [
        *events[: at + 2],
        MissingReported(events[at].at, {0: []}),
        ProcessEnded(events[at].at, "b"),
        events[at + 1],
    ]
    assert broken(again).name == "again"


def test_leases_of_a_generator_that_was_silent_may_be_given_to_another():
    w = Writer()
    w.begin(1)
    w.publish(0, 100, "a", "b")
    w.add(GroupsLeased, "a", ((0, (0, 1)),))
    late = GroupsLeased(20.0, "b", ((0, (0, 1)),))
    see([*w.events, late])
    awake = GroupsLeased(19.0, "a")
    see([*w.events, awake, late])  # it was silent for long enough before it woke
    steady = [GroupsLeased(float(at), "a") for at in range(5, 20)]
    assert broken([*w.events, *steady, late]).name == "again"


def test_rows_beyond_the_window_are_within_the_credit():
    rules = msgspec.structs.replace(RULES, durable="nothing", credit_bytes=150, slots=9)
    w = begun(leased=3)
    w.deliver("a", 0, 0, episodes=[0])  # the window: as much as comes
    w.deliver("a", 1, 0)
    w.deliver("a", 2, 0, episodes=[0])
    see(w.events, rules)
    w.deliver("a", 2, 0, episodes=[1])
    assert broken(w.events, rules).name == "memory"


def test_nobody_waits_for_memory_that_is_free():
    rules = msgspec.structs.replace(RULES, durable="nothing", credit_bytes=250, slots=9)
    w = begun(leased=3)
    w.deliver("a", 0, 0)
    assert broken([*w.events, GroupsLimited(20.0, "a", 1)], rules).name == "memory"
    w.deliver("a", 1, 0)
    w.add(GroupsLimited, "a", 1)
    see(w.events, rules)
    w.add(StepBegan, 1, 1, 0, (0,))
    w.add(StepTrained, 1, 1, 0, (pair(0, 1, 0),))
    w.add(GroupsLimited, "a", 2)  # a moment later: what was trained is released then
    see(w.events, rules)
    w.train(2, 1, *pair(1, 1, 0))
    assert broken([*w.events, GroupsLimited(99.0, "a", 3)], rules).name == "memory"


def test_files_beyond_the_window_are_within_the_disk():
    rules = msgspec.structs.replace(RULES, disk_bytes=1000)
    w = Writer()
    w.begin(1)
    w.add(SpoolFileGrew, 0, "0-1", 5000)
    w.add(SpoolFileGrew, 2, "2-1", 1000)
    see(w.events, rules)
    w.add(SpoolFileGrew, 3, "3-1", 2000)
    assert broken(w.events, rules).name == "disk"


def test_a_start_in_the_middle_of_a_version_has_all_steps_in_its_weights():
    first = LineageBranch(1)
    for group in range(3):
        first.add_step((group,), makes_version=group == 1)
    second = LineageBranch(2, first, step=3, version=1)
    assert second.steps_since_version == 1
    assert not same_weights(first, 1, second, 1)
    assert leads_to(first, 1, second)
    assert not leads_to(second, 1, LineageBranch(3, first, step=2, version=1))
