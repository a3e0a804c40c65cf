"""The learner's part of `bench replay`'s branches: what it thinks of a branch, whose prefix has one call's routes or another's.

`python -m r3async.tools.bench.replay_branches DIRECTORY` reads `learner.json` (a `LearnerJob` of the moved model) there and what
`replay_branch_rollouts` wrote, and writes `branches-done.json` (a `Branches`).
"""

from __future__ import annotations

from pathlib import Path

import msgspec
import numpy as np

from r3async.data.records import Sample
from r3async.learner.batch.packing import pack
from r3async.learner.megatron.backend import MegatronLearner
from r3async.tools.bench.jobs import job_main, progress
from r3async.tools.bench.replay_learner import learner_of
from r3async.tools.bench.replay_records import Branches, LearnerJob
from r3async.tools.bench.replay_rollouts import read_samples

DTYPE = "float32"
"""Of the learner, as of the engine: with the same weights and routes they then agree, and what is left is the routes' doing."""


def deltas(learner: MegatronLearner, job: LearnerJob, samples: list[Sample]) -> np.ndarray:
    """float64 `[M]`: what the learner, with the recorded routes, thinks of each sampled token, less what its engine thought."""
    micro_batches = pack(samples, job.max_tokens_per_micro_batch)
    scored = learner.logprobs(micro_batches, replay=True)
    pairs = [(s.astype(np.float64), m.table) for s, m in zip(scored, micro_batches, strict=True)]
    return np.concatenate([(s - t["rollout_logprobs"])[t["loss_mask"]] for s, t in pairs])


def k3(delta: np.ndarray) -> float:
    return float(np.mean(np.expm1(delta) - delta))


def moved_routes(own: list[Sample], inherited: list[Sample]) -> float:
    """Share of (position, MoE layer) whose set of experts is not the same in both, over all recorded positions."""
    different = recorded = 0
    for one, other in zip(own, inherited, strict=True):
        a, b = (np.sort(s.table["routed_experts"][one.table["routing_recorded"]], -1) for s in (one, other))
        different, recorded = different + int((a != b).any(-1).sum()), recorded + a.shape[0] * a.shape[1]
    return different / recorded


def main(directory: Path) -> None:
    job = msgspec.json.decode((directory / "learner.json").read_bytes(), type=LearnerJob)
    first, own, inherited = (read_samples(directory / f"{name}.bin") for name in ("first", "own", "inherited"))
    progress(directory, f"learner in {DTYPE}, at the engine's version")
    with learner_of(job, DTYPE, "rollout") as learner:
        drift, with_own, with_inherited = (deltas(learner, job, samples) for samples in (first, own, inherited))
    done = Branches(
        dtype=DTYPE,
        branch_tokens=len(with_own),
        drift=k3(drift),
        k3_own=k3(with_own),
        k3_inherited=k3(with_inherited),
        max_abs_own=float(np.abs(with_own).max()),
        max_abs_inherited=float(np.abs(with_inherited).max()),
        moved_routes=moved_routes(own, inherited),
    )
    (directory / "branches-done.json").write_bytes(msgspec.json.encode(done))


if __name__ == "__main__":
    job_main(main)
