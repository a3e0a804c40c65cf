"""The learner's side of a checkpoint, when one is due, what a resume is refused for, and what every book begins with after it."""

import asyncio
import functools
import threading
import zlib

import msgspec
import pytest

from r3async.checkpoint import (
    CheckpointDirectory,
    CheckpointError,
    CheckpointSchedule,
    CheckpointWriter,
    check_resume_settings,
    check_start_model,
    open_checkpoint,
    restore_admission,
)
from r3async.checkpoint.rank_files import write_rank_file
from r3async.checkpoint.resume_checks import fingerprint_model
from r3async.checkpoint.rewind import rewind_records
from r3async.checkpoint.state import ConductorState, decode_state, encode_state
from r3async.config import CheckpointConfig, ConfigError, ScheduleConfig, config_from_dict, config_to_dict, load_config
from r3async.record.events import open_event_log
from r3async.record.reading import read_json_objects
from r3async.record.trained_trajectories import TRAINED_FILE, make_trained_step
from r3async.schedule.groups import GroupBuffer
from r3async.schedule.run_ahead import AdmissionController
from r3async.transport import TrajectoryLedger
from r3async.world.appending import AppendFile
from r3async.world.disk import SystemFiles
from r3async.world.real import REAL_WORLD, RealWorld
from tests.helpers.checkpoint import hold_nothing, run_state, tiny_state, training_state
from tests.unit.test_buffer import make_trajectory

CONDUCTOR = ConductorState(
    admission={"version": 3, "next_group": 20},
    record_bytes={"metrics.jsonl": 7},
    elapsed=1.5,
    generated_tokens=1000,
)


class Learner:
    """Holds a value; writing it fails while `full`."""

    def __init__(self):
        self.value, self.held, self.full = 0.0, None, False

    def hold(self):
        self.held = tiny_state(self.value)

    def write_state(self, directory):
        if self.full:
            (directory / "learner-00000-of-00001.safetensors").write_bytes(b"half")
            raise OSError(28, "No space left on device")
        held, self.held = self.held, None
        return [write_rank_file(directory, held)]

    async def save(self, writer, steps, then):
        async def hold():
            self.hold()

        state = training_state(steps, consumed_beyond=[4 * steps + 2], **msgspec.structs.asdict(CONDUCTOR))
        await writer.save_checkpoint(state, hold, self.write_state, then)


@pytest.fixture
def writer_of(tmp_path):
    def make(*overrides, world=REAL_WORLD):
        model = tmp_path / "model"
        model.mkdir(exist_ok=True)
        (model / "config.json").write_text("{}")
        config, events = load_config("quickstart", list(overrides)), open_event_log(tmp_path, "learner")
        return CheckpointWriter(config, "run", model, tmp_path, events, world=world)

    return make


async def save(writer, step, *then):
    def write(directory):
        return [write_rank_file(directory, tiny_state(step))]

    await writer.save_checkpoint(training_state(step), hold_nothing, write, *then)


def events_of(tmp_path):
    return [(e["event"], e["level"], e["step"]) for e in read_json_objects(tmp_path / "events.jsonl")]


async def test_what_is_written_is_the_copy_and_both_sides_state(writer_of, tmp_path):
    learner, written = Learner(), []
    learner.value = 3.0
    writer = writer_of()
    await learner.save(writer, 3, lambda: written.append(CheckpointDirectory(tmp_path / "checkpoints").list_steps()))
    learner.value = 4.0
    await writer.wait_until_written()
    assert written == [[3]]  # `then` is called when the checkpoint can be seen.
    opened = open_checkpoint(tmp_path / "checkpoints" / "step-00000003")
    assert opened.open_learner_state().metadata.steps == 3
    state = opened.state
    assert (state.steps, state.version, state.consumed, state.consumed_beyond) == (3, 3, 12, [14])
    assert (state.admission, state.generated_tokens) == (CONDUCTOR.admission, 1000)
    assert state.model_path == str(tmp_path / "model")


@pytest.mark.parametrize("asynchronous", ["true", "false"])
async def test_one_that_fails_is_told_and_training_goes_on_until_the_run_would_end_without_one(
    writer_of, tmp_path, asynchronous
):
    learner, written = Learner(), []
    writer = writer_of(f"checkpoint.asynchronous={asynchronous}")
    learner.full = True
    await learner.save(writer, 1, lambda: written.append(1))
    with pytest.raises(CheckpointError, match=r"step 1 could not be written.*No space left.*mend the cause"):
        await writer.wait_until_written()
    await learner.save(writer, 2, lambda: written.append(2))
    with pytest.raises(CheckpointError, match="step 2"):
        await writer.wait_until_written()
    learner.full = False
    await learner.save(writer, 3, lambda: written.append(3))
    await writer.wait_until_written()
    assert written == [3]
    assert CheckpointDirectory(tmp_path / "checkpoints").list_steps() == [3]
    assert [p.name for p in (tmp_path / "checkpoints").iterdir()] == ["step-00000003"], "nothing is left of the others"
    failed = [("checkpoint_failed", "error", 1), ("checkpoint_failed", "error", 2)]
    assert events_of(tmp_path) == [*failed, ("checkpoint_written", "info", 3)]
    assert "No space left" in read_json_objects(tmp_path / "events.jsonl")[0]["error"]


