"""`r3async export` writes what the learner itself would have saved at that step."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from r3async.checkpoint import CheckpointDirectory, CheckpointError
from r3async.config import config_to_dict
from r3async.learner import build_learner
from r3async.tools.export import export_model
from tests.helpers import checkpoint as hc
from tests.helpers import models as hm
from tests.helpers.checkpoint import settings


def saved(path: Path, config, directory: Path, checkpoint: Path):
    learner = build_learner(config, path)
    try:
        hc.train(learner, config, hc.batches(2))
        learner.save_pretrained(directory)
        return hc.write_rank_file(checkpoint, learner.capture_state())
    finally:
        learner.close()


@pytest.mark.parametrize(("backend", "parallel"), [("megatron", {"tp": 2}), ("torch", {"dp": 2})])
def test_the_export_of_ranks_equals_what_they_save(two_ranks, model_path, tmp_path, backend, parallel):
    _export_equals_what_is_saved(two_ranks, model_path, tmp_path, settings(backend, dtype="bfloat16", **parallel))


def test_the_export_of_a_run_equals_what_the_learner_saves(model_path, tmp_path):
    _export_equals_what_is_saved(None, model_path, tmp_path, settings("torch", dtype="float32"))


def _export_equals_what_is_saved(ranks, model_path, tmp_path, config):
    run = tmp_path / "run"
    checkpoints = CheckpointDirectory(run / "checkpoints")
    records = hc.on_ranks(ranks, saved, model_path, config, tmp_path / "own", checkpoints.begin_checkpoint(2))
    checkpoints.commit_checkpoint(hc.run_state(2, config=config_to_dict(config), model_path=str(model_path)), records)
    assert export_model(run, tmp_path / "out").state.steps == 2
    own, out = (hm.load_weights(tmp_path / name) for name in ("own", "out"))
    assert set(own) == set(out)
    assert all(torch.equal(own[n], out[n]) and own[n].dtype == out[n].dtype for n in own)
    start = load_file(model_path / "model.safetensors")
    assert any(not torch.equal(out[n].float(), t.to(out[n].dtype).float()) for n, t in start.items())
    for name in ("config.json", "tokenizer.json"):
        assert (tmp_path / "out" / name).read_bytes() == (tmp_path / "own" / name).read_bytes()
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert model(torch.arange(5)[None]).logits.shape == (1, 5, 97)
    with pytest.raises(FileExistsError, match="name another directory"):
        export_model(run, tmp_path / "out")


def test_a_start_model_that_is_gone_is_asked_for(tmp_path):
    hc.write_checkpoint(
        CheckpointDirectory(tmp_path), 10, config=config_to_dict(settings()), model_path=str(tmp_path / "gone")
    )
    with pytest.raises(CheckpointError, match="name its directory with --model"):
        export_model(tmp_path, tmp_path / "out")
