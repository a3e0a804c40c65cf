"""A checkpoint is complete or not there; a bad one is never loaded; the newest intact one is never removed."""

import errno
import shutil
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
import torch

from r3async.checkpoint import CheckpointDirectory, CheckpointError, find_checkpoint, open_checkpoint
from r3async.checkpoint.evaluations import EvaluationFile, read_evaluations, write_evaluation
from r3async.checkpoint.manifest import CheckpointManifest, FileEntry, IncompatibleCheckpoint, decode_manifest
from r3async.checkpoint.rank_files import LearnerStateReader, TensorSlice, write_rank_file
from r3async.world.files import read_file
from tests.helpers.checkpoint import run_state, tiny_state, write_checkpoint


class Reported(list):
    def __call__(self, event, /, **facts):
        self.append((event, facts))


def names(directory: Path) -> list[str]:
    return sorted(p.name for p in directory.iterdir())


def written(directory: Path, *steps: int, **settings) -> CheckpointDirectory:
    """Return a directory with checkpoints of these steps."""
    checkpoints = CheckpointDirectory(directory, **settings)
    for step in steps:
        write_checkpoint(checkpoints, step)
    return checkpoints


def value(opened) -> float:
    return float(opened.open_learner_state().read_slice(TensorSlice.full_tensor("master/w", (8,)))[3])


def test_what_is_written_is_read_back(tmp_path):
    checkpoints = CheckpointDirectory(tmp_path / "checkpoints")
    path = write_checkpoint(checkpoints, 10, admission={"waiting": [[3, [0, 2]]]})
    assert path == tmp_path / "checkpoints" / "step-00000010"
    assert names(path) == ["learner-00000-of-00001.safetensors", "manifest.json", "run.json"]
    opened = checkpoints.recover_newest()
    assert opened.state == run_state(10, admission={"waiting": [[3, [0, 2]]]})
    assert value(opened) == 10
    assert opened.open_learner_state().metadata.trust_region == {"coef": 0.5, "error": None}


@pytest.mark.parametrize("file", ["manifest.json", "run.json", "learner-00000-of-00001.safetensors"])
@pytest.mark.parametrize("damage", ["truncated", "empty", "flipped", "gone", "longer"])
def test_a_damaged_newest_checkpoint_falls_back_and_says_why(tmp_path, file, damage):
    reported = Reported()
    checkpoints = written(tmp_path, 10, report_event=reported)
    path = write_checkpoint(checkpoints, 20) / file
    data = path.read_bytes()
    if damage == "gone":
        path.unlink()
    else:
        middle = len(data) // 2
        flipped = data[:middle] + bytes([data[middle] ^ 1]) + data[middle + 1 :]
        path.write_bytes({"truncated": data[:-1], "empty": b"", "flipped": flipped, "longer": data + b"\0"}[damage])
    assert checkpoints.recover_newest().state.steps == 10
    ((event, facts),) = reported
    assert (event, facts["step"]) == ("checkpoint_bad", 20)
    assert file in facts["reason"]
    assert names(tmp_path) == ["step-00000010", "step-00000020.bad"], "the bad one is kept"
    assert facts["kept_as"] == str(tmp_path / "step-00000020.bad")
    write_checkpoint(checkpoints, 20)
    assert checkpoints.recover_newest().state.steps == 20


def test_a_run_none_of_whose_checkpoints_is_intact_is_not_begun_anew_in_silence(tmp_path):
    checkpoints = CheckpointDirectory(tmp_path)
    (write_checkpoint(checkpoints, 10) / "run.json").unlink()
    with pytest.raises(CheckpointError, match=r'step 10: run\.json.*resume="none"'):
        checkpoints.recover_newest()
    # A second try, with nothing left to read, must not begin again either.
    with pytest.raises(CheckpointError, match=r'resume="none"'):
        checkpoints.recover_newest()
    checkpoints.supersede_later(-1)
    assert checkpoints.recover_newest() is None


def test_a_directory_of_another_step_under_a_step_s_name_is_refused(tmp_path):
    path = write_checkpoint(CheckpointDirectory(tmp_path), 10)
    shutil.copytree(path, tmp_path / "step-00000030")
    with pytest.raises(CheckpointError, match="it is of step 10, not of the step in the directory's name"):
        open_checkpoint(tmp_path / "step-00000030")
    shutil.copytree(path, tmp_path / "best")
    assert open_checkpoint(tmp_path / "best").state.steps == 10, "under a name of one's own it is as good"


def test_a_manifest_from_elsewhere_can_not_name_files_outside(tmp_path):
    manifest = CheckpointManifest(1, 10, [FileEntry("../run.json", 0, "")])
    with pytest.raises(CheckpointError, match="is not the name of a file"):
        decode_manifest(manifest.encode())


