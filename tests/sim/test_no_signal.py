"""Whole runs, simulated, in which nothing can be learnt: what they tell, and how they end."""

import pytest
import torch
from safetensors.torch import load_file

from r3async.actors.process import NotTrained, RunFailed
from r3async.checkpoint import CheckpointDirectory
from r3async.config import load_config
from r3async.envs import Action, StepResult
from r3async.learner.policy_loss import LossInputs, PolicyLoss
from r3async.record.reading import read_json_objects
from r3async.rollout.scripted import DIGEST_TENSOR
from r3async.views.summary import NOT_TRAINED, summarize_run
from tests.ray.test_resume_run import events
from tests.sim.whole import Game

HERE = "tests.sim.test_no_signal"
STEPS = 30
"""More than a run may skip in a row (`supervise.max_skipped_steps`)."""
REAL_LEARNER = ["learner.backend=torch", "weights.probe=false"]
"""It has a gradient, and the scripted engine does not answer as it does."""


class Indifferent(Game):
    """Every answer is as good as any other."""

    async def step(self, action: Action) -> StepResult:
        return StepResult(0.3, done=True)


def spoilt(inputs: LossInputs) -> PolicyLoss:
    """A loss whose gradient is not finite."""
    return PolicyLoss(inputs.logprobs * float("nan"), torch.zeros_like(inputs.mask))


def test_steps_with_zero_variance_alone_change_nothing_and_do_not_call_themselves_training(machine):
    assert load_config("quickstart").supervise.max_skipped_steps < STEPS
    flat = [f"env.name={HERE}:Indifferent", f"checkpoint.every_steps={STEPS // 2}"]
    with pytest.raises(NotTrained, match=rf"none of {STEPS} steps made an update \({STEPS} x zero variance\)"):
        machine.train(f"steps={STEPS}", *flat)
    run_dir = machine.run_dir
    assert "trained model" not in machine.person.screen
    assert not (run_dir / "model").exists()

    rows = read_json_objects(run_dir / "metrics.jsonl")
    assert [row["version"] for row in rows] == list(range(1, STEPS + 1))  # slots were freed all the same
    assert {row["advantage/zero_variance_share"] for row in rows} == {1.0}
    assert {(row["optimizer/updates"], row["optimizer/zero_variance"]) for row in rows} == {(0.0, 1.0)}
    (event,) = events(run_dir, "zero_variance")
    assert (event["step"], event["level"]) == (1, "warning")
    assert not events(run_dir, "step_skipped")
    (ended,) = events(run_dir, "run_finished")
    assert (ended["updates"], ended["model"]) == (0, None)

    summary = summarize_run(run_dir)
    assert (summary.status, summary.updates, summary.steps_with_zero_variance) == (NOT_TRAINED, 0, STEPS)

    for step in (STEPS // 2, STEPS):
        (part,) = CheckpointDirectory(run_dir / "checkpoints").step_path(step).glob("learner-*.safetensors")
        kept = load_file(part)
        assert not [name for name in kept if "exp_avg" in name]
        assert not kept[f"master/{DIGEST_TENSOR}"].any()  # as it began

    with pytest.raises(
        NotTrained, match=rf"none of {STEPS + 2} steps made an update \(2 x zero variance\)"
    ):  # nor after a resume
        machine.train(f"steps={STEPS + 2}", *flat)


def test_a_run_whose_gradients_are_never_finite_fails_at_the_limit_with_its_cause(machine):
    limit = 3
    reason = r"4 steps in a row .*supervise\.max_skipped_steps = 3: 4 x gradient not finite"
    settings = ["steps=50", f"algorithm.policy_loss={HERE}:spoilt", f"supervise.max_skipped_steps={limit}"]
    with pytest.raises(RunFailed, match=reason):
        machine.train(*settings, *REAL_LEARNER)
    run_dir = machine.run_dir
    assert len(events(run_dir, "step_skipped")) == limit + 1
    (failed,) = events(run_dir, "run_failed")
    assert "supervise.max_skipped_steps" in failed["error"]
    summary = summarize_run(run_dir)
    assert summary.status == "failed"
    assert "gradient not finite" in summary.reason
    assert not (run_dir / "model").exists()
