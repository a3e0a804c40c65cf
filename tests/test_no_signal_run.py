"""Whole runs in which nothing can be learnt: what they leave alone, what they tell, and how they end."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file

from actors.deaths import NotTrained, RunFailed
from r3async.algorithms.policy_loss import LossInputs, PolicyLoss
from r3async.checkpoint import Checkpoints
from r3async.envs.base import Action, Message, StepResult
from r3async.observe.metrics import read_metrics
from r3async.observe.summary import NOT_TRAINED, summarize
from tests.test_resume_run import events, run, settings
from tools.cli import UNTRAINED

pytestmark = [pytest.mark.ray, pytest.mark.timeout(300), pytest.mark.usefixtures("local_ray")]

HERE = "tests.test_no_signal_run"
STEPS = 100


class Indifferent:
    """Every answer is as good as any other."""

    def __init__(self, reward: float = 0.3):
        self.reward = reward

    async def reset(self, task_seed: int) -> list[Message]:
        return [Message("user", "whatever")]

    async def step(self, action: Action) -> StepResult:
        return StepResult(self.reward, done=True)


def spoilt(inputs: LossInputs) -> PolicyLoss:
    """A loss whose gradient is not finite."""
    return PolicyLoss(inputs.logprobs * float("nan"), torch.zeros_like(inputs.mask))


def weights_and_moments(checkpoint):
    """By name, of a checkpoint of one rank."""
    (part,) = checkpoint.glob("learner-*.safetensors")
    return load_file(part)


def test_a_hundred_steps_without_contrast_change_nothing_and_do_not_call_themselves_training(untrained, tmp_path):
    overrides = settings(
        untrained,
        "flat",
        f"steps={STEPS}",
        f"env.name={HERE}:Indifferent",
        "checkpoint.every_steps=50",
        "learner.lr=1e-2",
    )
    command = [sys.executable, "-m", "tools.cli", "train", "quickstart", "--runs", str(tmp_path), *overrides]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280)
    run_dir, screen = tmp_path / "flat", done.stdout + done.stderr
    assert done.returncode == UNTRAINED, screen
    assert f"nothing was trained: none of {STEPS} steps made an update ({STEPS} x no contrast)" in screen
    assert "trained model" not in screen
    assert screen.count("no update: no contrast") == STEPS  # the live line of each step
    assert not (run_dir / "model").exists()

    rows = read_metrics(run_dir / "metrics.jsonl")
    assert [row["version"] for row in rows] == list(range(1, STEPS + 1))  # slots were freed all the same
    assert {row["advantage/zero_variance_share"] for row in rows} == {1.0}
    assert {(row["optimizer/updates"], row["optimizer/no_contrast"]) for row in rows} == {(0.0, 1.0)}
    (told,) = events(run_dir, "no_contrast")
    assert (told["step"], told["level"]) == (1, "warning")
    assert not events(run_dir, "step_skipped")
    (ended,) = events(run_dir, "run_finished")
    assert (ended["updates"], ended["model"]) == (0, None)

    summary = summarize(run_dir)
    assert (summary.status, summary.updates, summary.steps_without_contrast) == (NOT_TRAINED, 0, STEPS)
    assert "not trained" in screen

    start = load_file(untrained / "model.safetensors")
    for step in (50, STEPS):
        kept = weights_and_moments(Checkpoints(run_dir / "checkpoints").path(step))
        assert not [name for name in kept if "exp_avg" in name]
        found = {name: kept[key] for name in start for key in kept if key.endswith(name)}
        assert set(found) == set(start)
        assert all(torch.equal(found[name], start[name].float()) for name in start)

    with pytest.raises(NotTrained, match=r"none of 102 steps made an update \(2 x no contrast\)"):  # nor after a resume
        run(untrained, tmp_path, "flat", f"steps={STEPS + 2}", f"env.name={HERE}:Indifferent", "learner.lr=1e-2")


def test_a_run_whose_gradients_are_never_finite_fails_at_the_limit_with_its_cause(untrained, tmp_path):
    limit = 3
    with pytest.raises(
        RunFailed, match=r"4 steps in a row .*supervise\.max_skipped_steps = 3: 4 x gradient not finite"
    ):
        run(
            untrained,
            tmp_path,
            "spoilt",
            "steps=50",
            f"algorithm.policy_loss={HERE}:spoilt",
            f"supervise.max_skipped_steps={limit}",
        )
    run_dir = tmp_path / "spoilt"
    assert len(events(run_dir, "step_skipped")) == limit + 1
    (failed,) = events(run_dir, "run_failed")
    assert "supervise.max_skipped_steps" in failed["error"]
    summary = summarize(run_dir)
    assert summary.status == "failed"
    assert "gradient not finite" in summary.reason
    assert not (run_dir / "model").exists()
