"""What a resume is refused for, with which words; and when a checkpoint is due."""

from __future__ import annotations

import msgspec
import pytest

from r3async.checkpoint import (
    CheckpointError,
    CheckpointSchedule,
    check_resume_settings,
    check_start_model,
    restore_admission,
)
from r3async.checkpoint.directory import fingerprint_model, rewind_records
from r3async.checkpoint.state import decode_state, encode_state
from r3async.config import CheckpointConfig, ConfigError, ScheduleConfig, config_from_dict, config_to_dict
from r3async.schedule.admission import AdmissionController
from tests.helpers.checkpoint import run_state


def changed(**changes):
    saved = config_to_dict(config_from_dict({"name": "a", "seed": 1}))
    data = {"name": "b", "resume": "auto", "seed": 1}
    for key, value in changes.items():
        *sections, last = key.split("__")
        inner = data
        for section in sections:
            inner = inner.setdefault(section, {})
        inner[last] = value
    return check_resume_settings(saved, config_from_dict(data))


def test_settings_of_training_may_differ_and_are_named():
    assert changed() == {}
    differ = changed(
        steps=500,
        learner__lr=1e-5,
        learner__parallel={"dp": 2},
        algorithm__rollout_kl__target=0.1,
        generator__count=4,
    )
    assert differ["learner.lr"] == (1e-6, 1e-5)
    assert differ["algorithm.rollout_kl.target"] == (None, 0.1)
    assert set(differ) == {
        "steps",
        "learner.lr",
        "learner.parallel.dp",
        "algorithm.rollout_kl.target",
        "generator.count",
    }


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("seed", 2, "`seed` was 1 and is 2"),
        ("env__args", {"letters": 5}, "`env.args.letters` was None and is 5"),
        ("schedule__prompts_per_step", 8, "`schedule.prompts_per_step` was 16 and is 8"),
        ("learner__backend", "torch", "`learner.backend` was 'megatron' and is 'torch'"),
        ("model__path", "/other", "`model.path` was '' and is '/other'"),
    ],
)
def test_what_may_not_differ_is_named_with_both_values_and_with_what_may(key, value, said):
    with pytest.raises(CheckpointError) as error:
        changed(**{key: value, "steps": 500})
    assert said in str(error.value)
    assert "`steps` was" not in str(error.value)
    assert "What may differ: steps, learner.lr" in str(error.value)
    assert 'resume="none"' in str(error.value)


def test_a_setting_that_was_added_later_has_its_default():
    config = config_to_dict(config_from_dict({}))
    del config["schedule"]["minibatches_per_step"], config["checkpoint"]
    config["env"]["gone"] = "x"
    with pytest.raises(CheckpointError, match=r"`env\.gone` was 'x' and is None"):
        check_resume_settings(config, config_from_dict({}))
    del config["env"]["gone"]
    assert check_resume_settings(config, config_from_dict({})) == {}


def test_another_start_model_is_refused(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(bytes(300_000))
    state = run_state(3, model_path=str(tmp_path), model_fingerprint=fingerprint_model(tmp_path))
    check_start_model(state, tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    check_start_model(state, tmp_path)
    for at in (0, 150_000, 299_999):
        data = bytearray(300_000)
        data[at] = 1
        weights.write_bytes(data)
        with pytest.raises(CheckpointError, match=r"is not the one that the run began with.*model\.path"):
            check_start_model(state, tmp_path)
    weights.unlink()
    (tmp_path / "config.json").unlink()
    with pytest.raises(CheckpointError, match=r"it has no config\.json"):
        check_start_model(state, tmp_path)


def test_the_books_come_back_as_they_were():
    state = run_state(
        3,
        since_publication=(1, 8),
        consumed_beyond=[13, 15],
        admission={"next_group": 20, "waiting": [[14, [0, 2]]]},
        record_bytes={"metrics.jsonl": 100},
        pending_rows=[{"step": 3, "loss/policy": 0.1 + 0.2}],
        elapsed=1.5,
    )
    assert decode_state(encode_state(state)) == state


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"schema": 1}, "schema 1, and this version of r3async reads 2"),
        ({"steps": -1}, "never negative"),
        ({"consumed": 2**63}, r"below 2\*\*63"),
        ({"record_bytes": {"metrics.jsonl": -1}}, "lengths, and never negative"),
        ({"consumed_beyond": [14, 12]}, "a group before 12, or that group itself"),
        ({"since_publication": [1]}, "since_publication"),
        ({"unheard": 1}, "unheard"),
    ],
)
def test_books_that_contradict_themselves_are_refused(changes, message):
    data = msgspec.to_builtins(run_state(3)) | changes
    with pytest.raises(CheckpointError, match=message):
        decode_state(msgspec.json.encode(data))