async def test_a_step_does_not_wait_for_the_writing_and_the_next_checkpoint_does(writer_of, tmp_path):
    writer, checkpoints = writer_of("checkpoint.keep_last=2"), CheckpointDirectory(tmp_path / "checkpoints")
    going, events = threading.Event(), []

    def slow(directory):
        assert going.wait(120)
        return [write_rank_file(directory, tiny_state(1))]

    await writer.save_checkpoint(training_state(1), hold_nothing, slow, lambda: events.append("written"))
    assert checkpoints.list_steps() == [], "nothing is there before all of it is"
    saving = asyncio.create_task(save(writer, 2, lambda: events.append("next")))
    await asyncio.sleep(0.2)
    assert events == []
    assert not saving.done()
    going.set()
    await asyncio.wait_for(saving, 120)
    assert events[0] == "written"
    assert 1 in checkpoints.list_steps()
    for step in (3, 4):
        await save(writer, step)
    await writer.wait_until_written()
    assert checkpoints.list_steps() == [3, 4]


async def test_one_that_is_written_is_no_failure_when_older_ones_cannot_be_removed(writer_of, tmp_path):
    class Stuck(SystemFiles):
        def remove_tree(self, path):
            if path.suffix == ".removing":
                raise PermissionError(13, "Permission denied")
            super().remove_tree(path)

    class World(RealWorld):
        files = Stuck()

    writer = writer_of("checkpoint.keep_last=1", world=World())
    for step in (1, 2):
        await save(writer, step)
        await writer.wait_until_written()
    events = [e["event"] for e in read_json_objects(tmp_path / "events.jsonl")]
    assert events == ["checkpoint_written", "checkpoint_written", "checkpoint_prune_failed"]
    assert CheckpointDirectory(tmp_path / "checkpoints").recover_newest().state.steps == 2


async def test_a_writing_that_never_ends_is_not_waited_for(writer_of, tmp_path):
    never = threading.Event()
    writer = writer_of(f"supervise.patience={0.2 / 1800}")
    await writer.save_checkpoint(training_state(1), hold_nothing, lambda directory: never.wait(30) and [])
    with pytest.raises(CheckpointError, match=r"not written within 0\.2 s \(supervise\.patience\)"):
        await save(writer, 2)
    never.set()
    await writer.wait_until_written()


async def test_without_asynchronous_it_is_there_when_the_call_returns(writer_of, tmp_path):
    writer = writer_of("checkpoint.asynchronous=false")
    await save(writer, 1)
    assert CheckpointDirectory(tmp_path / "checkpoints").recover_newest().state.steps == 1


async def test_a_place_of_ones_own_for_checkpoints(writer_of, tmp_path):
    writer = writer_of(f"checkpoint.directory={tmp_path / 'elsewhere'}")
    await Learner().save(writer, 1, lambda: None)
    await writer.wait_until_written()
    assert CheckpointDirectory(tmp_path / "elsewhere").list_steps() == [1]
    assert not (tmp_path / "checkpoints").exists()


def test_a_resumed_buffer_and_ledger_take_nothing_that_was_trained():
    buffer = GroupBuffer(1, window=3, head=4, beyond=[6])
    ledger = TrajectoryLedger(buffer.consumed)
    assert ledger.oldest_group == 4
    for group in range(8):
        over = group < 4 or group == 6
        assert ledger.is_group_consumed(group) == over
        assert buffer.add(make_trajectory(group), 1) != over
    assert buffer.newest_group == 7
    assert buffer.choose_groups(3, 3, 0) == [4, 5, 7]
    buffer.take_groups([4, 5])
    assert (ledger.oldest_group, ledger.is_group_consumed(5)) == (7, True)


def test_the_record_of_what_was_trained_names_each_trajectory_and_its_tokens(tmp_path):
    groups = [[make_trajectory(0, 0), make_trajectory(0, 1)], [make_trajectory(3)]]
    AppendFile(tmp_path / TRAINED_FILE, world=REAL_WORLD).append(
        msgspec.json.encode(make_trained_step(7, 6, groups, 2))
    )
    tokens = groups[0][0].samples[0].table["token_ids"]
    assert read_json_objects(tmp_path / TRAINED_FILE) == [
        {
            "step": 7,
            "version": 6,
            "groups": [0, 3],
            "trajectories": ["g0e0", "g0e1", "g3e0"],
            "crc32": [zlib.crc32(tokens.tobytes())] * 3,
            "lineage": 2,
            "lineages": [0, 0, 0],
            "newest": [3, 3, 3],
        }
    ]
    other = make_trajectory(0, 0, token_ids=tokens[::-1].copy())
    assert make_trained_step(7, 6, [[other]]).crc32 != make_trained_step(7, 6, [[groups[0][0]]]).crc32


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
        steps=500, learner__lr=1e-5, learner__parallel={"dp": 2}, algorithm__rollout_kl__target=0.1, generator__count=4
    )
    assert differ["learner.lr"] == (1e-6, 1e-5)
    assert differ["algorithm.rollout_kl.target"] == (None, 0.1)
    named = {"steps", "learner.lr", "learner.parallel.dp", "algorithm.rollout_kl.target", "generator.count"}
    assert set(differ) == named


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
        (
            {"config": {"env": {"args": functools.reduce(lambda inner, _: [inner], range(200), [])}}},
            "more than 128 lists",
        ),
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


@pytest.mark.parametrize("bad", ["keep_last=0", "every_steps=-1", "every_minutes=-0.5"])
def test_settings_of_checkpoints_are_checked(bad):
    key, value = bad.split("=")
    with pytest.raises(ConfigError, match=rf"\[checkpoint\] `{key}`"):
        config_from_dict({"checkpoint": {key: float(value) if "." in value else int(value)}})
    with pytest.raises(ConfigError, match="`resume` must be"):
        config_from_dict({"resume": ""})
