"""Compute how many runs this machine can make at once from a run's needs. Pure, except for `measure_machine`."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from r3async.config import Config

from ..memory import GIB
from ..plan import VERSIONS_IN_MEMORY, RunPlan

PROCESS_BYTES = 0.9 * GIB
"""Host memory in bytes that each process of a run takes before it holds a model, including its share of Ray's own."""


class Machine(NamedTuple):
    """The resources of this machine.

    Attributes:
        free_bytes: Unused bytes of memory.
        gpus: Names of the GPUs for `CUDA_VISIBLE_DEVICES`.
    """

    cores: int
    free_bytes: float
    gpus: list[str]


class RunNeeds(NamedTuple):
    """The maximum needs of one run: busy cores, bytes of host memory, and GPUs."""

    cores: int
    memory_bytes: float
    gpus: int


class SweepCapacity(NamedTuple):
    """The number of runs at once.

    Attributes:
        reason: In words, the number that each need allows.
    """

    runs: int
    reason: str


def measure_machine() -> Machine:
    from ..doctor import count_cores, read_memory

    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    numbers = sorted(int(path.name.removeprefix("nvidia")) for path in Path("/dev").glob("nvidia[0-9]*"))
    gpus = list(map(str, numbers)) if visible is None else [name.strip() for name in visible.split(",") if name.strip()]
    return Machine(count_cores(), read_memory()[0], gpus if numbers else [])


def compute_needs(config: Config, plan: RunPlan, machine: Machine) -> RunNeeds:
    """Compute the needs of one run on that machine. A small model uses a GPU if there is one."""
    ranks, engines = config.learner.parallel.world_size, config.generator.count
    gpus = plan.gpus or int(bool(machine.gpus) and config.generator.engine == "vllm")
    processes = sum(process.count for process in plan.processes)
    memory = processes * PROCESS_BYTES + VERSIONS_IN_MEMORY * plan.version_bytes
    if not gpus:
        cache = config.generator.kv_cache_gib * GIB if config.generator.engine == "vllm" else 0
        memory += ranks * plan.rank.total_bytes + engines * (plan.engine.weights + cache)
    return RunNeeds(ranks + engines, memory, gpus)


def combine_needs(needs: Sequence[RunNeeds]) -> RunNeeds:
    """Return the largest need of the runs for each resource."""
    return RunNeeds(*map(max, zip(*needs, strict=True)))


def compute_capacity(
    max_needs: RunNeeds, machine: Machine, runs: int, requested: int | None, cluster: str
) -> SweepCapacity:
    """Compute how many runs can be made at once.

    Args:
        max_needs: The needs of the largest run.
        requested: The number that the user chose, who may know better.
        cluster: Address of the cluster of the runs, if any; this machine's resources are then irrelevant.
    """
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
    """Return the environment of the run in a slot (from 0): the GPUs that no other slot has."""
    if not max_needs.gpus or len(machine.gpus) < max_needs.gpus * (slot + 1):
        return {}
    return {"CUDA_VISIBLE_DEVICES": ",".join(machine.gpus[max_needs.gpus * slot : max_needs.gpus * (slot + 1)])}
