"""Which directory a run gets, and what is in it when it begins: new, as its newest checkpoint left it, or refused."""

import asyncio
import json
import os
from typing import ClassVar

import pytest

from r3async.actors.run_directory import open_run_directory as open_run_of
from r3async.actors.run_directory import restart_run
from r3async.checkpoint import CheckpointDirectory, CheckpointError
from r3async.checkpoint.resume_checks import fingerprint_model
from r3async.checkpoint.run_starts import begin_lineage, describe_origin
from r3async.config import ConfigError, config_to_dict, load_config
from r3async.data.versions import Lineage
from r3async.record.events import open_event_log
from r3async.record.reading import read_json_objects
from r3async.tools.run_dir import open_named_run
from r3async.weights.probe import FAILED_MODEL_DIRECTORY
from r3async.world.disk import SystemFiles
from r3async.world.files import make_directory
from r3async.world.real import RealWorld
from tests.helpers.checkpoint import write_checkpoint


@pytest.fixture
def model(tmp_path):
    path = tmp_path / "start"
    path.mkdir()
    (path / "config.json").write_text("{}")
    return path


@pytest.fixture
def said():
    return []


def configured(model, *overrides):
    return load_config("quickstart", ["name=a", f"model.path={model}", *overrides])


def made(root, model, said, *steps, name="a", **changes):
    """A run directory as a run that made checkpoints after `steps` left it."""
    config = configured(model, f"name={name}")
    run = open_named_run(config, "quickstart", said.append, root)
    checkpoints = CheckpointDirectory(run.path / "checkpoints")
    for step in steps:
        with (run.path / "metrics.jsonl").open("a") as file:
            file.write(json.dumps({"step": step}) + "\n")
        write_checkpoint(
            checkpoints,
            step,
            config=config_to_dict(config),
            model_path=str(model),
            model_fingerprint=fingerprint_model(model),
            record_bytes={"metrics.jsonl": (run.path / "metrics.jsonl").stat().st_size},
            **changes,
        )
    with (run.path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 99}\n')
    (run.path / "trained.jsonl").write_text('{"step": 99}\n')
    run.lock.close()
    return run.path


def test_a_new_one_holds_the_configuration_and_is_the_latest(tmp_path, model, said):
    first = open_named_run(configured(model), "quickstart", said.append, tmp_path)
    second = open_named_run(load_config("quickstart"), "quickstart", said.append, tmp_path)
    assert first.resume_from is None
    assert second.path.name.startswith("quickstart-")
    assert (tmp_path / "latest").resolve() == second.path.resolve()
    assert load_config(str(first.path / "config.toml")).name == "a"
    assert first.find_start_model(configured(model)) == model
    assert second.find_start_model(load_config("quickstart")) is None
    first.lock.close()


def test_a_directory_that_is_of_no_run_is_refused(tmp_path, model, said):
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "notes.txt").write_text("mine")
    with pytest.raises(ConfigError, match=r'exists already and has no checkpoint to resume from.*resume="none"'):
        open_named_run(configured(model), "quickstart", said.append, tmp_path)
    (tmp_path / "a" / "checkpoints" / "step-00000001.partial").mkdir(parents=True)  # One that was begun is none.
    with pytest.raises(ConfigError, match="exists already"):
        open_named_run(configured(model), "quickstart", said.append, tmp_path)
    assert (tmp_path / "a" / "notes.txt").read_text() == "mine"


def test_a_start_that_ended_before_there_was_anything_is_made_again_under_its_name(tmp_path, model, said):
    (tmp_path / "a").mkdir()  # as a power failure leaves it
    for name in (".lock", ".lineages.json.0"):
        (tmp_path / "a" / name).write_bytes(b"")
    with pytest.raises(CheckpointError, match="/nowhere is neither"):
        open_named_run(configured(model, "resume=/nowhere"), "quickstart", said.append, tmp_path)
    run = open_named_run(configured(model), "quickstart", said.append, tmp_path)
    assert (run.resume_from, run.began_without_checkpoint) == (None, False)
    run.lock.close()
    other = made(tmp_path, model, said, 10, name="other")
    (other / "episodes.jsonl").mkdir()  # copying the other one's records fails midway
    with pytest.raises(IsADirectoryError):
        open_named_run(configured(model, "name=b", f"resume={other}"), "quickstart", said.append, tmp_path)
    assert (tmp_path / "b" / "metrics.jsonl").exists()
    (other / "episodes.jsonl").rmdir()
    run = open_named_run(configured(model, "name=b", f"resume={other}"), "quickstart", said.append, tmp_path)
    assert run.resume_from.state.steps == 10


