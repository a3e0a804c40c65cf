"""What vLLM cannot run, or would compute as another model, is refused with the reason and what to do."""

import json
import re
from pathlib import Path

import pytest
from transformers import AutoConfig

from r3async.config import ConfigError, load_config
from r3async.data.engine_models import ENGINE_MODELS, list_needed_config
from r3async.tools import model_checks
from r3async.tools.model_checks import check_engine_config
from tests.helpers import architectures as ha


def check(directory: Path, described: dict[str, object], *settings: str, on_cpu: bool = True) -> None:
    (directory / "config.json").write_text(json.dumps(described))
    config = load_config("quickstart", [f"model.path={directory}", "generator.dtype=bfloat16", *settings])
    check_engine_config(config, on_cpu=on_cpu)


@pytest.fixture(autouse=True)
def torchvision(monkeypatch):
    monkeypatch.setattr(model_checks, "has_torchvision", lambda: True)


def needed(kind: str) -> dict[str, object]:
    return {"model_type": kind, **ENGINE_MODELS[kind].needed_config}


@pytest.mark.parametrize("kind", [kind for kind, known in ENGINE_MODELS.items() if known.cpu_unsupported_reason])
def test_a_model_of_gpus_alone_is_refused_on_cpu(kind, tmp_path):
    with pytest.raises(ConfigError, match="vLLM on CPU cannot generate with") as refused:
        check(tmp_path, needed(kind))
    assert ENGINE_MODELS[kind].cpu_unsupported_reason in str(refused.value)
    check(tmp_path, needed(kind), on_cpu=False)


@pytest.mark.parametrize("kind", [kind for kind, known in ENGINE_MODELS.items() if known.unsupported_reason])
def test_a_model_that_vllm_lacks_is_refused_everywhere(kind, tmp_path):
    for on_cpu in (True, False):
        with pytest.raises(ConfigError, match="vLLM cannot generate with"):
            check(tmp_path, needed(kind), on_cpu=on_cpu)


@pytest.mark.parametrize("kind", [kind for kind, known in ENGINE_MODELS.items() if known.cpu_dtype_reason])
def test_a_precision_without_kernels_is_refused_on_cpu(kind, tmp_path):
    with pytest.raises(ConfigError, match=r"bfloat16 only: .*Set generator.dtype=bfloat16"):
        check(tmp_path, needed(kind), "generator.dtype=float32")
    check(tmp_path, needed(kind))
    check(tmp_path, needed(kind), "generator.dtype=float32", on_cpu=False)


@pytest.mark.parametrize("kind", [kind for kind, known in ENGINE_MODELS.items() if known.cpu_head_dims])
def test_heads_of_linear_attention_without_a_kernel_are_refused_on_cpu(kind, tmp_path):
    def sized(key: int, value: int) -> dict[str, object]:
        return needed(kind) | {"linear_key_head_dim": key, "linear_value_head_dim": value}

    for key, value in ((32, 32), (64, 128), (256, 256)):
        with pytest.raises(ConfigError, match="`linear_value_head_dim` are equal, and 64 or 128"):
            check(tmp_path, sized(key, value))
    check(tmp_path, sized(64, 64))
    check(tmp_path, sized(128, 128))
    check(tmp_path, sized(32, 32), on_cpu=False)


def change(value: object) -> object:
    if isinstance(value, bool):
        return not value
    if isinstance(value, int | float):
        return 2 * value
    if isinstance(value, list):
        return value[::-1]
    return 0.3 if value is None else "other"


KEYS = [
    (kind, key, value)
    for kind, known in ENGINE_MODELS.items()
    for key, value in (known.needed_config | known.unread_config).items()
]


@pytest.mark.parametrize(("kind", "key", "value"), KEYS)
def test_a_value_that_vllm_does_not_compute_with_is_refused(kind, key, value, tmp_path):
    other = change(value)
    with pytest.raises(ConfigError, match=re.escape(f"`{key}` = {json.dumps(other)}")):
        check(tmp_path, needed(kind) | {key: other}, on_cpu=False)
    check(tmp_path, needed(kind) | {key: value}, on_cpu=False)
    if key in ENGINE_MODELS[kind].unread_config:
        check(tmp_path, needed(kind), on_cpu=False)
        return
    with pytest.raises(ConfigError, match=f"`{key}` = null.* add it to that file"):
        check(tmp_path, {name: known for name, known in needed(kind).items() if name != key}, on_cpu=False)


@pytest.mark.parametrize(
    ("kind", "key", "value"),
    [
        ("kimi_linear", "first_k_dense_replace", 1),
        ("kimi_linear", "linear_attn_config", '{"full_attn_layers": [3], "kda_layers": [1, 2], "num_heads": 4, '),
        ("minimax_m2", "rotary_dim", 8),
    ],
)
def test_a_key_that_follows_from_transformers_own_is_missed_with_its_value(kind, key, value, tmp_path):
    made = AutoConfig.for_model(kind, **(ha.SHARED | ha.TORCH_ONLY[kind])).to_dict()
    if kind == "minimax_m2":
        made["rope_parameters"]["partial_rotary_factor"] = 0.5
    whole = made | list_needed_config(made)
    check(tmp_path, whole, on_cpu=False)
    with pytest.raises(ConfigError, match=re.escape(f"`{key}` = null, and vLLM computes {kind} with {value}")):
        check(tmp_path, {name: known for name, known in whole.items() if name != key}, on_cpu=False)


@pytest.mark.parametrize("kind", ["granitemoehybrid", "olmoe", "gpt_oss", "qwen2_moe", "mixtral", "qwen3_next"])
def test_what_transformers_writes_by_default_is_accepted(kind, tmp_path):
    AutoConfig.for_model(kind).save_pretrained(tmp_path)
    described = json.loads((tmp_path / "config.json").read_text())
    check(tmp_path, needed(kind) | described, on_cpu=False)


def test_the_text_part_of_a_larger_model_is_what_counts(tmp_path):
    with pytest.raises(ConfigError, match="qwen3_5_moe_text in bfloat16 only"):
        check(
            tmp_path,
            {"model_type": "qwen3_5_moe", "text_config": {"model_type": "qwen3_5_moe_text"}},
            "generator.dtype=float32",
        )


def test_a_class_with_images_needs_torchvision(tmp_path, monkeypatch):
    monkeypatch.setattr(model_checks, "has_torchvision", lambda: False)
    with pytest.raises(ConfigError, match=r"imports torchvision for qwen3_5_moe_text.*`make install`"):
        check(tmp_path, {"model_type": "qwen3_5_moe_text"})
    check(tmp_path, {"model_type": "qwen3_next"})
