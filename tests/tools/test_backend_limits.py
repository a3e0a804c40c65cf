"""What a backend or an engine would end with, minutes after the start, is refused before it."""

import ast
import importlib.util
import json
from pathlib import Path

import pytest
import torch

from r3async.config import ConfigError, InitShape, load_config
from r3async.config.model import INIT_SHAPES
from r3async.learner import LearnerError
from r3async.learner.model import read_model_shape
from r3async.learner.policy_loss import PolicyLoss, by_token, check_custom_loss
from r3async.tools.machine_checks import CPU_HEAD_DIMS
from r3async.tools.model_checks import check_model_files
from r3async.tools.preflight import make_checked_plan
from tests.helpers import architectures as ha

# -- models -----------------------------------------------------------------------------------------------------------


def test_one_expert_a_token_with_normalised_gates_is_not_trained_by_megatron(tmp_path):
    ha.make_model(tmp_path / "model", "qwen3_moe")
    file = tmp_path / "model" / "config.json"
    described = json.loads(file.read_text()) | {"num_experts_per_tok": 1, "norm_topk_prob": True}
    file.write_text(json.dumps(described))
    with pytest.raises(LearnerError, match=r"one expert a token.*`learner\.backend` = \"torch\""):
        read_model_shape(tmp_path / "model")
    file.write_text(json.dumps(described | {"norm_topk_prob": False}))
    assert read_model_shape(tmp_path / "model").top_k == 1


def test_sizes_of_heads_are_those_that_the_engine_on_cpu_takes(monkeypatch):
    found = importlib.util.find_spec("vllm")
    assert found is not None
    assert found.origin is not None
    source = Path(found.origin).parent / "v1" / "attention" / "backends" / "cpu_attn.py"
    (method,) = (
        node
        for node in ast.walk(ast.parse(source.read_text()))
        if isinstance(node, ast.FunctionDef) and node.name == "get_supported_head_sizes"
    )
    (returned,) = (node for node in ast.walk(method) if isinstance(node, ast.Return))
    assert returned.value is not None
    assert list(CPU_HEAD_DIMS) == ast.literal_eval(returned.value)
    odd, even = load_config("quickstart"), load_config("quickstart")
    monkeypatch.setitem(INIT_SHAPES, "tiny", InitShape(hidden_size=192))
    odd.model.init.size = "tiny"
    monkeypatch.setattr("r3async.tools.preflight.has_gpu", lambda: False)
    with pytest.raises(ConfigError, match=r"heads of 48 values, .* it takes 32, 64, 80"):
        make_checked_plan(odd)
    make_checked_plan(even)
    monkeypatch.setattr("r3async.tools.preflight.has_gpu", lambda: True)
    monkeypatch.setattr("r3async.tools.machine_checks.has_gpu", lambda: True)
    make_checked_plan(odd)


def write_files(directory: Path, *names: str) -> str:
    directory.mkdir()
    (directory / "config.json").write_text('{"model_type": "qwen3_moe"}')
    for name in ("tokenizer.json", *names):
        (directory / name).write_text("{}")
    return str(directory)


SHARDS = [f"model-{n:05}-of-00002.safetensors" for n in (1, 2)]


def test_a_model_in_several_files_needs_all_of_them(tmp_path):
    path = write_files(tmp_path / "model", SHARDS[0])
    with pytest.raises(ConfigError, match=r"weights in 1 files of 00002 .* no model\.safetensors\.index\.json"):
        check_model_files(path, "model.path")
    (tmp_path / "model" / SHARDS[1]).touch()
    check_model_files(path, "model.path")
    named = {"weight_map": {"a": SHARDS[0], "b": SHARDS[1], "c": SHARDS[1]}}
    (tmp_path / "model" / "model.safetensors.index.json").write_text(json.dumps(named))
    check_model_files(path, "model.path")
    (tmp_path / "model" / SHARDS[1]).unlink()
    with pytest.raises(ConfigError, match=f"lacks 1 of its files of weights, such as {SHARDS[1]}"):
        check_model_files(path, "model.path")


def test_weights_in_the_old_format_alone_are_refused_with_what_converts_them(tmp_path):
    path = write_files(tmp_path / "model", "pytorch_model.bin")
    with pytest.raises(ConfigError, match=r"no \*\.safetensors.*save_pretrained"):
        check_model_files(path, "model.path")
    (tmp_path / "model" / "model.safetensors").touch()
    check_model_files(path, "model.path")


# -- engines and losses -----------------------------------------------------------------------------------------------


def test_a_quantized_engine_is_refused():
    with pytest.raises(ConfigError, match=r"`generator\.engine_args\.quantization` cannot be set"):
        load_config("moe_30b_r3", ["generator.engine_args.quantization=fp8"])


def a_tensor(inputs):
    return -inputs.advantages * inputs.logprobs


def one_number(inputs):
    return PolicyLoss(a_tensor(inputs).mean(), torch.zeros_like(inputs.mask))


def no_clipped(inputs):
    return PolicyLoss(a_tensor(inputs), None)


def fails(inputs):
    return inputs.config.loss_args["missing"]


@by_token
def right(inputs):
    return PolicyLoss(a_tensor(inputs) * inputs.config.loss_args.get("x", 1), torch.zeros_like(inputs.mask))


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("a_tensor", r"returns a Tensor: it must return r3async\.PolicyLoss"),
        ("one_number", r"`value` has one entry a token, here \[4\], and it is \[\]"),
        ("no_clipped", r"`clipped` has one entry a token, here \[4\], and it is NoneType"),
        ("fails", r"fails with four made up tokens: KeyError: 'missing'"),
    ],
)
def test_a_loss_that_returns_something_else_is_refused_before_the_first_step(name, message):
    with pytest.raises(ConfigError, match=message):
        check_custom_loss(load_config("quickstart", [f"algorithm.policy_loss={__name__}:{name}"]).algorithm)


def test_a_loss_of_ones_own_is_taken():
    own = f"algorithm.policy_loss={__name__}:right"
    check_custom_loss(
        load_config("quickstart", [own, "algorithm.loss_args.x=2", "algorithm.anchor=recomputed"]).algorithm
    )
    check_custom_loss(load_config("quickstart", ["algorithm.policy_loss=gspo"]).algorithm)
