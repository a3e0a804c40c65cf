"""Stages of a process's time, by role. `world/stages.py` measures them."""

from __future__ import annotations

_COMMON_STAGES = {
    "metrics": "what is measured, and written of it",
    "calls": "tasks that were made outside of any stage, as for calls of other actors",
    "loop": "the event loop itself, with callbacks",
    "threads": "shared threads, for no stage of the loop",
    "runtime": "all other threads: of Ray, ZeroMQ, torch",
    "idle": "the event loop has nothing to do, or waits for a core",
}
STAGES_BY_ROLE = {
    "generator": (
        "the generators' processes, without engines",
        {
            "play": "environments, samples, tasks of groups",
            "tokens": "chat template and tokenizer",
            "engine": "requests to the engine, and what becomes of an answer",
            "answers": "messages of the engine's process",
            "encode": "validation and wire format",
            "messages": "sockets and acknowledgements",
            "lease": "calls to the conductor",
            "install": "new weights",
            "evaluation": "episodes of evaluations",
            **_COMMON_STAGES,
        },
    ),
    "learner": (
        "the learner's process, without further ranks",
        {
            "messages": "sockets and acknowledgements",
            "intake": "trajectories decoded and validated",
            "steps": "steps in order: groups, ages, what was trained",
            "prepare": "advantages, minibatches, weights of tokens",
            "pack": "micro-batches",
            "packer": "what else the thread of these two does",
            "spool": "trajectories on disk",
            "model": "forward, loss and backward",
            "optimizer": "clipping and the update",
            "figures": "what ranks agree on, and metrics of a step",
            "snapshot": "the copy of new weights",
            "probe": "the probe's text scored, and the probed episodes of a step",
            "writer": "new weights written",
            "checkpoint": "a checkpoint copied and written",
            "torch": "the model loaded, and whatever else its thread does",
            **_COMMON_STAGES,
        },
    ),
    "conductor": (
        "the conductor's process",
        {
            "lease": "calls of generators",
            "steps": "steps, versions, checkpoints in order",
            "deliver": "new weights, and restarts",
            "watch": "stalls and failed tasks",
            **_COMMON_STAGES,
        },
    ),
}
"""The processes of each role, and a description of each stage of their time (`world/stages.py`).

The stages account for all processor time and all wall time of the role.
"""
SINGLE_KIND_STAGES = {"threads": "cpu", "runtime": "cpu", "idle": "wall"} | dict.fromkeys(
    [
        "prepare",
        "pack",
        "packer",
        "spool",
        "model",
        "optimizer",
        "figures",
        "snapshot",
        "probe",
        "writer",
        "checkpoint",
        "torch",
    ],
    "cpu",
)
"""Stages with only one kind of time, `cpu` or `wall`; wall time is measured on the
event loop only."""
