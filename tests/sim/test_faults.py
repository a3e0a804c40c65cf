"""Faults that are aimed hit what they say."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import pytest

from r3async.tools.simulate.faults import Fault
from r3async.tools.simulate.history import Acknowledged, Event, Finished, Injected, Lost, Stored, Taken
from r3async.tools.simulate.run import Simulated, model_here
from r3async.tools.simulate.search import quiet_logs
from r3async.tools.simulate.shrink import Case
from r3async.tools.simulate.workload import Workload

E = TypeVar("E")


@pytest.fixture(scope="module", autouse=True)
def model():
    with quiet_logs(), model_here():
        yield


def run(
    workload: Workload, fault: Fault, look: Callable[[Simulated, Event], None] = lambda run, event: None
) -> Simulated:
    """To its end, which is that of a whole run."""
    simulated = Simulated(Case(workload, (fault,)))
    simulated.simulation.listeners.append(lambda event: look(simulated, event))
    result = simulated.run()
    assert not result.violated, f"{result.violated}: {result.reason}"
    assert any(isinstance(event, Finished) for event in simulated.history)
    return simulated


def of(simulated: Simulated, kind: type[E]) -> list[E]:
    return [event for event in simulated.history if isinstance(event, kind)]


def test_a_short_put_hits_one_trajectory_which_is_written_again_to_the_same_file():
    simulated = run(Workload(3, steps=4), Fault(1.0, "short_put", seconds=60.0, amount=3.0))
    hits = [event for event in of(simulated, Injected) if ", append " in event.what]
    assert len(hits) == 1
    name = hits[0].what.rpartition(" ")[2]
    again = next(event for event in of(simulated, Stored) if event.at >= hits[0].at)
    assert name.endswith(".spool")
    assert again.file == name
    assert again.at > hits[0].at + 0.5  # the spool waits before it tries again


@pytest.mark.parametrize("target", ["learner", "conductor", "driver"])
def test_a_second_kill_comes_so_long_after_the_next_start_began_to_train(target: str):
    workload = Workload(5, steps=5, least_train_seconds=4.0, train_seconds=5.0)
    simulated = run(workload, Fault(14.0, "kill_again", target, seconds=80.0, amount=7.0))
    first = {event.lineage: event.at for event in reversed(of(simulated, Taken))}
    kills = [event.at for event in of(simulated, Lost) if event.who == target]
    assert kills[0] == 14.0
    assert kills[1] == pytest.approx(first[2] + 7.0, abs=1e-5)
    assert sorted(first) == [1, 2, 3]


def test_a_process_ends_when_the_next_start_has_to_refuse_what_was_acknowledged():
    """The generator is what is slow, and checkpoints are rare."""
    workload = Workload(
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

    def look(simulated: Simulated, event: Event) -> None:
        if isinstance(event, Acknowledged) and any(map(simulated.checker.known.is_unsaved, event.ids)):
            unsaved.append(event.at)

    simulated = run(workload, Fault(1.0, "kill_unsaved", "learner", seconds=300.0, amount=0.5), look)
    kills = [event.at for event in of(simulated, Lost) if event.who == "learner"]
    assert kills[0] == pytest.approx(unsaved[0] + 0.5, abs=1e-5)
    assert {event.lineage for event in of(simulated, Taken)} == {1, 2}
