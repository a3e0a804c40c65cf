"""`r3async inspect` on messages and checkpoints: what is shown, and how damage is reported."""

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from r3async.checkpoint import CheckpointDirectory
from r3async.checkpoint.directory import STATE_FILE
from r3async.data.control_messages import DeliveryItem, Welcome, encode_control, encode_delivery
from r3async.data.tokens import TokenTable
from r3async.data.wire import encode_trajectory
from r3async.tools.inspect.checkpoint import describe_checkpoint, inspect_checkpoint
from r3async.tools.inspect.wire import describe_message
from r3async.transport.spool import SPOOL_FORMAT
from tests.helpers.checkpoint import write_checkpoint
from tests.tools.test_inspect_data import made, write_spool

# --- messages


def test_a_message_is_shown_frame_by_frame(tmp_path, inspect) -> None:
    both = [encode_trajectory(made(i)) for i in (3, 4)]
    items = [
        DeliveryItem(f"g{i:08d}e0000", i, 900, [len(f) for f in frames]) for i, frames in zip((3, 4), both, strict=True)
    ]
    SPOOL_FORMAT.append_record(tmp_path / "message", encode_delivery("s1", items, both), fsync=False)
    text = inspect("message")
    assert "2 frames" in text
    assert "DELIVER session=s1 items=[DeliveryItem(trajectory_id='g00000003e0000', group_index=3" in text
    assert "trajectory g00000004e0000" in text
    assert "schema" in text
    assert "(ours)" in text
    assert "(right)" in text
    assert "routed_experts uint8 [10, 3, 2] of sample g00000003e0000s0" in text
    (tmp_path / "welcome").write_bytes(encode_control(Welcome("s1", "e1", 7, 1000, ["a"])))
    assert "WELCOME session=s1" in inspect("welcome")


def test_a_frame_names_all_the_columns_that_it_holds(tmp_path, inspect) -> None:
    trajectory = made(0)
    trajectory.samples[0].table = TokenTable.from_tokens(np.arange(500))
    trajectory.turns = []
    SPOOL_FORMAT.append_record(tmp_path / "message", encode_trajectory(trajectory), fsync=False)
    text = inspect("message")
    together = "loss_mask bool, policy_version int32, turn int32, rewards float32 (packed) of sample g00000000e0000s0"
    (line,) = [line for line in text.splitlines() if together in line]
    assert int(line.split()[2].replace(",", "")) < 2 * 2000 + 100  # bytes, of 10,500: two raw columns, and these