def test_the_remains_of_a_process_with_the_same_id_do_not_prevent_a_start(tmp_path, model, said):
    (tmp_path / f".latest-{os.getpid()}").symlink_to("gone")
    run = open_named_run(configured(model), "quickstart", said.append, tmp_path)
    assert (tmp_path / "latest").resolve() == run.path.resolve()


def crashed(root, model, said, *overrides):
    """A run that took a lineage, and left records of steps that no checkpoint has."""
    run = open_named_run(configured(model, *overrides), "quickstart", said.append, root)
    origin = describe_origin(run.resume_from, run.path / "checkpoints") if run.resume_from else ""
    begin_lineage(run.path, run.resume_from, fingerprint_model(model), origin)
    (run.path / "metrics.jsonl").write_text('{"step": 1}\n')
    (run.path / "trained.jsonl").write_text('{"step": 1}\n')
    run.lock.close()
    return run.path


def test_a_run_that_was_lost_before_its_first_checkpoint_starts_again_under_its_name(tmp_path, model, said):
    path = crashed(tmp_path, model, said)
    (path / "spool").mkdir()
    (path / "spool" / "000000000-0000.spool").write_bytes(b"kept")
    run = open_named_run(configured(model, "learner.lr=3e-5"), "quickstart", said.append, tmp_path)
    assert (run.path, run.resume_from, run.began_without_checkpoint) == (path, None, True)
    assert (path / "metrics.jsonl").read_text() == (path / "trained.jsonl").read_text() == ""
    assert (path / "spool" / "000000000-0000.spool").read_bytes() == b"kept"
    assert any("has no checkpoint yet: the run starts again" in line for line in said)
    assert any("learner.lr was" in line for line in said)
    assert read_json_objects(path / "events.jsonl")[-1]["event"] == "begun_without_checkpoint"
    run.lock.close()
    with pytest.raises(CheckpointError, match="`seed` was 0 and is 7"):
        open_named_run(configured(model, "seed=7"), "quickstart", said.append, tmp_path)


def test_the_start_model_that_a_run_made_is_not_made_again(tmp_path, said):
    config = load_config("quickstart", ["name=a"])
    run = open_named_run(config, "quickstart", said.append, tmp_path)
    run.lock.close()
    assert run.find_start_model(config) is None
    (run.path / "init").mkdir()
    (run.path / "init" / "config.json").write_text("{}")
    again = open_named_run(config, "quickstart", said.append, tmp_path)
    assert again.find_start_model(config) == run.path / "init"


def test_a_run_that_began_elsewhere_and_has_no_checkpoint_resumes_only_from_there(tmp_path, model, said):
    """Or lineages of two runs would have one number."""
    other = made(tmp_path, model, said, 10, lineage=Lineage(3))
    path = crashed(tmp_path, model, said, "name=b", f"resume={other}")
    with pytest.raises(ConfigError, match="began from r step 10 and has no checkpoint of its own yet: set `resume`"):
        open_named_run(configured(model, "name=b"), "quickstart", said.append, tmp_path)
    run = open_named_run(configured(model, "name=b", f"resume={other}"), "quickstart", said.append, tmp_path)
    assert run.resume_from.state.steps == 10
    assert begin_lineage(path, run.resume_from, "m", "r step 10").past == {3: 10, 4: 10}
    crashed(tmp_path, model, said, "name=c")
    with pytest.raises(ConfigError, match="began from its start model and has no checkpoint"):
        open_named_run(configured(model, "name=c", f"resume={other}"), "quickstart", said.append, tmp_path)