def test_a_checkpoint_of_another_version_is_refused_by_name_and_stays_where_it_is(tmp_path, monkeypatch):
    checkpoints = written(tmp_path, 10)
    monkeypatch.setattr("r3async.checkpoint.directory.MANIFEST_SCHEMA", 2)
    later = write_checkpoint(checkpoints, 20)
    monkeypatch.undo()
    with pytest.raises(
        IncompatibleCheckpoint, match=r"step-00000020: .*layout 2, and this version of r3async reads layout 1"
    ):
        checkpoints.recover_newest()
    assert checkpoints.list_steps() == [10, 20], "no older one takes its place, nor is it set aside as damaged"
    assert (later / "manifest.json").exists()


def test_the_last_and_every_nth_are_kept(tmp_path):
    checkpoints = CheckpointDirectory(tmp_path, keep_last=2, keep_every=30)
    for step in range(10, 100, 10):
        write_checkpoint(checkpoints, step)
        checkpoints.prune_old()
    assert checkpoints.list_steps() == [30, 60, 80, 90]


@pytest.mark.parametrize("file", ["manifest.json", "learner-00000-of-00001.safetensors"])
def test_the_newest_intact_one_is_never_pruned(tmp_path, file):
    checkpoints = written(tmp_path, 10, 20, 30, keep_last=1)
    (tmp_path / "step-00000030" / file).write_bytes(b"broken")
    assert checkpoints.prune_old() == [10]
    assert checkpoints.list_steps() == [20, 30]
    assert checkpoints.recover_newest().state.steps == 20


def evaluate(checkpoints, step, reward=None):
    """`reward`: None while it is played."""
    figures = {} if reward is None else {"greedy/reward_mean": reward}
    write_evaluation(checkpoints.directory, EvaluationFile(step, 1.0, figures, figures))


def test_the_best_checkpoint_and_what_is_being_evaluated_are_never_pruned(tmp_path):
    checkpoints = written(tmp_path, 10, 20, 30, 40, 50, keep_last=1, keep_best="greedy/reward_mean")
    for step, reward in {0: 0.95, 10: 0.5, 20: 0.9, 30: 0.9, 35: 1.0, 40: None}.items():
        evaluate(checkpoints, step, reward)
    assert checkpoints.find_best() == (20, 0.9), "0 and 35 have no checkpoint; of equal ones the first"
    assert checkpoints.prune_old() == [10, 30]
    assert checkpoints.list_steps() == [20, 40, 50]
    evaluate(checkpoints, 40, 0.7)
    assert checkpoints.prune_old() == [40]
    assert CheckpointDirectory(tmp_path, keep_last=1).prune_old() == [20], "without the setting it has no privilege"


def test_nothing_is_pruned_while_an_evaluation_cannot_be_read(tmp_path, monkeypatch):
    """It may be that of the best checkpoint."""
    checkpoints = written(tmp_path, 10, 20, 30, keep_last=1, keep_best="greedy/reward_mean")
    for step in checkpoints.list_steps():
        evaluate(checkpoints, step, 1 / step)

    def has_no_descriptor(path, **options):
        if path.name == "evaluation-00000010.json":
            raise OSError(errno.EMFILE, "Too many open files")
        return read_file(path, **options)

    with monkeypatch.context() as patch:
        patch.setattr("r3async.checkpoint.evaluations.read_file", has_no_descriptor)
        with pytest.raises(OSError, match="Too many"):
            checkpoints.prune_old()
    assert checkpoints.list_steps() == [10, 20, 30]
    assert checkpoints.prune_old() == [20]


def test_evaluations_that_were_not_finished_or_are_taken_back_by_a_resume_are_removed(tmp_path):
    checkpoints = written(tmp_path, 10, 20, 30, keep_best="greedy/reward_mean")
    for step, reward in {10: 0.5, 20: None, 30: 0.9}.items():
        evaluate(checkpoints, step, reward)
    (tmp_path / "evaluation-00000040.json").write_text("{torn")
    checkpoints.recover_directory()
    assert list(read_evaluations(tmp_path)) == [10, 30]
    checkpoints.supersede_later(10)
    assert list(read_evaluations(tmp_path)) == [10]
    assert checkpoints.find_best() == (10, 0.5)


def test_nothing_is_pruned_while_none_is_intact(tmp_path):
    checkpoints = CheckpointDirectory(tmp_path, keep_last=1)
    for step in (10, 20, 30):
        (write_checkpoint(checkpoints, step) / "run.json").write_bytes(b"")
    assert checkpoints.prune_old() == []
    assert checkpoints.list_steps() == [10, 20, 30]


def test_remains_of_a_killed_process_go_and_what_is_set_aside_stays(tmp_path):
    checkpoints = written(tmp_path, 10)
    kept = ["step-00000005.bad", "step-00000005.superseded-2", "notes.partial"]
    for name in ("step-00000020.partial", "step-00000001.removing", *kept):
        (tmp_path / name).mkdir()
        (tmp_path / name / "manifest.json").write_text("half")
    assert checkpoints.list_steps() == [10]
    checkpoints.recover_directory()
    assert names(tmp_path) == sorted(["step-00000010", *kept])


