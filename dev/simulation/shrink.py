"""Shrinking of a failing run to a small one that fails alike: fewer faults, generators and steps,
simpler settings.

Shrinking is deterministic: what is tried next depends only on what failed before.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import msgspec

from dev.simulation.faults import PlannedFault
from dev.simulation.workload import SimulatedWorkload


class SimulationCase(msgspec.Struct, frozen=True):
    """A reproducible run: its workload and seed, its faults, and the planted defect
    `mutant`, "" for none."""

    workload: SimulatedWorkload
    faults: tuple[PlannedFault, ...] = ()
    mutant: str = ""


PLAIN_VALUES: dict[str, tuple[object, ...]] = {
    "generators": (1, 2),
    "hosts": (1,),
    "prompts_per_step": (1, 2),
    "group_size": (2,),
    "steps": (2, 3, 4, 6, 8),
    "turns": (1,),
    "window": (1, 2),
    "max_staleness": (0, 1, 2),
    "steps_per_publication": (1,),
    "tokens_per_step": (0,),
    "replaced_groups": (0,),
    "epochs_per_step": (1,),
    "flat": (0,),
    "tasks": (0,),
    "split": ("idle",),
    "checkpoint_every": (1, 2),
    "checkpoints_kept": (3,),
    "asynchronous": (False, True),
    "failing": (0,),
    "probe": (False,),
    "memory_bytes": (10**6,),
    "disk_bytes": (10**7,),
    "credit_bytes": (10**6,),
    "fsync": (True,),
    "new_tokens": (2, 6),
    "concurrency": (1, 2),
    "least_train_seconds": (0.0,),
    "train_seconds": (0.1, 1.0),
    "slowness": (1.0,),
    "seconds": (0.2, 1.0),
    "fetch_seconds": (0.0,),
    "install_seconds": (0.0,),
    "fanout": (2, 1),
}
"""Values of each setting that make a run easier to understand, the simplest first."""


def shrink_case(
    case: SimulationCase, fails: Callable[[SimulationCase], bool], tries: int = 300
) -> SimulationCase:
    """Return a smaller case for which `fails` is true, as it is for `case`.

    If the search ends before `tries` runs, no single change that is tried here makes the result
    smaller. After `tries` runs, the best case so far is returned.
    """
    tries_left = [tries]

    def still_fails(smaller: SimulationCase) -> bool:
        if tries_left[0] <= 0:
            return False
        tries_left[0] -= 1
        return fails(smaller)

    while tries_left[0] > 0:
        before = case
        case = _fewer_faults(case, still_fails)
        case = _reduce_case(case, _plainer_settings, still_fails)
        case = _reduce_case(case, _shorter_faults, still_fails)
        if case == before:
            break
    return case


def _fewer_faults(case: SimulationCase, holds: Callable[[SimulationCase], bool]) -> SimulationCase:
    """Remove faults by delta debugging: first large parts of them, then smaller ones."""
    size = len(case.faults)
    while size:
        at = 0
        while at < len(case.faults):
            smaller = msgspec.structs.replace(
                case, faults=(*case.faults[:at], *case.faults[at + size :])
            )
            if holds(smaller):
                case = smaller
            else:
                at += size
        size //= 2
    return case


def _reduce_case(
    case: SimulationCase,
    candidates: Callable[[SimulationCase], Iterator[SimulationCase]],
    holds: Callable[[SimulationCase], bool],
) -> SimulationCase:
    """Take the first candidate that holds, and continue from it, until no candidate holds."""
    improved = True
    while improved:
        improved = False
        for smaller in candidates(case):
            if holds(smaller):
                case = smaller
                improved = True
                break
    return case


def _plainer_settings(case: SimulationCase) -> Iterator[SimulationCase]:
    for name, values in PLAIN_VALUES.items():
        now = getattr(case.workload, name)
        for value in values:
            if value == now:
                break
            workload = msgspec.structs.replace(case.workload, **{name: value})
            if _targets_exist(workload, case.faults):
                yield msgspec.structs.replace(case, workload=workload)


def _targets_exist(workload: SimulatedWorkload, faults: Sequence[PlannedFault]) -> bool:
    """Return whether the target of every fault still exists."""
    targets = ["", *workload.process_names, *workload.host_names]
    return all(fault.target in targets for fault in faults)


def _shorter_faults(case: SimulationCase) -> Iterator[SimulationCase]:
    """Yield cases in which one fault lasts half as long, or has a smaller amount."""
    for at, fault in enumerate(case.faults):
        smaller = []
        if fault.seconds > 1:
            smaller.append(msgspec.structs.replace(fault, seconds=round(fault.seconds / 2, 1)))
        if fault.kind.endswith("_writing") and fault.amount > 1:
            smaller.append(msgspec.structs.replace(fault, amount=float(int(fault.amount / 2))))
        for one in smaller:
            yield msgspec.structs.replace(
                case, faults=(*case.faults[:at], one, *case.faults[at + 1 :])
            )
