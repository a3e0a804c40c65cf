"""A recording: the steps of a run, made again from what it trained on, are the same bit by bit; where not, it says so."""

import asyncio
import dataclasses
import importlib
import json
import shutil

import msgspec
import pytest
from typer.testing import CliRunner

from r3async.actors.rank_actor import LocalRank
from r3async.config import config_to_dict
from r3async.config.load import config_from_dict
from r3async.data.versions import Lineage
from r3async.learner import build_learner
from r3async.learner.micro_batch_plan import build_cost_model
from r3async.learner.optimizer import AdamSettings
from r3async.learner.trainer import Trainer
from r3async.record.recording import RecordingError, StepRecorder, find_recorded_steps, read_recorded_step
from r3async.tools.__main__ import app, main
from r3async.tools.replay import NullReporter, replay_run
from tests.helpers import checkpoint as hc
from tests.helpers import models as hm
from tests.helpers.cli import typed
from tests.helpers.world import Reports
from tests.unit.test_ahead import NoTrace, played, stand_in

STEPS = 4


def recorded_config(path, backend="torch", **sections):
    data = config_to_dict(hc.settings(backend))
    data |= {"observe": {"record": "full"}, "model": {**data["model"], "path": str(path)}, "steps": STEPS}
    for name, values in sections.items():
        data[name] = {**data[name], **values}
    return config_from_dict(data)


def record(run, config, path, steps=range(1, STEPS + 1), lineage=0, learner=None):
    """Train those steps as a learner actor does, and keep them. Returns what was reported."""
    reports = Reports()

    async def train() -> None:
        recorder = StepRecorder(run, config, Lineage(lineage), reports)
        backend = learner or build_learner(config, path)
        cost = build_cost_model(json.loads((path / "config.json").read_text()))
        trainer = Trainer(config, cost, LocalRank(config, backend), NoTrace(), NullReporter(), stand_in)
        try:
            for step in steps:
                recorder.add(step, step - 1, trainer.update_weights(step, step - 1, trainer.prepare_step(played(step))))
            await asyncio.wait_for(recorder.wait_written(), 120)
        finally:
            if learner is None:
                backend.close()
            await recorder.close()

    asyncio.run(train())
    return reports


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return hm.make_hf_model(tmp_path_factory.mktemp("model"), num_hidden_layers=2)


@pytest.fixture(scope="module")
def run(tmp_path_factory, model):
    """Record a run for tests that only read it."""
    path = tmp_path_factory.mktemp("run")
    assert record(path, recorded_config(model), model) == []
    return path


@pytest.fixture(scope="module")
def recorded_run(tmp_path_factory, model):
    """Record a run whose steps have two minibatches, for tests that only read it."""
    path = tmp_path_factory.mktemp("run")
    assert record(path, recorded_config(model, schedule={"minibatches_per_step": 2}), model) == []
    return path


@pytest.mark.long
@pytest.mark.parametrize("backend", ["torch", "megatron"])
def test_the_same_steps_are_made_bit_by_bit(request, tmp_path, model, backend):
    run = tmp_path
    if backend == "torch":
        run = request.getfixturevalue("recorded_run")
    else:
        assert record(run, recorded_config(model, backend, schedule={"minibatches_per_step": 2}), model) == []
    done = replay_run(run)
    assert (done.first, done.last, done.difference) == (1, STEPS, None)
    step, groups = read_recorded_step(find_recorded_steps(run)[1])
    assert step.step == 2
    assert [len(group) for group in groups] == [4, 4]
    assert len(step.minibatches) == 2
    weights = {m["weights"] for path in find_recorded_steps(run) for m in read_recorded_step(path)[0].minibatches}
    assert len(weights) > STEPS


def test_other_settings_are_a_counterfactual_on_the_same_data(run, tmp_path):
    losses = []
    done = replay_run(
        run,
        changed_settings=["learner.lr=1e-4"],
        out=tmp_path / "out",
        progress=lambda recorded, metrics: losses.append((recorded.metrics["loss/policy"], metrics["loss/policy"])),
    )
    assert (done.last, done.difference, done.changed) == (STEPS, None, ["learner.lr=1e-4"])
    assert losses[0][0] == losses[0][1], "the first step is from the same weights"
    assert any(ours != theirs for ours, theirs in losses[1:])
    rows = [msgspec.json.decode(line) for line in (tmp_path / "out" / "metrics.jsonl").read_bytes().splitlines()]
    assert [row["step"] for row in rows] == list(range(1, STEPS + 1))
    assert (tmp_path / "out" / "model" / "model.safetensors").is_file()


