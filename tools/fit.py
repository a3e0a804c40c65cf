"""Check whether a run fits a Ray cluster, and where its processes go there:
`r3async submit --dry-run`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from r3async.actors.placement_plan import (
    ProcessLayout,
    ResourceDemand,
    check_transfers,
    plan_layout,
)
from r3async.config import Config, ConfigError
from r3async.world import ClusterNode

from .memory import GIB
from .plan import RunPlan

QUERY_TIMEOUT_SECONDS = 15

GPU_MEMORY_GIB = {
    **{"T4": 14, "L4": 22, "A10G": 21, "L40S": 44, "A100-40G": 39, "A100-80G": 79},
    **{"H20": 95, "H100": 79, "H200": 139, "B200": 178, "GB200": 183, "B300": 267, "GB300": 267},
}
"""Memory of one device in GiB as CUDA reports it, rounded down, by Ray's `accelerator_type`. It is
less than a data sheet says: 79.11 of an H100's 80. Assumed from the data sheets by the same share:
GB200, B300, GB300. A plain A100 may be either.
"""


class ClusterFit(msgspec.Struct, frozen=True):
    """The fit of a run to a cluster.

    Attributes:
        problems: Reasons why the run cannot start there; empty if it can.
    """

    nodes: list[ClusterNode]
    problems: list[str]
    layout: ProcessLayout | None = None


def parse_nodes(states: Sequence[Any]) -> list[ClusterNode]:
    """Parse nodes from Ray's state API (`ray.util.state.list_nodes`), as if idle: it does not
    say what is free."""
    out = []
    for state in states:
        if state.state != "ALIVE":
            continue
        total = state.resources_total or {}
        kinds = [
            key.removeprefix("accelerator_type:")
            for key in total
            if key.startswith("accelerator_type:")
        ]
        name = state.node_name or state.node_ip
        cpus = float(total.get("CPU", 0))
        gpus = float(total.get("GPU", 0))
        key = getattr(state, "node_id", name)
        out.append(
            ClusterNode(
                key,
                name,
                cpus,
                gpus,
                cpus,
                gpus,
                float(total.get("memory", 0)),
                kinds[0] if kinds else "",
            )
        )
    return sorted(out, key=lambda node: (node.name, node.node_id))


def query_nodes(address: str) -> list[ClusterNode]:
    """Return the nodes of the cluster whose dashboard is at `address` (http). Raises
    what Ray raises."""
    from ray.util.state import list_nodes

    return parse_nodes(list_nodes(address=address, detail=True, timeout=QUERY_TIMEOUT_SECONDS))


def check_cluster_fit(plan: RunPlan, config: Config, nodes: Sequence[ClusterNode]) -> ClusterFit:
    """Check that every process finds a place. Counts what the cluster has, not what is free: other
    jobs come and go."""
    problems = []
    layout = None
    gpus = sum(n.gpus for n in nodes)
    if plan.gpus and not gpus:
        problems.append(f"the run needs {plan.gpus} GPUs, and the cluster has none")
    else:
        try:
            layout = plan_layout(ResourceDemand.from_config(config), nodes)
            check_transfers(config, layout)
        except ConfigError as error:
            problems.append(str(error))
    problems += [p for n in nodes if plan.gpus and (p := _describe_small_gpu(n, plan, config))]
    if not plan.gpus and not gpus:
        wanted = (
            plan.rank.total_bytes * config.learner.parallel.world_size
            + config.generator.count * plan.engine.weights
        )
        memory = sum(n.memory_bytes for n in nodes)
        if nodes and wanted > memory:
            problems.append(
                f"the run needs {wanted / GIB:.1f} GiB of memory, and the cluster has "
                f"{memory / GIB:.1f}"
            )
    return ClusterFit(list(nodes), problems, layout)


def _describe_small_gpu(node: ClusterNode, plan: RunPlan, config: Config) -> str:
    has = GPU_MEMORY_GIB.get(node.accelerator_type)
    if (
        not node.gpus
        or has is None
        or has >= config.cluster.gpu_gib
        or has * GIB >= plan.rank.total_bytes
    ):
        return ""
    return (
        f"{node.name} has GPUs of {has} GiB ({node.accelerator_type}), and the plan is for "
        f"`cluster.gpu_gib` = {config.cluster.gpu_gib:g}: set that to {has}, and the plan will "
        "say what to change"
    )


def describe_cluster_fit(fit: ClusterFit, plan: RunPlan) -> str:
    """Describe what the run needs and what the cluster has."""
    lines = [f"needs   {plan.cpus} CPUs, {plan.gpus} GPUs"]
    for node in fit.nodes:
        kind = f" ({node.accelerator_type})" if node.accelerator_type else ""
        lines.append(
            f"has     {node.name}: {node.cpus:g} CPUs, {node.gpus:g} GPUs{kind}, "
            f"{node.memory_bytes / GIB:.1f} GiB"
        )
    if fit.layout is not None:
        lines += [f"places  {line}" for line in fit.layout.describe_hosts(fit.nodes)]
    lines += [f"does not fit: {problem}" for problem in fit.problems] or ["it fits"]
    return "\n".join(lines)
