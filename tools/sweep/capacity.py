"""How many runs this machine makes at once, from what a run needs of it. Pure, but for `measure_machine`."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from r3async.config import Config

from ..memory import GIB
from ..plan import VERSIONS_IN_MEMORY, RunPlan

PROCESS_BYTES = 0.9 * GIB
"""Of host memory that each of a run's processes takes before it holds a model, Ray's own shared among them."""


class Machine(NamedTuple):
    """`free_bytes`: bytes of memory that nobody uses. `gpus`: their names for `CUDA_VISIBLE_DEVICES`."""

    cores: int
    free_bytes: float
    gpus: list[str]


class RunNeeds(NamedTuple):
    """Of one run. Cores that are busy, and bytes of host memory, at most."""

    cores: int
    memory_bytes: float
    gpus: int


class SweepCapacity(NamedTuple):
    """`reason`: in words, which needs allow how many."""

    runs: int
    reason: str


def measure_machine() -> Machine:
    from ..doctor import count_cores, read_memory

    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    numbers = sorted(int(path.name.removeprefix("nvidia")) for path in Path("/dev").glob("nvidia[0-9]*"))
    gpus = list(map(str, numbers)) if visible is None else [name.strip() for name in visible.split(",") if name.strip()]
    return Machine(count_cores(), read_memory()[0], gpus if numbers else [])


def compute_needs(config: Config, plan: RunPlan, machine: Machine) -> RunNeeds:
    """What one run takes on that machine. A small model uses a GPU where there is one."""
    ranks, engines = config.learner.parallel.world_size, config.generator.count
    gpus = plan.gpus or int(bool(machine.gpus) and config.generator.engine == "vllm")
    processes = sum(process.count for process in plan.processes)
    memory = processes * PROCESS_BYTES + VERSIONS_IN_MEMORY * plan.version_bytes
    if not gpus:
        cache = config.generator.kv_cache_gib * GIB if config.generator.engine == "vllm" else 0
        memory += ranks * plan.rank.total_bytes + engines * (plan.engine.weights + cache)
    return RunNeeds(ranks + engines, memory, gpus)


def combine_needs(needs: Sequence[RunNeeds]) -> RunNeeds:
    """As much of everything as the runs need that need the most of it."""
    return RunNeeds(*map(max, zip(*needs, strict=True)))


def compute_capacity(
    max_needs: RunNeeds, machine: Machine, runs: int, requested: int | None, cluster: str
) -> SweepCapacity:
    """`max_needs`: what the largest of the runs needs. `requested`: by the person, who may know better. `cluster`: the
    address of the one that runs are on, if they are; then this machine says nothing."""
    if requested is not None:
        return SweepCapacity(min(requested, runs), "as asked (--parallel)")
    if cluster:
        return SweepCapacity(1, f"one after the other on the cluster at {cluster}; --parallel N for more")
    limits = {
        f"{machine.cores} cores, {max_needs.cores} a run": machine.cores // max_needs.cores,
        f"{machine.free_bytes / GIB:.1f} GiB of free memory, {max_needs.memory_bytes / GIB:.1f} a run": int(
            machine.free_bytes // max_needs.memory_bytes
        ),
    }
    if max_needs.gpus:
        limits[f"{len(machine.gpus)} GPUs, {max_needs.gpus} a run"] = len(machine.gpus) // max_needs.gpus
    return SweepCapacity(max(1, min([runs, *limits.values()])), "; ".join(limits))


def make_slot_environment(slot: int, max_needs: RunNeeds, machine: Machine) -> dict[str, str]:
    """Environment of the run in that slot, from 0: the GPUs that no other slot has."""
    if not max_needs.gpus or len(machine.gpus) < max_needs.gpus * (slot + 1):
        return {}
    return {"CUDA_VISIBLE_DEVICES": ",".join(machine.gpus[max_needs.gpus * slot : max_needs.gpus * (slot + 1)])}
