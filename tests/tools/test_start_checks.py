"""What a dry run refuses, the start refuses with the same line and exit code, and the reverse: every check of the list."""

import contextlib
import json
from pathlib import Path
from unittest.mock import patch

import pytest

from r3async.config import ConfigError, load_config
from r3async.record.sink_backends import SINK_PACKAGES
from r3async.tools.init_model import build_byte_tokenizer
from r3async.tools.machine_checks import has_gpu
from r3async.tools.memory import PUBLISHED_CONFIGS
from r3async.tools.preflight import START_CHECKS, StartRequest, check_dry_run
from tests.helpers import architectures as ha
from tests.helpers.cli import typed

pytestmark = pytest.mark.skipif(has_gpu(), reason="about engines on CPU")


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A model that a run could start with, whose heads and experts vLLM has on CPU."""
    directory = tmp_path_factory.mktemp("models") / "model"
    sizes = {"hidden_size": 64, "head_dim": 32, "moe_intermediate_size": 32, "mlp_only_layers": []}
    ha.make_model(directory, "qwen3_moe", max_position_embeddings=4096, **sizes, eos_token_id=None)
    build_byte_tokenizer().save_pretrained(directory)
    return directory


MODELS = {
    "gemma": {"model_type": "gemma2"},
    "other_keys": {"model_type": "gpt2", "hidden_size": None},
    "dense": {"model_type": "qwen3", "num_experts": None, "num_local_experts": None},
    "large": PUBLISHED_CONFIGS["Qwen3-30B-A3B"],
    "gpt_oss": {
        "model_type": "gpt_oss",
        **ha.TORCH_ONLY["gpt_oss"],
        "layer_types": ["full_attention"] * 3,
        "head_dim": 32,
    },
    "other_sizes": {"vocab_size": 4096},
}
"""Changes of the model's `config.json`, by the name of the copy that has them."""

REFUSED = {
    "runs directory": "train quickstart --runs file/runs",
    "resumed checkpoint": "train quickstart resume=nowhere",
    "sinks": "train quickstart log.to=['mlflow']",
    "cluster address": "train quickstart cluster.address=127.0.0.1:9",
    "learner": "sft quickstart data=rows.jsonl learner.backend=scripted model.path=model",
    "model files": "train quickstart model.path=empty",
    "model type": "train quickstart model.path=gemma",
    "model sizes": "train quickstart model.path=other_keys learner.backend=torch",
    "parallel layout": "train quickstart learner.parallel.tp=3",
    "router settings": "train quickstart learner.expert_bias_rate=0.1",
    "routes": "train quickstart routing.replay=rollout model.path=dense",
    "positions": "train quickstart episode.max_total_tokens=40000 learner.max_tokens_per_micro_batch=40000",
    "head size": "train quickstart model.init.size=tiny",
    "placement": "train quickstart model.path=large generator.engine_args.tensor_parallel_size=16",
    "message size": "train quickstart transport.max_message_bytes=1000",
    "GPU memory": "train quickstart model.path=large cluster.gpu_gib=1",
    "engine's model": "train quickstart model.path=gpt_oss learner.backend=torch",
    "teacher": "train quickstart model.path=model algorithm.distillation.teacher=no_weights",
    "adapters": "train quickstart learner.lora.rank=4 learner.lora.targets=['nothing']",
    "devices": "train quickstart weights.backend=nccl",
    "addresses": "train quickstart transport.host=192.0.2.1",
    "tensors": "train quickstart model.path=other_sizes",
    "tokenizer": "train quickstart model.path=bad_tokenizer",
    "policy loss": "train quickstart algorithm.policy_loss=nowhere:loss",
    "advantage": "train quickstart algorithm.advantage=mine.py:no_reward",
    "environment": "train quickstart env.name=nowhere:Game env.args={}",
    "rows": "train quickstart data=long.jsonl",
    "first episode": "train quickstart data=rows.jsonl reward=mine.py:no_reward",
    "earlier run": "train quickstart name=other",
}
"""A command that each check refuses, in a folder of `make_folder`."""


@pytest.fixture(scope="module")
def folder(model, tmp_path_factory):
    """A folder with everything that `REFUSED` names."""
    place = tmp_path_factory.mktemp("folder")
    (place / "file").touch()
    (place / "empty").mkdir()
    for name, changes in MODELS.items():
        copy_model(model, place / name, {"config.json": json.dumps(read_config(model) | changes)})
    copy_model(model, place / "model", {})
    copy_model(model, place / "bad_tokenizer", {"tokenizer.json": "{}"})
    copy_model(model, place / "no_weights", {"model.safetensors": None})
    (place / "rows.jsonl").write_text('{"prompt": "2+2=", "answer": "4"}\n' * 4)
    (place / "long.jsonl").write_text(json.dumps({"prompt": "x" * 500, "answer": "4"}) + "\n")
    (place / "mine.py").write_text("def no_reward(completion):\n    return 'good'\n")
    (place / "runs" / "other").mkdir(parents=True)
    (place / "runs" / "other" / "notes.txt").touch()
    with patch.dict(SINK_PACKAGES, mlflow=("a_module_that_is_nowhere", "mlflow")):
        yield place


