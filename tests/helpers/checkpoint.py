"""Learners that are stopped and continued: what runs on each rank, and states compared bit by bit."""

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import torch
import torch.distributed as dist

from r3async.checkpoint import CheckpointDirectory, FileEntry, RunState
from r3async.checkpoint.rank_files import (
    LearnerMetadata,
    LearnerStateReader,
    RankState,
    SliceValues,
    TensorSlice,
    write_rank_file,
)
from r3async.checkpoint.state import TrainingState
from r3async.config import Config, config_from_dict
from r3async.learner import build_learner
from r3async.learner.backend import LearnerBackend
from r3async.learner.micro_batches import MicroBatch, pack_samples
from tests.helpers.steps import train_minibatch


def settings(backend: str = "megatron", *, dtype: str = "float32", **parallel: int) -> Config:
    """Return a configuration with everything that has a memory: warm-up, weight decay, and a trust region that
    adapts."""
    learner = {"backend": backend, "dtype": dtype, "lr": 1e-2, "warmup_steps": 8, "weight_decay": 0.1}
    return config_from_dict(
        {
            "learner": {**learner, "parallel": parallel},
            "algorithm": {"rollout_kl": {"coef": 0.001, "target": 0.05}},
            "routing": {"min_recorded_fraction": 0.0},
            "episode": {"max_total_tokens": 256, "max_prompt_tokens": 128},
        }
    )


def batches(count: int, *, first: int = 0) -> list[list[MicroBatch]]:
    """Return the batches of the `count` steps from `first` on, all different."""
    # Imported here and not above, because simulated starts train nothing.
    from tests.helpers import models as hm
    from tests.helpers.parity import BUDGET, LENGTHS

    return [pack_samples(hm.make_samples(s, LENGTHS, temperature=0.8), BUDGET) for s in range(first, first + count)]


def train(learner: LearnerBackend, config: Config, steps: Sequence[list[MicroBatch]]) -> list[dict[str, float]]:
    from tests.helpers.parity import of_rank

    p = config.learner.parallel
    rank = dist.get_rank() if p.world_size > 1 else 0
    return [train_minibatch(learner, of_rank(step, rank // (p.tp * p.cp) % p.dp, p.dp)).metrics for step in steps]


def begun(path: Path, config: Config, count: int, out: Path) -> tuple[list[dict[str, float]], FileEntry]:
    """Run on every rank: make `count` steps with a new learner, then write its state to `out`."""
    learner = build_learner(config, path)
    try:
        return train(learner, config, batches(count)), write_rank_file(out, learner.capture_state())
    finally:
        learner.close()


def continued(path: Path, config: Config, saved: Sequence[Path], first: int, count: int, out: Path) -> Any:
    """Run on every rank: continue from `saved` with a new learner for `count` steps (if any), then write its state to
    `out`."""
    learner = build_learner(config, path)
    try:
        learner.restore_state(LearnerStateReader(saved))
        assert learner.update_count == first
        return train(learner, config, batches(count, first=first)), write_rank_file(out, learner.capture_state())
    finally:
        learner.close()


def on_ranks(ranks: Any, function: Any, *args: Any) -> list[Any]:
    """Return what `function` returns on each rank, or in this process if `ranks` is None."""
    return [function(*args)] if ranks is None else ranks.call(function, *args)


def paths(out: Path) -> list[Path]:
    return sorted(out.glob("learner-*.safetensors"))


def contents(saved: Sequence[Path]) -> dict[str, torch.Tensor]:
    """Return every whole tensor except the ranks' random number generators."""
    parts = LearnerStateReader(saved)
    names = [n for n in parts.tensor_names() if not n.startswith("rng/")]
    return {n: parts.read_slice(TensorSlice.full_tensor(n, parts.tensor_shape(n))) for n in names}


def assert_same(a: Sequence[Path], b: Sequence[Path]) -> None:
    """Assert that the tensors are the same bit by bit, and the facts the same except for the number of ranks."""
    ours, theirs = contents(a), contents(b)
    assert set(ours) == set(theirs)
    for name, tensor in ours.items():
        assert torch.equal(tensor, theirs[name]), name
    facts = [msgspec.structs.replace(LearnerStateReader(x).metadata, world=1) for x in (a, b)]
    assert facts[0] == facts[1]


def run_state(steps: int, **changes: Any) -> RunState:
    defaults: dict[str, Any] = {
        "run_id": "r",
        "config": {"seed": 0},
        "model_path": "/m",
        "model_fingerprint": "f",
        "version": steps,
        "consumed": 4 * steps,
    }
    return RunState(steps=steps, **(defaults | changes))


def training_state(steps: int, **changes: Any) -> TrainingState:
    return TrainingState(**({"steps": steps, "version": steps, "consumed": 4 * steps} | changes))


async def hold_nothing() -> None:
    """Return at once; for `CheckpointWriter.save_checkpoint` if the state to write does not change."""


def tiny_state(value: float = 1.0, *, rank: int = 0, world: int = 1) -> RankState:
    """Return a learner's state of one vector, of which each rank has eight values, laid end to end."""
    place = TensorSlice("master/w", (8 * world,), (8 * rank,), (8,))
    facts = LearnerMetadata("torch", "m", int(value), world, {"coef": 0.5, "error": None})
    return RankState(rank, facts, [SliceValues(place, torch.full((8,), float(value)))])


def write_checkpoint(checkpoints: CheckpointDirectory, step: int, **changes: Any) -> Path:
    partial = checkpoints.begin_checkpoint(step)
    record = write_rank_file(partial, tiny_state(step), files=checkpoints.files)
    return checkpoints.commit_checkpoint(run_state(step, **changes), [record])


def fresh(directory: Path) -> Path:
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True)
    return directory


def in_two_parts(ranks: Any, model_path: Path, tmp_path: Path, config: Config) -> None:
    """Assert that ten steps equal, bit by bit, five and five after a restart; on `ranks`, or in this process if
    None."""
    straight, half, whole = (fresh(tmp_path / name) for name in ("straight", "half", "whole"))
    ten = on_ranks(ranks, begun, model_path, config, 10, straight)
    five = on_ranks(ranks, begun, model_path, config, 5, half)
    rest = on_ranks(ranks, continued, model_path, config, paths(half), 5, 5, whole)
    for (all_steps, _), (before, _), (after, _) in zip(ten, five, rest, strict=True):
        assert before + after == all_steps
        assert len({m["rollout_kl/coef"] for m in all_steps}) == 10, "the controller has to have moved"
        assert len({m["lr"] for m in all_steps}) == 8, "and the warm-up"
    assert_same(paths(straight), paths(whole))
    moved = contents(paths(whole)), contents(paths(half))
    assert not any(torch.equal(moved[0][n], moved[1][n]) for n in moved[0] if n.endswith("input_layernorm.weight"))
