"""`r3async cluster`: what a run needs beside what a Ray cluster has, before anything starts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from r3async.config import Config
from r3async.tools.memory import GIB
from r3async.tools.plan import Plan

QUERY_SECONDS = 15

GPU_GIB = {
    **{"T4": 16, "L4": 24, "A10G": 24, "L40S": 48, "A100-40G": 40, "A100-80G": 80},
    **{"H20": 96, "H100": 80, "H200": 141, "B200": 180, "GB200": 186, "B300": 288, "GB300": 288},
}
"""By Ray's `accelerator_type`: GiB of one device, from NVIDIA's data sheets. A plain A100 may be either."""


class Node(msgspec.Struct, frozen=True):
    """One alive machine of the cluster and its resources, free or not."""

    name: str
    cpus: float
    gpus: float
    memory: float
    accelerator: str = ""


class Fit(msgspec.Struct, frozen=True):
    """`problems`: why the run cannot start there; none, and it can."""

    nodes: list[Node]
    problems: list[str]


def read_nodes(states: Sequence[Any]) -> list[Node]:
    """Nodes from Ray's state API (`ray.util.state.list_nodes`)."""
    out = []
    for state in states:
        if state.state != "ALIVE":
            continue
        total = state.resources_total or {}
        kinds = [key.removeprefix("accelerator_type:") for key in total if key.startswith("accelerator_type:")]
        out.append(
            Node(
                state.node_name or state.node_ip,
                float(total.get("CPU", 0)),
                float(total.get("GPU", 0)),
                float(total.get("memory", 0)),
                kinds[0] if kinds else "",
            )
        )
    return out


def ask_cluster(address: str) -> list[Node]:
    """The nodes of the cluster whose dashboard is at `address` (http). Raises what Ray raises."""
    from ray.util.state import list_nodes

    return read_nodes(list_nodes(address=address, detail=True, timeout=QUERY_SECONDS))


def check_fit(plan: Plan, config: Config, nodes: Sequence[Node]) -> Fit:
    """Whether every process finds a place. Counts what the cluster has, not what is free: other jobs come and go."""
    problems = []
    cpus, gpus = sum(n.cpus for n in nodes), sum(n.gpus for n in nodes)
    if plan.cpus > cpus:
        problems.append(
            f"the run needs {plan.cpus} CPUs, and the cluster has {cpus:g}: lower `generator.count`, or add nodes"
        )
    if plan.gpus > gpus:
        problems.append(
            f"the run needs {plan.gpus} GPUs, and the cluster has {gpus:g}: lower `generator.count` or `learner.parallel`, or "
            "add nodes"
        )
    widest = max((n.gpus for n in nodes), default=0.0)
    for process in plan.processes:
        if process.gpus > max(widest, 1):
            problems.append(
                f"one {process.role} needs {process.gpus} GPUs on one node, and the largest has {widest:g}: lower "
                "`generator.engine_args.tensor_parallel_size`"
            )
    ranks = config.learner.parallel.world
    if plan.gpus and ranks > widest:
        problems.append(
            f"the learner's {ranks} ranks meet on one host, and the largest has {widest:g} GPUs: lower `learner.parallel`"
        )
    problems += [p for n in nodes if plan.gpus and (p := _too_small(n, plan, config))]
    if not plan.gpus:
        wanted = plan.rank.total * config.learner.parallel.world + config.generator.count * plan.engine.weights
        memory = sum(n.memory for n in nodes)
        if nodes and wanted > memory:
            problems.append(f"the run needs {wanted / GIB:.1f} GiB of memory, and the cluster has {memory / GIB:.1f}")
    return Fit(list(nodes), problems)


def _too_small(node: Node, plan: Plan, config: Config) -> str:
    has = GPU_GIB.get(node.accelerator)
    if not node.gpus or has is None or has >= config.cluster.gpu_gib or has * GIB >= plan.rank.total:
        return ""
    return (
        f"{node.name} has GPUs of {has} GiB ({node.accelerator}), and the plan is for `cluster.gpu_gib` = "
        f"{config.cluster.gpu_gib:g}: set that to {has}, and the plan will say what to change"
    )


def describe_fit(fit: Fit, plan: Plan) -> str:
    """Needs and possessions as text."""
    lines = [f"needs   {plan.cpus} CPUs, {plan.gpus} GPUs"]
    for node in fit.nodes:
        kind = f" ({node.accelerator})" if node.accelerator else ""
        lines.append(f"has     {node.name}: {node.cpus:g} CPUs, {node.gpus:g} GPUs{kind}, {node.memory / GIB:.1f} GiB")
    lines += [f"does not fit: {problem}" for problem in fit.problems] or ["it fits"]
    return "\n".join(lines)