def test_another_loss_is_a_counterfactual_whatever_the_trainer_reports_of_it(run):
    """GSPO's range is within the noise of rounding here, and the trainer warns of it."""
    done = replay_run(run, changed_settings=["algorithm.policy_loss=gspo", "learner.dtype=bfloat16"])
    assert (done.last, done.difference) == (STEPS, None)


def test_steps_that_a_resume_took_back_are_not_replayed(tmp_path, model):
    """A second lineage from step 3 on, and what the first made of steps 3 and 4 is there."""
    config = recorded_config(model)
    learner = build_learner(config, model)
    record(tmp_path, config, model, steps=(1, 2), learner=learner)
    assert learner.capture_state().metadata.steps
    record(tmp_path, config, model, steps=(3, 4), lineage=1, learner=learner)
    learner.close()
    record(tmp_path, recorded_config(model, learner={"lr": 1.0}), model, steps=(3, 4, 5))
    assert [path.name for path in find_recorded_steps(tmp_path)] == [
        *("000000001-0000.step", "000000002-0000.step"),
        *("000000003-0001.step", "000000004-0001.step"),
    ]


def test_a_missing_or_damaged_step_is_named(run, tmp_path):
    run = shutil.copytree(run, tmp_path / "run")
    second = find_recorded_steps(run)[1]
    data = bytearray(second.read_bytes())
    data[-20] ^= 1
    second.write_bytes(data)
    with pytest.raises(RecordingError, match="000000002-0000"):
        replay_run(run)
    second.unlink()
    with pytest.raises(RecordingError, match="no step 2, of 4"):
        replay_run(run)
    with pytest.raises(RecordingError, match="no recording"):
        find_recorded_steps(run / "elsewhere")


def test_what_cannot_be_written_is_reported_and_ends_nothing(tmp_path, model):
    (tmp_path / "recording").write_text("a file in its place")
    reports = record(tmp_path, recorded_config(model), model)
    assert {event for event, _ in reports} == {"not_recorded"}
    assert {facts["step"] for _, facts in reports} == {"settings", 1, 2, 3, 4}


def test_without_the_setting_nothing_is_looked_at(tmp_path, model):
    record(tmp_path, recorded_config(model, observe={"record": "off"}), model)
    assert not (tmp_path / "recording").exists()


# -- what a change of the code is found by ------------------------------------------------------------------------------


def scaled(factor, at=0):
    """Of a function's result, or of one of its parts."""

    def around(call):
        def changed(*args, **kwargs):
            out = call(*args, **kwargs)
            if isinstance(out, tuple):
                parts = [part * factor if i == at else part for i, part in enumerate(out)]
                return type(out)(*parts) if hasattr(out, "_fields") else tuple(parts)
            return [o * factor for o in out] if isinstance(out, list) else out * factor

        return changed

    return around


def with_argument(name, change):
    """Of a function that is called with that keyword, or has it in that place."""

    def around(call):
        def changed(*args, **kwargs):
            if isinstance(name, int):
                args = (*args[:name], change(args[name]), *args[name + 1 :])
            else:
                kwargs[name] = change(kwargs[name])
            return call(*args, **kwargs)

        return changed

    return around


def of_learner(change):
    """The place where a minibatch begins, and a change of the backend there."""

    def around(call):
        def changed(backend, *args, **kwargs):
            change(backend)
            return call(backend, *args, **kwargs)

        return changed

    return "train_step.agree_on_counts", around


def setting_of_adam(name, factor):
    def change(backend):
        own, lr = backend.config.learner, backend.optimizer.lr
        settings = AdamSettings(lr, own.betas, own.eps, own.weight_decay, own.max_grad_norm)
        backend.optimizer.use_settings(dataclasses.replace(settings, **{name: factor(getattr(own, name))}))

    return change


def moment(optimizer):
    for state in optimizer.iter_states():
        if "exp_avg_sq" in state:
            state["exp_avg_sq"].mul_(1 + 1e-6)


def counted(call):
    def changed(*args, **kwargs):
        result = call(*args, **kwargs)
        return msgspec.structs.replace(
            result, metrics={**result.metrics, "batch/tokens": result.metrics["batch/tokens"] + 1}
        )

    return changed