def test_resuming_from_an_older_one_supersedes_the_later_ones(tmp_path):
    checkpoints = written(tmp_path / "checkpoints", 10, 20, 30)
    assert find_checkpoint(tmp_path / "checkpoints" / "step-00000010").state.steps == 10
    checkpoints.supersede_later(10)
    assert names(tmp_path / "checkpoints") == ["step-00000010", "step-00000020.superseded", "step-00000030.superseded"]
    assert checkpoints.recover_newest().state.steps == 10
    write_checkpoint(checkpoints, 20)
    assert find_checkpoint(tmp_path).state.steps == 20, "a run's newest"
    checkpoints.supersede_later(-1)
    assert checkpoints.list_steps() == []
    with pytest.raises(CheckpointError, match="neither a checkpoint nor a run"):
        find_checkpoint(tmp_path / "nowhere")


def test_looking_for_a_checkpoint_changes_nothing(tmp_path):
    checkpoints = written(tmp_path / "checkpoints", 10)
    (write_checkpoint(checkpoints, 20) / "run.json").write_bytes(b"")
    checkpoints.begin_checkpoint(30)
    before = sorted(str(p) for p in tmp_path.rglob("*"))
    assert find_checkpoint(tmp_path).state.steps == 10
    with pytest.raises(CheckpointError, match=r"step-00000020: run\.json"):
        find_checkpoint(tmp_path / "checkpoints" / "step-00000020")
    assert sorted(str(p) for p in tmp_path.rglob("*")) == before


def test_a_step_made_again_replaces_the_one_before(tmp_path):
    checkpoints = CheckpointDirectory(tmp_path)
    write_checkpoint(checkpoints, 10, run_id="before")
    write_checkpoint(checkpoints, 10, run_id="after")
    assert checkpoints.recover_newest().state.run_id == "after"
    assert names(tmp_path) == ["step-00000010", "step-00000010.superseded"]


@pytest.mark.parametrize("world", [2, 3])
def test_pieces_of_several_ranks_are_read_across_their_borders(tmp_path, world):
    for rank in range(world):
        write_rank_file(tmp_path, tiny_state(rank + 1, rank=rank, world=world))
    with pytest.raises(CheckpointError, match="it is of another step, model or run"):
        LearnerStateReader(sorted(tmp_path.glob("*")))


def _parts(directory: Path, pieces: list[tuple[int, int]], whole: int) -> LearnerStateReader:
    state = tiny_state(1)
    for rank, (begin, end) in enumerate(pieces):
        place = TensorSlice("master/w", (whole,), (begin,), (end - begin,))
        facts = msgspec.structs.replace(state.metadata, world=len(pieces))
        values = torch.arange(begin, end, dtype=torch.float32)
        write_rank_file(directory, type(state)(rank, facts, [type(state.slices[0])(place, values)]))
    return LearnerStateReader(sorted(directory.glob("*")))


def test_pieces_are_put_together_and_cut(tmp_path):
    parts = _parts(tmp_path, [(0, 5), (5, 6), (6, 16)], 16)
    for begin in range(16):
        for end in range(begin, 17):
            read = parts.read_slice(TensorSlice("master/w", (16,), (begin,), (end - begin,)))
            assert read.tolist() == list(range(begin, end))


@pytest.mark.parametrize(
    ("pieces", "message"),
    [
        ([(0, 5), (6, 16)], "15 of 16 values are there"),
        ([(0, 6), (5, 15)], "two of its pieces contradict each other"),
        ([(0, 5), (5, 17)], "is not inside"),
    ],
)
def test_a_gap_an_overlap_and_a_piece_outside_are_refused(tmp_path, pieces, message):
    with pytest.raises(CheckpointError, match=message):
        _parts(tmp_path, pieces, 16).read_slice(TensorSlice.full_tensor("master/w", (16,)))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"world": 10**18}, "1000000000000000000 ranks wrote it, but there are"),
        ({"trust_region": {"error": None}}, "missing required field `coef`"),
    ],
)
def test_facts_that_can_not_be_are_refused_at_once(tmp_path, changes, message):
    state = tiny_state(1)
    write_rank_file(tmp_path, replace(state, metadata=msgspec.structs.replace(state.metadata, **changes)))
    with pytest.raises(CheckpointError, match=message):
        LearnerStateReader(sorted(tmp_path.glob("*")))


def test_a_tensor_of_another_shape_or_name_is_refused(tmp_path):
    parts = _parts(tmp_path, [(0, 16)], 16)
    with pytest.raises(CheckpointError, match=r"shape \(16,\), but the model's is \(8,\)"):
        parts.read_slice(TensorSlice.full_tensor("master/w", (8,)))
    with pytest.raises(CheckpointError, match="it has no master/v"):
        parts.read_slice(TensorSlice.full_tensor("master/v", (8,)))
    with pytest.raises(CheckpointError, match=r"master/w: torch\.float32, not torch\.uint8"):
        parts.read_slice(TensorSlice.full_tensor("master/w", (16,)), torch.uint8)