def read_config(model):
    return json.loads((model / "config.json").read_text())


def copy_model(model, copy, changes):
    """Copy a model with other contents of some files, or without them."""
    copy.mkdir()
    for each in model.iterdir():
        if each.name not in changes:
            (copy / each.name).symlink_to(each)
    for name, text in changes.items():
        if text is not None:
            (copy / name).write_text(text)
    return copy


def find_refusing_check(words, *, is_dry):
    """Return the name of the first check that refuses the command, and its error."""
    command, preset, *settings = words
    runs = Path(settings.pop() if "--runs" in settings else "runs")
    config = load_config(preset, [word for word in settings if word != "--runs"], command)
    start = StartRequest(config, command, runs, is_dry)
    for check in START_CHECKS:
        try:
            if command in check.commands and not any(map(start.find_obstacle, check.needs)):
                check.refuse(start)
        except ConfigError as error:
            return check.name, str(error)
    return "", ""


def test_every_check_has_a_configuration_that_it_refuses():
    assert set(REFUSED) | {"evaluated model"} == {check.name for check in START_CHECKS}


@pytest.mark.long
@pytest.mark.parametrize("name", REFUSED)
def test_a_dry_run_and_the_start_refuse_the_same_in_the_same_words(name, folder):
    words = REFUSED[name].split()
    dry, start = typed(*words, "--dry-run", cwd=folder), typed(*words, cwd=folder)
    assert (dry.returncode, start.returncode) == (2, 2), (dry, start)
    (line,), (other_line,) = (said.stderr.strip().splitlines()[-1:] for said in (dry, start))
    assert line == other_line
    with contextlib.chdir(folder):
        for is_dry in (True, False):
            refusing, error = find_refusing_check(words, is_dry=is_dry)
            assert (refusing, error in line) == (name, True), error
    print(f"| {name} | refused | refused | {line}")


def test_a_check_that_needs_what_is_not_here_is_skipped_by_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (note,) = [n for n in check_dry_run(load_config("moe_30b_r3")).notes if "not on this machine" in n]
    for name in ("model files", "tensors", "tokenizer"):
        assert name in note
    submitted = check_dry_run(load_config("quickstart"), made_elsewhere=True, runs=Path("/proc/nowhere"))
    assert any("devices" in note and "cluster" in note for note in submitted.notes)
    unread = check_dry_run(load_config("quickstart", ["env.name=stranger:Game", "env.args={}"]), import_code=False)
    assert any("environment, rows, first episode" in note and "stranger:Game" in note for note in unread.notes)


@pytest.mark.parametrize("follow", [[], ["--dry-run"]], ids=["submit", "dry run"])
def test_submit_refuses_before_it_asks_the_cluster(follow, folder):
    words = ["submit", "quickstart", "transport.max_message_bytes=1000", "--address", "http://127.0.0.1:9"]
    said = typed(*words, *follow, cwd=folder)
    assert (said.returncode, "transport.max_message_bytes" in said.stderr) == (2, True), said


def test_a_dry_run_of_supervised_training_shows_its_plan_and_makes_nothing(folder):
    words = ["sft", "quickstart", "data=rows.jsonl", "model.path=model", "name=mine", "--dry-run"]
    said = typed(*words, cwd=folder)
    assert said.returncode == 0, said
    for part in ("4 rows are trained", "memory", "steps of"):
        assert part in said.stdout, said
    assert not (folder / "runs" / "mine").exists()
    refused = typed(*words, "learner.lora.rank=2", "learner.lora.targets=['nothing']", cwd=folder)
    assert (refused.returncode, "'nothing' names no matrix" in refused.stderr) == (2, True), refused


def test_evaluating_a_model_that_the_engine_cannot_run_is_refused_at_once(folder, model):
    narrow = copy_model(model, folder / "narrow", {"config.json": json.dumps(read_config(model) | {"head_dim": 16})})
    said = typed("eval", str(narrow), "--env", "reverse-text", "--tasks", "1", cwd=folder)
    assert (said.returncode, "heads of 16 values" in said.stderr) == (2, True), said