PLANTED = {
    "advantages of another scale": ("advantages.compute_baseline_and_scale", scaled(1.0001, at=1), "advantages"),
    "an advantage with another baseline": ("advantages.compute_baseline_and_scale", scaled(1.1, at=0), "advantages"),
    "other weights in the loss": ("prepare.compute_loss_weights", scaled(1.01), "advantages"),
    "groups in another minibatch": ("prepare.partition_groups", lambda call: lambda *a: call(*a)[::-1], "advantages"),
    "shorter micro-batches": ("trainer.pack_for_ranks", with_argument(1, lambda n: 8), "packing"),
    "samples in another order": ("trainer.pack_for_ranks", with_argument(0, lambda s: s[::-1]), "packing"),
    "another temperature": ("torch.model.token_logprobs", with_argument(3, lambda t: t * 1.001), "logprobs"),
    "rounded logits": ("torch.model.token_logprobs", with_argument(0, lambda m: m.bfloat16().float()), "logprobs"),
    "attention with another scale": (
        "packed_attention._attend_bucket",
        with_argument(6, lambda s: (s or 0.25) * 1.01),
        "logprobs",
    ),
    "routes that are not replayed": (*of_learner(lambda b: setattr(b.replay, "is_enabled", False)), "logprobs"),
    "a loss of another scale": ("minibatch.compute_loss", scaled(1.0001, at=0), "gradients"),
    "larger advantages in the loss": (
        "minibatch.TokenBatch",
        with_argument("advantages", lambda a: a * 1.01),
        "gradients",
    ),
    "another coefficient of the trust region": (
        "trust_region.TrustRegion._clamp_coefficient",
        scaled(1.01),
        "gradients",
    ),
    "another norm that gradients are clipped to": (
        *of_learner(setting_of_adam("max_grad_norm", lambda n: 0.01)),
        "weights",
    ),
    "another learning rate": ("optimizer.compute_learning_rate", scaled(1.001), "weights"),
    "another weight decay": (*of_learner(setting_of_adam("weight_decay", lambda w: 2 * w)), "weights"),
    "another epsilon": (*of_learner(setting_of_adam("eps", lambda e: 10 * e)), "weights"),
    "another beta": (*of_learner(setting_of_adam("betas", lambda b: (b[0], b[1] * 0.99))), "weights"),
    "moments that were changed behind it": (
        "digests.StageDigests.pop_digests",
        lambda call: lambda self, optimizer, biases: (moment(optimizer), call(self, optimizer, biases))[1],
        "moments",
    ),
    "a figure that is counted otherwise": ("train_step.build_minibatch_result", counted, "metrics"),
}


CHANGED_STEP = 2
"""The first before which the code made a step as it was."""


@pytest.mark.long
@pytest.mark.parametrize("name", PLANTED)
def test_a_change_of_the_code_is_found_in_its_step_and_stage(recorded_run, monkeypatch, name):
    target, change, stage = PLANTED[name]
    owner, _, attribute = f"r3async.learner.{target}".rpartition(".")
    count, prepared = 0, Trainer.prepare_step

    def counting(self, groups):
        nonlocal count
        count += 1
        if count == CHANGED_STEP:
            owned = resolved(owner)
            monkeypatch.setattr(owned, attribute, change(getattr(owned, attribute)))
        return prepared(self, groups)

    monkeypatch.setattr(Trainer, "prepare_step", counting)
    difference = replay_run(recorded_run).difference
    assert difference is not None
    assert (difference.step, difference.stage) == (CHANGED_STEP, stage)


def resolved(path):
    """A module, or a class in one."""
    try:
        return importlib.import_module(path)
    except ModuleNotFoundError:
        module, _, name = path.rpartition(".")
        return getattr(importlib.import_module(module), name)


def test_the_command_says_whether_all_is_the_same(recorded_run, monkeypatch):
    (recorded_run / "config.toml").touch()
    done = CliRunner().invoke(app, ["replay", str(recorded_run)])
    assert done.exit_code == 0, done.output
    assert "every digest and metric is the run's" in done.output
    monkeypatch.setattr("r3async.learner.optimizer.compute_learning_rate", lambda *_: 1e-3)
    done = CliRunner().invoke(app, ["replay", str(recorded_run), "--json"])
    assert done.exit_code == 1
    said = json.loads(done.stdout.splitlines()[-1])
    assert (said["difference"]["step"], said["difference"]["stage"]) == (1, "weights")


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["no-such-run"], "no-such-run"),
        (["--with", "learner.lrr=1"], "learner.lrr"),
        (["--from", "3"], "step"),
        (["--model", "/nowhere"], "--model"),
    ],
)
def test_a_mistake_is_one_line_and_ends_with_2(recorded_run, tmp_path, words, named):
    (recorded_run / "config.toml").touch()
    done = typed(
        "replay", *(words if words[0] == "no-such-run" else [str(recorded_run), *words]), cwd=tmp_path, main=main
    )
    assert done.returncode == 2, done.stdout + done.stderr
    assert named in done.stderr
    assert "Traceback" not in done.stderr
