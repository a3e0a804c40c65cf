"""The schedule of faults of a simulated run, as plain data, drawn from a seed.

The last fault is over well before the run could end, so that one can judge whether the run
makes progress again.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Literal, NamedTuple

import msgspec

from dev.simulation.workload import CALL_STALLS, QUICK_SHARE, SimulatedWorkload

FaultKind = Literal[
    "cut",
    "half_open",
    "stall",
    "delay",
    "damage",
    "damage_weights",
    "mute",
    "memory_full",
    "disk_full",
    "disk_error",
    "short_write",
    "short_put",
    "slow_disk",
    "no_descriptors",
    "power",
    "power_writing",
    "kill",
    "kill_writing",
    "kill_again",
    "kill_unsaved",
    "kill_unsynced",
    "kill_waiting",
    "kill_calling",
    "kill_evaluated",
    "freeze",
    "silence",
    "slow_start",
    "failing_start",
    "engine_dies",
    "env_dies",
    "env_hangs",
    "env_late",
    "clock",
    "stop",
    "scale",
]


class PlannedFault(msgspec.Struct, frozen=True, omit_defaults=True):
    """A fault that begins at `at` and lasts for `seconds`, both in seconds of virtual time.

    `cut` nothing passes between generator `target` and the learner, and connections are lost
    `half_open` nothing sent from `target` over the current connections arrives, and nobody notices
    `stall` nothing passes between generator `target` and the learner; afterwards everything arrives
    `delay` messages take up to `amount` seconds longer, drawn for each, so that peers overtake each
    other `damage` a fraction `amount` of the messages arrives with a flipped bit `damage_weights` a
    fraction `amount` of the chunks of weights sent to generator `target` arrives with a flipped bit
    `mute` nothing passes between generator `target` and the others, so that none gets weights from
    it `memory_full` the memory of host `target`, where weights are, is full (ENOSPC) `disk_full`
    the disk is full (ENOSPC) `disk_error` every write to the disk fails (EIO) `short_write` a
    fraction `amount` of the appends fails half-way `short_put` the `amount`th write of a trajectory
    to the spool, counted from `at`, fails half-way `slow_disk` each operation on files takes
    `amount` seconds `no_descriptors` the process `target` can open no file and no connection
    (EMFILE), and accepts none; its existing
                      connections are cut
    `power` host `target` is lost with all its processes, and is back after `seconds`; if it
    has the disk, all
                      hosts are lost, and what was not synced is lost, or torn
    `power_writing` like `power`, during the `amount`th operation after `at` that changes the disk
    `kill` the process `target` ends `kill_writing` the process ends during its `amount`th operation
    after `at` that changes the disk `kill_again` the process ends, and once more `amount` seconds
    after the next start began to train, if that is
                      within `seconds`
    `kill_unsaved` the process ends `amount` seconds after the learner, later than `at`,
    acknowledges a trajectory
                      that the next start has to refuse
    `kill_unsynced` the process ends when a trajectory is written to the spool and not synced yet;
    `amount` seconds
                      after the next start has begun, the power of the host with the disk fails for 1 s
    `kill_waiting` the generator `target` ends, later than `at`, `amount` seconds after the
    conductor had nothing to lease
                      it, while it plays: its next call waits there
    `kill_calling` when generator `target` is leased something, later than `at`, its calls are held
    up; it ends after
                      `amount` seconds, and the calls arrive when its next process plays
    `kill_evaluated` the process ends `amount` seconds after the result of an evaluation is stored,
    later than `at`, of a
                      step after the newest checkpoint
    `freeze` the process is stopped (SIGSTOP), and continues after `seconds` `silence` like
    `freeze`, for a generator, and for longer than it may be silent `slow_start` processes that
    start take `amount` seconds longer `failing_start` a fraction `amount` of the processes that
    start ends at once `engine_dies` the engine of generator `target` ends, and the generator does
    not `env_dies` the process with the environments of generator `target` ends, with its episodes
    `env_hangs` that process does not answer any more, until it is ended for that `env_late` the
    answers of that process take `amount` seconds longer `clock` the wall clock of host `target`
    jumps by `amount` seconds `stop` the user stops the run, and starts it again when it has ended
    `scale` the user requests `amount` generators
    """

    at: float
    kind: FaultKind
    target: str = ""
    seconds: float = 0.0
    amount: float = 0.0

    @property
    def ends_at(self) -> float:
        return self.at + self.seconds

    def to_text(self) -> str:
        """Return the fault in words, for the story of the run."""
        words = [self.kind.replace("_", " "), self.target]
        words += [f"for {self.seconds:g} s"] if self.seconds else []
        words += [f"({self.amount:g})"] if self.amount else []
        return " ".join(word for word in words if word)


class _FaultDistribution(NamedTuple):
    """The distribution of one kind of fault: its relative frequency, target, duration and amount.
    Seconds are for a `stall_seconds` of 60, and are scaled with it."""

    weight: float
    target: Literal["generator", "peer", "role", "whole", "host", "disk", "none"]
    """Kind of target. `whole` is a process whose loss restarts the run."""
    seconds: tuple[float, float] = (0.0, 0.0)
    amount: tuple[float, float] = (0.0, 0.0)
    unit: Literal["", "seconds", "steps"] = ""
    """Unit of `amount`. `steps` is the time that a step takes."""


FAULT_DISTRIBUTIONS: dict[FaultKind, _FaultDistribution] = {
    "cut": _FaultDistribution(3, "generator", (0.5, 40)),
    "half_open": _FaultDistribution(2, "peer", (1, 40)),
    "stall": _FaultDistribution(2, "generator", (0.5, 150)),
    "delay": _FaultDistribution(1, "none", (5, 40), (0.1, 5), "seconds"),
    "damage": _FaultDistribution(2, "none", (5, 40), (0.01, 0.3)),
    "damage_weights": _FaultDistribution(0, "generator", (60, 100), (0.2, 0.8)),
    "mute": _FaultDistribution(0, "generator", (60, 100)),
    "memory_full": _FaultDistribution(0, "host", (0.5, 100)),
    "disk_full": _FaultDistribution(2, "none", (0.5, 40)),
    "disk_error": _FaultDistribution(2, "none", (0.5, 20)),
    "short_write": _FaultDistribution(2, "none", (0.5, 20), (0.05, 0.7)),
    "short_put": _FaultDistribution(4, "none", (60, 60), (1, 6)),
    "slow_disk": _FaultDistribution(1, "none", (5, 40), (0.001, 0.1), "seconds"),
    "no_descriptors": _FaultDistribution(0, "role", (10, 100)),
    "power": _FaultDistribution(2, "host", (0.5, 20)),
    "power_writing": _FaultDistribution(3, "disk", (0.5, 20), (1, 60)),
    "kill": _FaultDistribution(6, "role"),
    "kill_writing": _FaultDistribution(5, "role", (5, 5), (1, 60)),
    "kill_again": _FaultDistribution(2, "whole", (60, 60), (0.1, 3), "steps"),
    "kill_unsaved": _FaultDistribution(9, "whole", (60, 60), (0, 0.5), "steps"),
    "kill_unsynced": _FaultDistribution(0, "none", (60, 60), (0.1, 1), "steps"),
    "kill_waiting": _FaultDistribution(0, "generator", (60, 60), (0.1, 0.5)),
    "kill_calling": _FaultDistribution(0, "generator", (60, 60), (6, 12)),
    "kill_evaluated": _FaultDistribution(0, "whole", (60, 60), (0, 0.1), "steps"),
    "freeze": _FaultDistribution(3, "role", (0.5, 100)),
    "silence": _FaultDistribution(0, "generator", (60, 100)),
    "slow_start": _FaultDistribution(1, "none", (10, 60), (2, 30), "seconds"),
    "failing_start": _FaultDistribution(1, "none", (5, 40), (0.2, 0.8)),
    "engine_dies": _FaultDistribution(0, "generator"),
    "env_dies": _FaultDistribution(0, "generator"),
    "env_hangs": _FaultDistribution(0, "generator", (60 * CALL_STALLS, 60 * CALL_STALLS)),
    "env_late": _FaultDistribution(0, "generator", (5, 100), (2, 50), "seconds"),
    "clock": _FaultDistribution(1, "host", amount=(-3600, 3600)),
    "stop": _FaultDistribution(1, "none"),
    "scale": _FaultDistribution(0, "none"),  # drawn separately
}
ADDITIONAL_FAULTS: dict[str, tuple[float, tuple[FaultKind, ...]]] = {
    "weights": (0.6, ("damage_weights", "mute", "mute", "memory_full")),
    "spool": (0.25, ("kill_unsynced",)),
    "fleet": (0.2, ("silence",)),
    "descriptors": (0.2, ("no_descriptors",)),
    "engines": (0.2, ("engine_dies",)),
    "calls": (QUICK_SHARE, ("kill_waiting", "kill_waiting", "kill_calling")),
    "evaluations": (0.4, ("kill_evaluated",)),
    "environments": (0.25, ("env_dies", "env_hangs", "env_late")),
}
"""Faults that are drawn in addition to those with a weight, from separate random streams: the share
of the runs that get one, and the kinds to choose from."""
SCALED_SHARE = 0.3
"""Share of the runs whose number of generators changes."""
MAX_GENERATORS = 5
MAX_WEIGHTED_FAULTS = 8
"""Maximum number of faults with a weight in one run."""
LOADED_SECONDS = 8.0
"""Seconds until a run begins to play, on a machine that is not slow."""
EARLY_SHARE = 0.15
"""Share of the faults that come before the run begins to play."""
TOGETHER_SECONDS = (0.0, 0.0, 2.0, 30.0)
"""Choices for the maximum seconds between a fault and the previous one, if it
follows it closely."""


def draw_faults(
    workload: SimulatedWorkload, kinds: Sequence[FaultKind] = tuple(FAULT_DISTRIBUTIONS)
) -> list[PlannedFault]:
    """Draw the faults of a workload, in the order of their beginning. The result is the same for
    the same workload on every machine. One run in twenty has no faults."""
    rng = random.Random(f"faults/{workload.seed}")
    if rng.randrange(20) == 0:
        return []
    loaded = LOADED_SECONDS * workload.slowness
    last = loaded + max(10.0, 0.8 * workload.expected_seconds)
    faults: list[PlannedFault] = []
    for _ in range(rng.randint(1, MAX_WEIGHTED_FAULTS)):
        at = rng.uniform(0, loaded if rng.random() < EARLY_SHARE else last)
        if faults and rng.randrange(3) == 0:  # several at once
            at = faults[-1].at + rng.uniform(0, rng.choice(TOGETHER_SECONDS))
        kind = rng.choices(list(kinds), [FAULT_DISTRIBUTIONS[k].weight for k in kinds])[0]
        fault = _draw_fault(rng, kind, round(at, 3), workload)
        if kind == "kill_again":  # the run must not be over before the second kill
            fault = msgspec.structs.replace(
                fault, at=round(rng.uniform(0, max(loaded, last - fault.seconds)), 3)
            )
        faults.append(fault)
    for use, (share, use_kinds) in ADDITIONAL_FAULTS.items():
        if use == "evaluations" and not workload.evaluate_every:
            continue
        use_rng = random.Random(f"{use}/{workload.seed}")
        if use_rng.random() < share:
            wanted = [kind for kind in use_kinds if kind in kinds]
            if wanted:
                faults.append(
                    _draw_fault(
                        use_rng,
                        use_rng.choice(wanted),
                        round(use_rng.uniform(loaded, last), 3),
                        workload,
                    )
                )
    if "scale" in kinds:
        faults += _draw_scaling(workload, loaded, last)
    return sorted(faults, key=lambda fault: fault.at)


def _draw_scaling(workload: SimulatedWorkload, loaded: float, last: float) -> list[PlannedFault]:
    """Draw changes of the number of generators, from a separate random stream, so that this kind,
    which was added later, does not change what a seed draws otherwise."""
    rng = random.Random(f"scaling/{workload.seed}")
    if rng.random() >= SCALED_SHARE:
        return []
    times = (round(rng.uniform(loaded / 2, last), 3) for _ in range(rng.randint(1, 4)))
    return [PlannedFault(at, "scale", amount=rng.randint(1, MAX_GENERATORS)) for at in times]


def _draw_fault(
    rng: random.Random, kind: FaultKind, at: float, workload: SimulatedWorkload
) -> PlannedFault:
    shape = FAULT_DISTRIBUTIONS[kind]
    generators = [role for role in workload.process_names if role.startswith("generator-")]
    targets = {
        "generator": generators,
        "peer": [*generators, "learner"],
        "role": workload.process_names,
        "whole": [role for role in workload.process_names if role not in generators],
        "host": workload.host_names,
        "disk": workload.host_names[:1],
        "none": [""],
    }[shape.target]
    stretch = workload.stall_seconds / 60
    seconds = _draw_skewed(rng, shape.seconds, stretch)
    unit = {"": 1.0, "seconds": stretch, "steps": workload.train_seconds}[shape.unit]
    amount = _draw_skewed(rng, shape.amount, unit)
    if kind == "kill_again":
        seconds = round(seconds + amount, 3)
    return PlannedFault(at, kind, rng.choice(targets), seconds, amount)


def _draw_skewed(rng: random.Random, bounds: tuple[float, float], factor: float) -> float:
    """Draw a number between the bounds, mostly near the lower one, and multiply it by `factor`."""
    low, high = bounds
    share = rng.random()
    return round(factor * (low + (high - low) * share * share), 3)


def faults_end(faults: Sequence[PlannedFault]) -> float:
    """Return the virtual second at which the last fault is over."""
    return max((fault.ends_at for fault in faults), default=0.0)
