"""Faults that are aimed hit what they say."""

from collections.abc import Callable
from typing import TypeVar

import pytest

from dev.simulation.faults import PlannedFault
from dev.simulation.history import (
    EpisodeFailed,
    EvaluationBegan,
    EvaluationEnded,
    FaultReported,
    GroupsLeased,
    LineageBegan,
    ParentAssigned,
    ParentRequested,
    PlayRequested,
    PowerFailed,
    ProcessEnded,
    RunEvent,
    RunFinished,
    SpoolFileGrew,
    StepBegan,
    StepTrained,
    TrajectoriesAcknowledged,
    VersionArrived,
)
from dev.simulation.run import SimulatedRun, tiny_model_directory
from dev.simulation.search import quiet_logs
from dev.simulation.shrink import SimulationCase
from dev.simulation.workload import SimulatedWorkload

E = TypeVar("E")


@pytest.fixture(scope="module", autouse=True)
def model():
    with quiet_logs(), tiny_model_directory():
        yield


def run(
    workload: SimulatedWorkload,
    fault: PlannedFault,
    look: Callable[[SimulatedRun, RunEvent], None] = lambda run, event: None,
) -> SimulatedRun:
    """To its end, which is that of a whole run."""
    simulated = SimulatedRun(SimulationCase(workload, (fault,)))
    simulated.simulation.listeners.append(lambda event: look(simulated, event))
    result = simulated.run()
    assert not result.violated, f"{result.violated}: {result.reason}"
    assert any(isinstance(event, RunFinished) for event in simulated.history)
    return simulated


def of(simulated: SimulatedRun, kind: type[E]) -> list[E]:
    return [event for event in simulated.history if isinstance(event, kind)]


def test_a_short_put_hits_one_trajectory_which_is_written_again_to_the_same_file():
    simulated = run(SimulatedWorkload(3, steps=4), PlannedFault(1.0, "short_put", seconds=60.0, amount=3.0))
    hits = [event for event in of(simulated, FaultReported) if ", append " in event.what]
    assert len(hits) == 1
    name = hits[0].what.rpartition(" ")[2]
    again = next(event for event in of(simulated, SpoolFileGrew) if event.at >= hits[0].at)
    assert name.endswith(".spool")
    assert again.file == name
    assert again.at > hits[0].at + 0.5  # the spool waits before it tries again


@pytest.mark.parametrize("target", ["learner", "conductor", "driver"])
def test_a_second_kill_comes_so_long_after_the_next_start_began_to_train(target: str):
    workload = SimulatedWorkload(5, steps=5, least_train_seconds=4.0, train_seconds=5.0)
    simulated = run(workload, PlannedFault(14.0, "kill_again", target, seconds=80.0, amount=7.0))
    first = {event.lineage: event.at for event in reversed(of(simulated, StepBegan))}
    kills = [event.at for event in of(simulated, ProcessEnded) if event.who == target]
    assert kills[0] == 14.0
    assert kills[1] == pytest.approx(first[2] + 7.0, abs=1e-5)
    assert sorted(first) == [1, 2, 3]


def test_a_process_ends_when_the_next_start_has_to_refuse_what_was_acknowledged():
    """The generator is what is slow, and checkpoints are rare."""
    workload = SimulatedWorkload(
        8,
        steps=6,
        concurrency=1,
        max_staleness=2,
        checkpoint_every=3,
        seconds=8.0,
        least_train_seconds=4.0,
        train_seconds=5.0,
    )
    unsaved: list[float] = []

    def look(simulated: SimulatedRun, event: RunEvent) -> None:
        if isinstance(event, TrajectoriesAcknowledged) and any(map(simulated.checker.state.is_unsaved, event.ids)):
            unsaved.append(event.at)

    simulated = run(workload, PlannedFault(1.0, "kill_unsaved", "learner", seconds=300.0, amount=0.5), look)
    kills = [event.at for event in of(simulated, ProcessEnded) if event.who == "learner"]
    assert kills[0] == pytest.approx(unsaved[0] + 0.5, abs=1e-5)
    assert {event.lineage for event in of(simulated, StepBegan)} == {1, 2}


def test_a_chunk_of_weights_that_was_damaged_is_asked_for_again():
    workload = SimulatedWorkload(3, steps=4, hosts=2)
    simulated = SimulatedRun(
        SimulationCase(workload, (PlannedFault(0.1, "damage_weights", "generator-0", seconds=500.0, amount=0.4),))
    )
    network, damaged = simulated.simulation.network, []
    spoils = network.is_damaged
    network.is_damaged = lambda route, frames: spoils(route, frames) and damaged.append(route.target) is None
    result = simulated.run()
    assert not result.violated, f"{result.violated}: {result.reason}"
    assert set(damaged) == {"generator-0"}
    assert [event.version for event in of(simulated, VersionArrived)] == [0, 1, 2, 3, 4]


def test_a_host_that_passes_nothing_on_is_left_for_another():
    workload = SimulatedWorkload(3, steps=4, hosts=4, generators=3, fanout=1, fetch_seconds=4.0, train_seconds=60.0)
    simulated = run(workload, PlannedFault(5.0, "mute", "generator-0", seconds=100.0))
    placed = of(simulated, ParentAssigned)
    assert any(event.parent for event in placed)  # hosts get weights from one another
    assert any(event.avoid for event in placed)
    assert len({event.generator for event in of(simulated, VersionArrived)}) == 3


