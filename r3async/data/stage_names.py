"""Stages of a process's time, by role. `world/stages.py` measures them."""

from __future__ import annotations

_COMMON_STAGES = {
    "metrics": "measurements and their records",
    "calls": "tasks outside any stage, such as calls of other actors",
    "loop": "the event loop itself, callbacks included",
    "threads": "shared threads, for no stage of the loop",
    "runtime": "all other threads: Ray, ZeroMQ, torch",
    "idle": "nothing: the event loop is idle or waits for a core",
}
STAGES_BY_ROLE = {
    "generator": (
        "the generators' processes, without engines",
        {
            "play": "environments, samples, tasks of groups",
            "tokens": "chat template and tokenizer",
            "engine": "requests to the engine and their answers",
            "answers": "messages from the engine's process",
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
            "intake": "decoding and validating trajectories",
            "steps": "order of steps: groups, ages, what was trained",
            "prepare": "advantages, minibatches, weights of tokens",
            "pack": "micro-batches",
            "packer": "the rest of the thread that prepares and packs",
            "spool": "writing trajectories to disk",
            "model": "forward, loss and backward",
            "optimizer": "clipping and the update",
            "figures": "agreement of ranks, and metrics of a step",
            "snapshot": "copying new weights",
            "probe": "scoring the probe's text and the probed episodes",
            "writer": "writing new weights",
            "checkpoint": "copying and writing checkpoints",
            "torch": "loading the model, and the rest of its thread",
            **_COMMON_STAGES,
        },
    ),
    "conductor": (
        "the conductor's process",
        {
            "lease": "calls from generators",
            "steps": "order of steps, versions, checkpoints",
            "deliver": "new weights and restarts",
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
