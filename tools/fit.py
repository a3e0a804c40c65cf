"""`r3async cluster`: whether a run fits a Ray cluster, and where its processes go there."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from r3async.actors.layout import Demand, Layout, Unplaceable, lay_out
from r3async.config import Config
from r3async.tools.memory import GIB
from r3async.tools.plan import Plan
from r3async.world import Node

QUERY_SECONDS = 15

GPU_GIB = {
    **{"T4": 16, "L4": 24, "A10G": 24, "L40S": 48, "A100-40G": 40, "A100-80G": 80},
    **{"H20": 96, "H100": 80, "H200": 141, "B200": 180, "GB200": 186, "B300": 288, "GB300": 288},
}
"""By Ray's `accelerator_type`: GiB of one device, from NVIDIA's data sheets. A plain A100 may be either."""


class Fit(msgspec.Struct, frozen=True):
    """`problems`: why the run cannot start there; none, and it can."""

    nodes: list[Node]
    problems: list[str]
    layout: Layout | None = None


def read_nodes(states: Sequence[Any]) -> list[Node]:
    """Nodes from Ray's state API (`ray.util.state.list_nodes`), as if nobody used them: it does not say what is free."""
    out = []
    for state in states:
        if state.state != "ALIVE":
            continue
        total = state.resources_total or {}
        kinds = [key.removeprefix("accelerator_type:") for key in total if key.startswith("accelerator_type:")]
        name = state.node_name or state.node_ip
        cpus, gpus = float(total.get("CPU", 0)), float(total.get("GPU", 0))
        key = getattr(state, "node_id", name)
        out.append(Node(key, name, cpus, gpus, cpus, gpus, float(total.get("memory", 0)), kinds[0] if kinds else ""))
    return sorted(out, key=lambda node: (node.name, node.key))


def ask_cluster(address: str) -> list[Node]:
    """The nodes of the cluster whose dashboard is at `address` (http). Raises what Ray raises."""
    from ray.util.state import list_nodes

    return read_nodes(list_nodes(address=address, detail=True, timeout=QUERY_SECONDS))


def check_fit(plan: Plan, config: Config, nodes: Sequence[Node]) -> Fit:
    """Whether every process finds a place. Counts what the cluster has, not what is free: other jobs come and go."""
    problems, layout = [], None
    gpus = sum(n.gpus for n in nodes)
    if plan.gpus and not gpus:
        problems.append(f"the run needs {plan.gpus} GPUs, and the cluster has none")
    else:
        try:
            layout = lay_out(Demand.of(config), nodes)
        except Unplaceable as error:
            problems.append(str(error))
    problems += [p for n in nodes if plan.gpus and (p := _too_small(n, plan, config))]
    if not plan.gpus and not gpus:
        wanted = plan.rank.total * config.learner.parallel.world + config.generator.count * plan.engine.weights
        memory = sum(n.memory for n in nodes)
        if nodes and wanted > memory:
            problems.append(f"the run needs {wanted / GIB:.1f} GiB of memory, and the cluster has {memory / GIB:.1f}")
    return Fit(list(nodes), problems, layout)


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
    if fit.layout is not None:
        lines += [f"places  {line}" for line in fit.layout.describe(fit.nodes)]
    lines += [f"does not fit: {problem}" for problem in fit.problems] or ["it fits"]
    return "\n".join(lines)
