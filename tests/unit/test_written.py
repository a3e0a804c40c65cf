"""The bytes that limits of time follow from are those that a run writes."""

from __future__ import annotations

import pytest
from safetensors.torch import load_file

from r3async.checkpoint import CheckpointWriter
from r3async.config import load_config
from r3async.data.written import UNKNOWN, written_bytes
from r3async.world.real import REAL


@pytest.mark.parametrize(("dtype", "width"), [("float32", 4), ("bfloat16", 2)])
def test_they_are_those_of_the_model_that_is_there(tiny_model, dtype, width):
    values = sum(tensor.numel() for tensor in load_file(tiny_model / "model.safetensors").values())
    config = load_config("quickstart", [f"generator.dtype={dtype}"])
    assert written_bytes(config, tiny_model) == (width * values, 12 * values)
    with_adapters = load_config("quickstart", ["learner.lora.rank=2"])
    assert written_bytes(with_adapters, tiny_model).checkpoint == 0


def test_a_model_that_does_not_tell_its_sizes_has_the_limits_of_any(tmp_path):
    config = load_config("quickstart", [])
    assert written_bytes(config, tmp_path) == UNKNOWN
    (tmp_path / "config.json").write_text('{"model_type": "unheard"}')
    assert written_bytes(config, tmp_path) == UNKNOWN
    assert config.weights.write_seconds(0) == 600
    assert config.checkpoint.write_seconds(0) == 1800


def test_who_writes_checkpoints_has_the_time_that_follows(tiny_model, tmp_path):
    config = load_config("quickstart", [])
    found = written_bytes(config, tiny_model)
    writer = CheckpointWriter(config, "run", tiny_model, tmp_path, None, world=REAL)
    assert writer._seconds == 1800 + found.checkpoint / 2e8
