"""The learner's side of a checkpoint, and what every book begins with when a run goes on from one."""

import zlib

import msgspec
import pytest

from actors.saving import Books, Progress, Saver
from r3async.appending import AppendFile
from r3async.buffer.groups import GroupBuffer
from r3async.checkpoint import CheckpointError, Checkpoints, open_checkpoint
from r3async.checkpoint.tensors import write_part
from r3async.config import load_config
from r3async.observe.events import open_events, read_events
from r3async.observe.jsonl import read_objects
from r3async.observe.metrics import read_metrics
from r3async.observe.steps import StepBook
from r3async.observe.trained import FILE, trained_step
from r3async.transport import Ledger
from tests.helpers_checkpoint import tiny_state
from tests.test_buffer import make_trajectory

BOOKS = Books({"version": 3, "next_group": 20}, {"metrics.jsonl": 7}, [{"step": 3}], 1.5, 1000)


class Learner:
    """Holds a value; writing it fails while `full`."""

    def __init__(self):
        self.value, self.held, self.full = 0.0, None, False

    def hold(self):
        self.held = tiny_state(self.value)

    def write_state(self, directory):
        if self.full:
            raise OSError(28, "No space left on device")
        held, self.held = self.held, None
        return [write_part(directory, held)]

    async def save(self, saver, steps, then):
        async def hold():
            self.hold()

        await saver.save(hold, self.write_state, BOOKS, progress(steps), then)


@pytest.fixture
def saver(tmp_path):
    def make(*overrides):
        model = tmp_path / "model"
        model.mkdir(exist_ok=True)
        (model / "config.json").write_text("{}")
        return Saver(
            load_config("quickstart", list(overrides)), "run", model, tmp_path, open_events(tmp_path, "learner")
        )

    return make


def progress(steps):
    return Progress(steps, steps, 4 * steps, [4 * steps + 2], (0, 0))


async def test_what_is_written_is_the_copy_and_both_sides_books(saver, tmp_path):
    learner, written = Learner(), []
    learner.value = 3.0
    saver_ = saver()
    await learner.save(saver_, 3, lambda: written.append(Checkpoints(tmp_path / "checkpoints").steps()))
    learner.value = 4.0
    await saver_.finish()
    assert written == [[3]]  # `then` is called when the checkpoint can be seen.
    opened = open_checkpoint(tmp_path / "checkpoints" / "step-00000003")
    assert opened.learner().facts.steps == 3
    state = opened.state
    assert (state.steps, state.version, state.consumed, state.consumed_beyond) == (3, 3, 12, [14])
    assert (state.admission, state.pending_rows, state.generated_tokens) == (BOOKS.admission, [{"step": 3}], 1000)
    assert state.model_path == str(tmp_path / "model")


@pytest.mark.parametrize("asynchronous", ["true", "false"])
async def test_one_that_fails_is_told_and_training_goes_on_until_the_run_would_end_without_one(
    saver, tmp_path, asynchronous
):
    learner, written = Learner(), []
    saver_ = saver(f"checkpoint.asynchronous={asynchronous}")
    learner.full = True
    await learner.save(saver_, 1, lambda: written.append(1))
    with pytest.raises(CheckpointError, match=r"step 1 could not be written.*No space left.*mend the cause"):
        await saver_.finish()
    await learner.save(saver_, 2, lambda: written.append(2))
    with pytest.raises(CheckpointError, match="step 2"):
        await saver_.finish()
    learner.full = False
    await learner.save(saver_, 3, lambda: written.append(3))
    await saver_.finish()
    assert written == [3]
    assert Checkpoints(tmp_path / "checkpoints").steps() == [3]
    events = [(e["event"], e["level"], e["step"]) for e in read_events(tmp_path / "events.jsonl")]
    failed = [("checkpoint_failed", "error", 1), ("checkpoint_failed", "error", 2)]
    assert events == [*failed, ("checkpoint_written", "info", 3)]


async def test_a_place_of_ones_own_for_checkpoints(saver, tmp_path):
    saver_ = saver(f"checkpoint.directory={tmp_path / 'elsewhere'}")
    await Learner().save(saver_, 1, lambda: None)
    await saver_.finish()
    assert Checkpoints(tmp_path / "elsewhere").steps() == [1]
    assert not (tmp_path / "checkpoints").exists()


def test_a_resumed_buffer_and_ledger_take_nothing_that_was_trained():
    buffer = GroupBuffer(1, window=3, head=4, beyond=[6])
    ledger = Ledger(buffer.taken)
    assert ledger.oldest == 4
    for group in range(8):
        over = group < 4 or group == 6
        assert ledger.is_forgotten(group) == over
        assert buffer.add(make_trajectory(group), 1) != over
    assert buffer.newest_group == 7
    assert buffer.batch(3, 3, 0) == [4, 5, 7]
    buffer.take([4, 5])
    assert (ledger.oldest, ledger.is_forgotten(5)) == (7, True)


def test_rows_that_waited_at_a_checkpoint_are_written_after_the_resume_with_rates_of_their_own(tmp_path):
    now = iter([0.0, 0.0, 10.0, 20.0, 30.0]).__next__
    book = StepBook(tmp_path / "a", lambda *a, **k: None, clock=now)
    book.add(1, 1, {"batch/trained_tokens": 5}, [])
    pending = book.pending
    book.delivered(1, 100, {})
    assert pending == [{"step": 1, "version": 1, "batch/trained_tokens": 5}]
    resumed = StepBook(tmp_path / "b", lambda *a, **k: None, clock=now)
    resumed.restore(pending, 100)
    resumed.delivered(1, 150, {})
    (row,) = read_metrics(tmp_path / "b" / "metrics.jsonl")
    assert row["step"] == 1
    assert row["throughput/generated_tokens_per_second"] == 5.0


def test_the_record_of_what_was_trained_names_each_trajectory_and_its_tokens(tmp_path):
    groups = [[make_trajectory(0, 0), make_trajectory(0, 1)], [make_trajectory(3)]]
    AppendFile(tmp_path / FILE).append(msgspec.json.encode(trained_step(7, 6, groups, 2)))
    tokens = groups[0][0].samples[0].table["token_ids"]
    assert list(read_objects(tmp_path / FILE)) == [
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
    assert trained_step(7, 6, [[other]]).crc32 != trained_step(7, 6, [[groups[0][0]]]).crc32