@pytest.mark.parametrize("damage", ["flipped", "missing", "extra", "header"])
def test_a_broken_message_shows_its_frames_and_what_is_wrong(tmp_path, inspect, damage) -> None:
    frames = [bytes(frame) for frame in encode_trajectory(made(0))]
    if damage == "flipped":
        frames[1] = bytes([frames[1][0] ^ 1]) + frames[1][1:]
    elif damage == "missing":
        frames.pop()
    elif damage == "extra":
        frames.append(b"more")
    else:
        frames[0] = frames[0][: len(frames[0]) // 2]
    SPOOL_FORMAT.append_record(tmp_path / "message", frames, fsync=False)
    text = inspect("message", code=2)
    expected = {
        "flipped": "wrong: the frames have",
        "missing": "missing        loss_mask bool, policy_version int32",
        "extra": "described nowhere",
        "header": "not a header",
    }
    assert expected[damage] in text
    assert "the message at byte 0 cannot be read" in text
    assert "Traceback" not in text


@pytest.mark.parametrize("data", [b"", b"hello", b'{"step": 1}\n', bytes(range(256))])
def test_a_file_that_holds_no_message_is_one_line(tmp_path, inspect, data) -> None:
    (tmp_path / "odd").write_bytes(data)
    text = inspect("odd", code=2)
    assert "odd holds no message" in text
    assert len(text.splitlines()) == 1


@settings(max_examples=50)
@given(st.data())
def test_no_byte_that_changed_in_a_message_goes_unseen_or_ends_the_command(data) -> None:
    frames = [bytearray(frame) for frame in encode_trajectory(made(0))]
    which = data.draw(st.sampled_from([frame for frame in frames if frame]))
    which[data.draw(st.integers(0, len(which) - 1))] ^= data.draw(st.integers(1, 255))
    lines, problem = describe_message(frames)
    assert len(lines) >= len(frames)
    assert problem


# --- checkpoints


def test_a_checkpoint_shows_files_state_and_tensors(tmp_path, inspect) -> None:
    path = write_checkpoint(CheckpointDirectory(tmp_path / "checkpoints"), 20)
    text = inspect(str(path))
    assert "after step 20" in text
    assert "intact" in text
    assert "groups trained         80" in text
    (line,) = [line for line in text.splitlines() if line.lstrip().startswith("master/w")]
    assert line.split() == ["master/w", "F32", "[8]", "32"]
    seen = json.loads(inspect(str(path), "--json"))
    assert seen["problems"] == []
    assert seen["tensors"][0]["nbytes"] == 32
    assert seen["learner"]["backend"] == "torch"
    assert seen["state"]["version"] == 20


@pytest.mark.parametrize("broken", ["learner-00000-of-00001.safetensors", STATE_FILE, "manifest.json"])
@pytest.mark.parametrize("how", ["changed", "missing", "short"])
def test_the_broken_file_of_a_checkpoint_is_named_and_the_rest_shown(tmp_path, inspect, broken, how) -> None:
    path = write_checkpoint(CheckpointDirectory(tmp_path / "checkpoints"), 20)
    file = path / broken
    data = file.read_bytes()
    if how == "missing":
        file.unlink()
    else:
        file.write_bytes(data[:-3] if how == "short" else data[:-3] + bytes([data[-3] ^ 1]) + data[-2:])
    text = inspect(str(path), code=2)
    assert "BROKEN" in text
    assert f"{path}: {broken}: " in text
    problems = [line for line in text.splitlines() if line.startswith(f"{path}: ")]
    assert len(problems) == 1, "only what is broken is named"
    assert "Traceback" not in text
    if broken != "learner-00000-of-00001.safetensors":
        assert "master/w" in text
    if broken != STATE_FILE:
        assert "groups trained" in text
    listing = inspect("checkpoints", code=0 if _unseen(broken, how) else 2)
    assert "step-00000020" in listing


def _unseen(broken: str, how: str) -> bool:
    """The list compares files of the learner by their size only."""
    return broken.startswith("learner") and how == "changed"


@settings(max_examples=20)  # each is written to the disk, and synchronized
@given(st.data())
def test_no_byte_that_changed_in_a_checkpoint_goes_unseen_or_ends_the_command(tmp_path_factory, data) -> None:
    path = write_checkpoint(CheckpointDirectory(tmp_path_factory.mktemp("run")), 20)
    file = path / data.draw(st.sampled_from(sorted(file.name for file in path.iterdir())))
    changed = bytearray(file.read_bytes())
    changed[data.draw(st.integers(0, len(changed) - 1))] ^= data.draw(st.integers(1, 255))
    file.write_bytes(changed)
    seen = inspect_checkpoint(path)
    assert [problem.partition(":")[0] for problem in seen.problems] == [file.name]
    assert "BROKEN" in describe_checkpoint(seen, 0)[0]


def test_a_file_that_may_not_be_read_is_one_line(tmp_path, inspect) -> None:
    (tmp_path / "spool").mkdir()
    (tmp_path / "spool" / "a.spool").symlink_to(tmp_path)
    text = inspect("spool", code=2)
    assert "a.spool: " in text.splitlines()[0]
    assert "Traceback" not in text


def test_a_newer_version_is_known_from_a_checkpoint(tmp_path, inspect) -> None:
    run = write_spool(tmp_path, made(0))
    write_checkpoint(CheckpointDirectory(run / "checkpoints"), 30)
    (row,) = inspect("runs/demo/spool", "--json").splitlines()
    assert json.loads(row)["age"] == 25
    assert "checkpoints: 1" in inspect("demo")
