"""The bytes that limits of time follow from are those that a run writes."""

import threading

import pytest
from safetensors.torch import load_file

from r3async.checkpoint import CheckpointError, CheckpointWriter
from r3async.config import load_config
from r3async.data.write_sizes import UNKNOWN_SIZES, read_write_sizes
from r3async.record.events import open_event_log
from r3async.world.real import REAL_WORLD
from tests.helpers.checkpoint import hold_nothing, training_state


@pytest.mark.parametrize(("dtype", "width"), [("float32", 4), ("bfloat16", 2)])
def test_they_are_those_of_the_model_that_is_there(tiny_model, dtype, width):
    values = sum(tensor.numel() for tensor in load_file(tiny_model / "model.safetensors").values())
    config = load_config("quickstart", [f"generator.dtype={dtype}"])
    assert read_write_sizes(config, tiny_model) == (width * values, 12 * values)
    assert read_write_sizes(load_config("quickstart", ["learner.lora.rank=2"]), tiny_model).checkpoint_bytes == 0


def test_a_model_that_does_not_tell_its_sizes_has_the_limits_of_any(tmp_path):
    config = load_config("quickstart", [])
    assert read_write_sizes(config, tmp_path) == UNKNOWN_SIZES
    (tmp_path / "config.json").write_text('{"model_type": "unheard"}')
    assert read_write_sizes(config, tmp_path) == UNKNOWN_SIZES
    assert config.supervise.limits.version_write(0) == 600
    assert config.supervise.limits.checkpoint_write(0) == 1800


async def test_who_writes_checkpoints_has_the_time_that_follows(tiny_model, tmp_path, monkeypatch):
    def read_large_sizes(config, path, **options):
        assert path == tiny_model
        return read_write_sizes(config, path, **options)._replace(checkpoint_bytes=1800 * 2 * 10**8)

    monkeypatch.setattr("r3async.checkpoint.writer.read_write_sizes", read_large_sizes)
    config = load_config("quickstart", [f"supervise.patience={0.1 / 1800}"])
    events, never = open_event_log(tmp_path, "learner"), threading.Event()
    writer = CheckpointWriter(config, "run", tiny_model, tmp_path, events, world=REAL_WORLD)
    await writer.save_checkpoint(training_state(1), hold_nothing, lambda directory: never.wait(30) and [])
    with pytest.raises(CheckpointError, match=r"not written within 0\.2 s \(supervise\.patience\)"):
        await writer.wait_until_written()
    never.set()
    await writer.wait_until_written()