def test_one_with_checkpoints_resumes_from_the_newest_and_forgets_what_came_later(tmp_path, model, said):
    path = made(tmp_path, model, said, 10, 20)
    make_directory(path / FAILED_MODEL_DIRECTORY)  # it ended there because a probe failed
    run = open_named_run(configured(model, "learner.lr=3e-5"), "quickstart", said.append, tmp_path)
    assert run.path == path
    assert run.resume_from.state.steps == 20
    assert [json.loads(line)["step"] for line in (path / "metrics.jsonl").open()] == [10, 20]
    assert (path / "trained.jsonl").read_text() == ""
    assert not (path / FAILED_MODEL_DIRECTORY).exists()
    assert any("learner.lr was" in line for line in said)
    assert load_config(str(path / "config.toml")).learner.lr == 3e-5
    assert run.find_start_model(configured(model)) == model


def test_what_a_resume_does_not_take_back_is_kept(tmp_path, model, said):
    path = made(tmp_path, model, said, 10, 20)
    kept = ["events.jsonl", "timeline.jsonl", "logs/learner.log", "stacks/learner.txt", "routes/learner-1.routes"]
    for name in kept:
        (path / name).parent.mkdir(exist_ok=True)
        (path / name).write_text('{"event": "before"}\n')
    run = open_named_run(configured(model, "name=a"), "quickstart", said.append, tmp_path)
    assert run.resume_from.state.steps == 20
    run.lock.close()
    for name in kept:
        assert (path / name).read_text().startswith('{"event": "before"}\n'), name


def test_an_older_checkpoint_of_its_own_can_be_named(tmp_path, model, said):
    path = made(tmp_path, model, said, 10, 20)
    step = path / "checkpoints" / "step-00000010"
    run = open_named_run(configured(model, f"resume={step}"), "quickstart", said.append, tmp_path)
    assert run.resume_from.state.steps == 10
    assert CheckpointDirectory(path / "checkpoints").list_steps() == [10]
    assert (path / "checkpoints" / "step-00000020.superseded").is_dir()


def test_a_checkpoint_that_is_named_is_read_and_verified_once(tmp_path, model, said):
    class Counting(SystemFiles):
        opened: ClassVar[list[str]] = []

        def open(self, path, **how):
            self.opened.append(path.name)
            return super().open(path, **how)

    class World(RealWorld):
        files = Counting()

    path = made(tmp_path, model, said, 10)
    config = configured(model, f"resume={path / 'checkpoints' / 'step-00000010'}")
    run = asyncio.run(open_run_of(config, path, said.append, world=World()))
    run.lock.close()
    assert run.resume_from.state.steps == 10
    assert Counting.opened.count("learner-00000-of-00001.safetensors") == 1


def test_a_run_can_begin_where_another_one_was(tmp_path, model, said):
    path = made(tmp_path, model, said, 10, 20)
    config = configured(model, "name=b", f"resume={path / 'checkpoints' / 'step-00000010'}")
    run = open_named_run(config, "quickstart", said.append, tmp_path)
    assert run.path == tmp_path / "b"
    assert run.resume_from.state.steps == 10
    assert [json.loads(line)["step"] for line in (run.path / "metrics.jsonl").open()] == [10]
    assert CheckpointDirectory(path / "checkpoints").list_steps() == [10, 20]  # The other one is as it was.
    assert (path / "metrics.jsonl").read_text().count("\n") == 3
    # Its own first checkpoint is not there yet when a process dies: it begins where it began.
    assert asyncio.run(restart_run(config, run, said.append)).resume_from.state.steps == 10


def test_another_runs_checkpoint_is_not_mixed_into_one_that_has_its_own(tmp_path, model, said):
    path = made(tmp_path, model, said, 10)
    made(tmp_path, model, said, 20, name="b")
    with pytest.raises(ConfigError, match=r"is of another run than .*b.*choose another `name`"):
        open_named_run(configured(model, "name=b", f"resume={path}"), "quickstart", said.append, tmp_path)
    assert CheckpointDirectory(tmp_path / "b" / "checkpoints").list_steps() == [20]


def test_to_start_again_keeps_the_old_one_under_another_name(tmp_path, model, said):
    for number in (1, 2):
        made(tmp_path, model, said, 10)
        run = open_named_run(configured(model, "resume=none"), "quickstart", said.append, tmp_path)
        run.lock.close()
        assert run.resume_from is None
        assert not (run.path / "metrics.jsonl").exists()
        assert CheckpointDirectory(tmp_path / f"a.superseded-{number}" / "checkpoints").list_steps() == [10]
        for file in sorted(run.path.rglob("*"), reverse=True):
            file.rmdir() if file.is_dir() else file.unlink()


