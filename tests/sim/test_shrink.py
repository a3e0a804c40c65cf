"""Shrinking a failing case: it still fails, it is small, and the way there is always the same."""

from dev.simulation.faults import PlannedFault, draw_faults
from dev.simulation.shrink import SimulationCase, shrink_case
from dev.simulation.workload import draw_workload


def big() -> SimulationCase:
    for seed in range(1000):
        workload = draw_workload(seed)
        faults = [fault for fault in draw_faults(workload) if not fault.kind.endswith("_writing")]
        if len(faults) > 5 and workload.generators == 4 and workload.steps > 8:
            faults = [*faults, PlannedFault(3.0, "kill", "learner"), PlannedFault(9.0, "freeze", "generator-1", 40.0)]
            return SimulationCase(workload, tuple(sorted(faults, key=lambda fault: fault.at)))
    raise AssertionError


def test_only_what_the_failure_needs_is_left():
    def fails(case: SimulationCase) -> bool:
        kinds = {(fault.kind, fault.target) for fault in case.faults if fault.seconds != 1}
        return {("kill", "learner"), ("freeze", "generator-1")} <= kinds and case.workload.steps >= 4

    small = shrink_case(big(), fails)
    assert fails(small)
    assert {(fault.kind, fault.target) for fault in small.faults} == {("kill", "learner"), ("freeze", "generator-1")}
    assert small.workload.generators == 2
    assert small.workload.steps == 4
    assert small.workload.turns == small.workload.window == small.workload.hosts == 1
    assert max(fault.seconds for fault in small.faults) <= 2
    assert small == shrink_case(big(), fails)


def test_a_failure_without_faults_needs_none_and_few_tries_are_enough_to_be_smaller():
    tried = []

    def fails(case: SimulationCase) -> bool:
        tried.append(case)
        return True

    small = shrink_case(big(), fails, tries=10)
    assert len(tried) == 10
    assert small.faults == ()