def test_records_go_back_to_the_step(tmp_path):
    (tmp_path / "metrics.jsonl").write_text("one\ntwo\nthree\n")
    (tmp_path / "routing.jsonl").write_text("one\n")
    lengths = {"metrics.jsonl": 8, "routing.jsonl": 100, "gone.jsonl": 5, "../metrics.jsonl": 0, "x" * 5000: 0}
    assert rewind_records(tmp_path, lengths) == {"metrics.jsonl": 6}
    assert (tmp_path / "metrics.jsonl").read_text() == "one\ntwo\n"
    assert (tmp_path / "routing.jsonl").read_text() == "one\n"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"waiting": [[0, None]]}, r"Expected `array`, got `null` - at `\$.waiting"),
        ({"next_group": 10**12}, "1000000000000 slots are taken, of 4"),
        (
            {"uninstalled": [[4, 1]]},
            "1 slots are taken, of 4: 0 groups were leased and 0 consumed, of which 1 hold their slots",
        ),
        ({"version": 4}, "version 3 was published after version 4"),
    ],
)
def test_leases_that_do_not_add_up_are_refused(changes, message):
    schedule = ScheduleConfig(max_staleness=1, prompts_per_step=2, group_size=2)
    admission = AdmissionController(schedule, choose_task=lambda group: group)
    state = run_state(3, version=3, consumed=0, admission=admission.state_dict() | {"version": 3})
    restore_admission(admission, state)
    with pytest.raises(CheckpointError, match=rf"run\.json: admission: {message}"):
        restore_admission(admission, msgspec.structs.replace(state, admission=state.admission | changes))


def test_a_checkpoint_is_due_by_steps_and_by_time():
    now = [0.0]
    due = CheckpointSchedule(CheckpointConfig(every_steps=10, every_minutes=2), lambda: now[0])
    assert [s for s in range(1, 31) if due(s) and due.mark_begun(s) is None] == [10, 20, 30]
    assert not due(31)
    now[0] = 120.0
    assert due(31)
    due.mark_begun(31)
    assert not due(32)
    best = CheckpointSchedule(
        CheckpointConfig(every_steps=10, every_minutes=0, keep_best="reward_mean"), lambda: now[0], 4
    )
    assert [s for s in range(1, 21) if best(s) and best.mark_begun(s) is None] == [4, 8, 10, 12, 16, 20]
    never = CheckpointSchedule(CheckpointConfig(every_steps=0, every_minutes=0), lambda: now[0])
    now[0] = 1e9
    assert not any(never(s) for s in range(1, 1000))


@pytest.mark.parametrize("bad", ["keep_last=0", "every_steps=-1", "write_timeout=0", "every_minutes=-0.5"])
def test_settings_of_checkpoints_are_checked(bad):
    key, value = bad.split("=")
    with pytest.raises(ConfigError, match=rf"\[checkpoint\] `{key}`"):
        config_from_dict({"checkpoint": {key: float(value) if "." in value else int(value)}})
    with pytest.raises(ConfigError, match="`resume` must be"):
        config_from_dict({"resume": ""})