def test_a_run_that_still_writes_is_not_moved_aside(tmp_path, model, said, monkeypatch):
    monkeypatch.setattr("r3async.actors.run_directory.LOCK_WAIT_SECONDS", 0.2)
    running = open_named_run(configured(model), "quickstart", said.append, tmp_path)
    with pytest.raises(ConfigError, match="is in use by another process"):
        open_named_run(configured(model, "resume=none"), "quickstart", said.append, tmp_path)
    assert (running.path / "config.toml").exists()
    assert not (tmp_path / "a.superseded-1").exists()


@pytest.mark.parametrize(
    ("overrides", "error", "message"),
    [
        (["seed=7"], CheckpointError, r"`seed` was 0 and is 7.*resume=\"none\""),
        (["steps=20"], ConfigError, "has made 20 of 20 steps: set `steps` to more"),
        (["resume=/nowhere"], CheckpointError, "/nowhere is neither a checkpoint nor a run"),
    ],
)
def test_what_cannot_resume_is_refused_and_changes_nothing(tmp_path, model, said, overrides, error, message):
    path = made(tmp_path, model, said, 10, 20)
    open_event_log(path, "conductor").info("run_finished", steps=20, stopped=False, updates=20)
    before = {p: p.read_bytes() for p in path.rglob("*") if p.is_file()}
    with pytest.raises(error, match=message):
        open_named_run(configured(model, *overrides), "quickstart", said.append, tmp_path)
    assert {p: p.read_bytes() for p in path.rglob("*") if p.is_file()} == before
    open_named_run(configured(model), "quickstart", said.append, tmp_path)  # The lock is free.


def test_another_start_model_is_refused(tmp_path, model, said):
    made(tmp_path, model, said, 10)
    (model / "model.safetensors").write_bytes(b"trained meanwhile")
    run = open_named_run(configured(model), "quickstart", said.append, tmp_path)
    with pytest.raises(CheckpointError, match="is not the one that the run began with"):
        run.find_start_model(configured(model))


def test_a_run_that_was_moved_finds_the_model_that_it_made(tmp_path, said):
    config = load_config("quickstart", ["name=a"])
    inside = tmp_path / "runs" / "a" / "init"
    inside.mkdir(parents=True)
    (inside / "config.json").write_text("{}")
    write_checkpoint(
        CheckpointDirectory(inside.parent / "checkpoints"),
        5,
        config=config_to_dict(config),
        model_path="/gone/runs/a/init",
        model_fingerprint=fingerprint_model(inside),
    )
    run = open_named_run(config, "quickstart", said.append, tmp_path / "runs")
    assert run.find_start_model(config) == inside


def test_a_damaged_newest_checkpoint_is_said_and_the_one_before_it_taken(tmp_path, model, said):
    path = made(tmp_path, model, said, 10, 20)
    part = next((path / "checkpoints" / "step-00000020").glob("learner-*"))
    part.write_bytes(part.read_bytes()[:-1])
    found = []
    report = lambda event, **facts: found.append((event, facts["step"]))  # noqa: E731
    run = open_named_run(configured(model), "quickstart", said.append, tmp_path, report)
    assert run.resume_from.state.steps == 10
    assert found == [("checkpoint_bad", 20)]


def test_after_a_loss_the_run_starts_again_also_without_a_checkpoint(tmp_path, model, said):
    run = open_named_run(configured(model), "quickstart", said.append, tmp_path)
    (run.path / "metrics.jsonl").write_text('{"step": 1}\n')
    again = asyncio.run(restart_run(configured(model), run, said.append))
    assert again.resume_from is None
    assert (run.path / "metrics.jsonl").read_text() == ""
    write_checkpoint(CheckpointDirectory(run.path / "checkpoints"), 2)
    (run.path / "metrics.jsonl").write_text('{"step": 3}\n')
    assert asyncio.run(restart_run(configured(model), again, said.append)).resume_from.state.steps == 2
    assert (run.path / "metrics.jsonl").read_text() == ""