def test_power_fails_after_a_start_that_found_what_was_not_synced():
    workload = SimulatedWorkload(3, steps=4, checkpoint_every=4, train_seconds=8.0)
    simulated = run(workload, PlannedFault(9.0, "kill_unsynced", seconds=100.0, amount=5.0))
    killed = next(event.at for event in of(simulated, ProcessEnded) if event.who == "learner")
    began = [event.at for event in of(simulated, LineageBegan)]
    failed = [event.at for event in of(simulated, PowerFailed)]
    assert 9.0 < killed < began[1]
    assert failed == [pytest.approx(began[1] + 5.0, abs=1e-5)]
    assert len(began) == 3


def test_a_generator_without_descriptors_fetches_its_weights_when_it_has_some():
    workload = SimulatedWorkload(3, steps=4, hosts=2, seconds=2.0, max_staleness=2, train_seconds=15.0)
    fault = PlannedFault(30.0, "no_descriptors", "generator-0", seconds=25.0)
    simulated = run(workload, fault)
    looked = [event.at for event in of(simulated, ParentRequested)]
    assert not [at for at in looked if fault.at < at < fault.ends_at]
    assert [at for at in looked if at > fault.ends_at]
    assert not [
        event for event in of(simulated, ProcessEnded) if event.who == "generator-0" and event.at < fault.ends_at
    ]


def test_what_a_lost_engine_would_have_played_is_played_again_and_nothing_fails():
    """Its generator lived on, was leased what the others were not, and failed all of it."""
    workload = SimulatedWorkload(3, steps=4, seconds=10.0, tail=0)
    simulated = run(workload, PlannedFault(20.0, "engine_dies", "generator-0"))
    ended = [(event.who, event.at) for event in of(simulated, ProcessEnded) if event.at > 20.0]
    assert ended[0][0] == "generator-0"
    assert ended[0][1] < 40.0
    assert not of(simulated, EpisodeFailed)
    assert all(
        f.reward is not None for event in of(simulated, StepTrained) for members in event.groups for f in members
    )


@pytest.mark.parametrize("kind", ["env_dies", "env_hangs", "env_late"])
def test_what_an_environment_s_process_loses_is_played_again(kind: str):
    workload = SimulatedWorkload(3, steps=4, seconds=30.0, tail=0, stall_seconds=60.0)
    fault = PlannedFault(20.0, kind, "generator-0", seconds=54.0, amount=60.0)
    simulated = run(workload, fault)
    failed = of(simulated, EpisodeFailed)
    assert len({event.task for event in failed}) > 1  # all that it played
    ended = {"env_dies": 20.0, "env_hangs": 84.0, "env_late": 84.0}[kind]
    assert min(event.at for event in failed) <= ended
    trained = [f for event in of(simulated, StepTrained) for members in event.groups for f in members]
    assert all(f.reward is not None for f in trained)
    assert {f.task for f in trained} >= {event.task for event in failed}


@pytest.mark.parametrize("kind", ["kill", "engine_dies"])
def test_a_run_evaluates_what_is_due_though_the_generator_that_plays_it_ends(kind: str):
    workload = SimulatedWorkload(
        5, steps=4, least_train_seconds=20.0, train_seconds=21.0, evaluate_every=2, evaluation_seconds=30.0
    )
    plain = SimulatedRun(SimulationCase(workload, ()))
    assert not plain.run().violated
    begun = of(plain, EvaluationBegan)
    assert [event.step for event in begun] == [2, 4]
    for late in begun:
        simulated = run(workload, PlannedFault(late.at + 5.0, kind, "generator-0"))
        evaluated = of(simulated, EvaluationEnded)
        assert [event.step for event in evaluated] == [2, 4]
        assert of(simulated, RunFinished)[0].evaluated == (2, 4)


LONG = SimulatedWorkload(
    3, steps=4, concurrency=8, slowness=0.25, seconds=30.0, train_seconds=4.0, token_seconds=0.5, turns=2
)
"""Episodes are long, and a generator has places for more."""


def test_a_generator_ends_while_its_call_waits_and_it_plays():
    simulated = run(LONG, PlannedFault(3.0, "kill_waiting", "generator-0", seconds=100.0, amount=0.2))
    (killed,) = [e.at for e in of(simulated, ProcessEnded) if e.who == "generator-0" and e.at < 100]
    before = [event for event in of(simulated, GroupsLeased) if event.at < killed]
    assert before[-1].at == pytest.approx(killed - 0.2, abs=1e-5)
    assert before[-1].free
    assert not before[-1].leases


def test_calls_of_a_process_that_has_ended_come_when_the_next_one_plays_and_are_leased_nothing():
    simulated = run(LONG, PlannedFault(3.0, "kill_calling", "generator-0", seconds=300.0, amount=7.0))
    late = [event for event in of(simulated, GroupsLeased) if event.outdated]
    assert late
    assert not any(event.leases or event.free for event in late)
    assert late[0].at >= of(simulated, PlayRequested)[1].at


def test_a_process_ends_when_an_evaluation_is_stored_that_no_checkpoint_has():
    workload = SimulatedWorkload(3, steps=4, checkpoint_every=4, evaluate_every=1, evaluated_tasks=2)
    simulated = run(workload, PlannedFault(3.0, "kill_evaluated", "learner", seconds=60.0, amount=0.1))
    evaluated = of(simulated, EvaluationEnded)
    killed = [event for event in of(simulated, ProcessEnded) if event.who == "learner"]
    assert killed[0].at == pytest.approx(evaluated[0].at + 0.1, abs=1e-5)
    assert of(simulated, LineageBegan)[1].step == 0
    assert [event.step for event in evaluated].count(1) == 2
