"""How many runs this machine makes at once, from what a run needs of it. Pure, but for `here`."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from r3async.config import Config
from r3async.tools.memory import GIB
from r3async.tools.plan import PUBLISHED_VERSIONS, Plan

PROCESS_BYTES = 0.9 * GIB
"""Of host memory that each of a run's processes takes before it holds a model, Ray's own shared among them."""


class Machine(NamedTuple):
    """`free`: bytes of memory that nobody uses. `gpus`: their names for `CUDA_VISIBLE_DEVICES`."""

    cores: int
    free: float
    gpus: list[str]


class Need(NamedTuple):
    """Of one run. Cores that are busy, and bytes of host memory, at most."""

    cores: int
    memory: float
    gpus: int


class Capacity(NamedTuple):
    """`why`: in words, which needs allow how many."""

    runs: int
    why: str


def here() -> Machine:
    from r3async.tools.doctor import cores_here, memory_here

    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    numbers = sorted(int(path.name.removeprefix("nvidia")) for path in Path("/dev").glob("nvidia[0-9]*"))
    gpus = list(map(str, numbers)) if visible is None else [name.strip() for name in visible.split(",") if name.strip()]
    return Machine(cores_here(), memory_here()[0], gpus if numbers else [])


def need(config: Config, plan: Plan, machine: Machine) -> Need:
    """What one run takes on that machine. A small model uses a GPU where there is one."""
    ranks, engines = config.learner.parallel.world, config.generator.count
    gpus = plan.gpus or int(bool(machine.gpus) and config.generator.engine == "vllm")
    processes = sum(process.count for process in plan.processes)
    memory = processes * PROCESS_BYTES + PUBLISHED_VERSIONS * plan.version_bytes
    if not gpus:
        cache = config.generator.kv_cache_gib * GIB if config.generator.engine == "vllm" else 0
        memory += ranks * plan.rank.total + engines * (plan.engine.weights + cache)
    return Need(ranks + engines, memory, gpus)


def largest(needs: Sequence[Need]) -> Need:
    """As much of everything as the runs need that need the most of it."""
    return Need(*map(max, zip(*needs, strict=True)))


def at_once(most: Need, machine: Machine, runs: int, asked: int | None, cluster: str) -> Capacity:
    """`most`: what the largest of the runs needs. `asked`: by the person, who may know better. `cluster`: the address of the one
    that runs are on, if they are; then this machine says nothing."""
    if asked is not None:
        return Capacity(min(asked, runs), "as asked (--parallel)")
    if cluster:
        return Capacity(1, f"one after the other on the cluster at {cluster}; --parallel N for more")
    limits = {
        f"{machine.cores} cores, {most.cores} a run": machine.cores // most.cores,
        f"{machine.free / GIB:.1f} GiB of free memory, {most.memory / GIB:.1f} a run": int(machine.free // most.memory),
    }
    if most.gpus:
        limits[f"{len(machine.gpus)} GPUs, {most.gpus} a run"] = len(machine.gpus) // most.gpus
    return Capacity(max(1, min([runs, *limits.values()])), "; ".join(limits))


def devices_of(slot: int, most: Need, machine: Machine) -> dict[str, str]:
    """Environment of the run in that slot, from 0: the GPUs that no other slot has."""
    if not most.gpus or len(machine.gpus) < most.gpus * (slot + 1):
        return {}
    return {"CUDA_VISIBLE_DEVICES": ",".join(machine.gpus[most.gpus * slot : most.gpus * (slot + 1)])}
