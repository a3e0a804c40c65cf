"""The adapters of a run are what PEFT reads, and its merged model is that of the run."""

import json

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

from r3async.checkpoint import CheckpointDirectory, CheckpointError
from r3async.checkpoint.resume_checks import fingerprint_model
from r3async.config import config_to_dict
from r3async.tools.cli import app
from r3async.tools.export import export_adapter, export_model
from tests.helpers import checkpoint as hc
from tests.helpers import lora as hl
from tests.helpers import models as hm


def run_of(path, config, directory):
    """The directory of a run with one checkpoint, of two steps."""
    checkpoints = CheckpointDirectory(directory / "checkpoints")
    partial = checkpoints.begin_checkpoint(2)
    _, record = hc.begun(path, config, 2, partial)
    state = hc.run_state(
        2, config=config_to_dict(config), model_path=str(path), model_fingerprint=fingerprint_model(path)
    )
    checkpoints.commit_checkpoint(state, [record])
    return directory


@pytest.mark.long
@pytest.mark.parametrize(
    ("backend", "dense", "targets"),
    [
        ("megatron", [1], ["self_attn"]),
        ("megatron", [], ["all-linear"]),
        ("torch", [1], ["self_attn"]),
        ("torch", [], ["all-linear", "mlp.gate"]),
        ("torch", [0, 1, 2, 3], ["all-linear"]),
    ],
)
def test_peft_has_the_merged_model(tmp_path, backend, dense, targets):
    model_path = hm.make_hf_model(tmp_path / "model", num_hidden_layers=4 if dense else 3, mlp_only_layers=dense)
    if len(dense) == 4:
        model_path = tiny_dense(tmp_path / "dense")
    run = run_of(model_path, hl.with_lora(hl.settings(backend), *targets), tmp_path / "run")
    export_model(run, tmp_path / "merged")
    export_adapter(run, tmp_path / "adapter")
    ids = torch.arange(12)[None]
    with torch.no_grad():
        merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float32)(ids).logits
        base = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32)
        start = base(ids).logits
        adapted = PeftModel.from_pretrained(base, tmp_path / "adapter")(ids).logits
    assert (merged - start).abs().max() > 1e-2
    assert torch.allclose(adapted, merged, rtol=0, atol=1e-4 * float(merged.abs().max()))
    described = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert (described["r"], described["lora_alpha"]) == (hl.RANK, hl.ALPHA)
    assert described["base_model_name_or_path"] == str(model_path)


def tiny_dense(path):
    from transformers import Qwen2Config

    from tests.helpers.torch import SHARED

    shape = SHARED | {"vocab_size": hm.VOCAB, "intermediate_size": 56}
    del shape["num_experts_per_tok"]
    return hm.save_random(path, Qwen2Config(**shape), seed=0, std=0.1)


def test_experts_of_megatron_have_the_names_of_the_checkpoint(model_path, tmp_path):
    run = run_of(model_path, hl.with_lora(hl.settings("megatron"), "experts"), tmp_path / "run")
    export_adapter(run, tmp_path / "adapter")
    names = set(load_file(tmp_path / "adapter" / "adapter_model.safetensors"))
    assert "base_model.model.model.layers.0.mlp.experts.3.gate_proj.lora_A.weight" in names
    assert len(names) == 3 * hm.EXPERTS * 3 * 2


def test_a_changed_start_model_is_refused(model_path, tmp_path):
    """The checkpoint has no weight of it: with another one it would be another model."""
    run = run_of(model_path, hl.with_lora(hl.settings("torch")), tmp_path / "run")
    other = hm.make_hf_model(tmp_path / "other", num_hidden_layers=4, mlp_only_layers=[1], vocab_size=97, seed=9)
    for write in (export_model, export_adapter):
        with pytest.raises(CheckpointError, match="is not the one that the run began with"):
            write(run, tmp_path / "out", model=other)


def test_a_run_without_adapters_has_none_to_export(model_path, tmp_path, capsys):
    run = run_of(model_path, hl.settings("torch"), tmp_path / "run")
    done = CliRunner().invoke(app, ["export", str(run), str(tmp_path / "out"), "--adapter"])
    assert done.exit_code == 2
    assert "the run has no adapters" in " ".join((done.output + capsys.readouterr().err).split())


def test_merge_is_the_whole_model_in_a_folder_named_after_the_run(model_path, tmp_path, monkeypatch):
    run_of(model_path, hl.with_lora(hl.settings("torch"), "self_attn"), tmp_path / "runs" / "first")
    monkeypatch.chdir(tmp_path)
    for flag, folder in (("--merge", "first-model"), ("--adapter", "first-adapter")):
        done = CliRunner().invoke(app, ["export", "first", flag])
        assert done.exit_code == 0, done.output
        assert f"{folder}: the {'model' if flag == '--merge' else 'adapters'} after step 2" in done.output
    merged = load_file(tmp_path / "first-model" / "model.safetensors")
    start = load_file(model_path / "model.safetensors")
    assert merged.keys() == start.keys()
    changed = {name for name in start if not torch.equal(merged[name], start[name].to(merged[name].dtype))}
    assert changed
    assert all("self_attn" in name for name in changed)
