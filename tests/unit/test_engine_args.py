"""Engine arguments that are not a user's to set are refused when they are read, and the engine sets no other ones."""

import dataclasses
from typing import get_args

import pytest

from r3async.config import ConfigError, load_config
from r3async.config.vllm_arguments import (
    CACHE_DTYPE_BYTES,
    COMPUTING_ENGINE_ARGS,
    DEFAULT_ENGINE_ARGS,
    NEUTRAL_ENGINE_ARGS,
    OWNED_ENGINE_ARGS,
    PLANNED_ENGINE_ARGS,
    check_engine_args,
    declare_engine_args,
)
from r3async.rollout import build_engine
from r3async.rollout.vllm import engine as vllm_engine_module
from r3async.rollout.vllm.engine import VllmEngine, describe_start_failure
from r3async.tools.memory import ENGINE_BATCH_TOKENS
from r3async.tools.plan import DEFAULT_ENGINE_SHARE


@pytest.mark.parametrize("name", OWNED_ENGINE_ARGS)
def test_what_the_engine_owns_is_refused_with_what_to_set_instead(name):
    with pytest.raises(ConfigError) as refused:
        load_config("quickstart", [f"generator.engine_args.{name}=1"])
    assert str(refused.value) == f"`generator.engine_args.{name}` cannot be set: {OWNED_ENGINE_ARGS[name]}"


def test_a_file_is_refused_too_and_every_key_is_named(tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text('extends = "quickstart"\n[generator.engine_args]\nseed = 1\ndtype = "float16"\nblock_size = 16\n')
    with pytest.raises(ConfigError, match=r"engine_args\.seed.*engine_args\.dtype") as refused:
        load_config(str(path))
    assert "block_size" not in str(refused.value)


def test_other_arguments_are_vllms_own_and_the_scripted_engine_has_its_own():
    load_config(
        "quickstart", ["generator.engine_args={ block_size = 16, enforce_eager = false, tensor_parallel_size = 2 }"]
    )
    check_engine_args(dict.fromkeys(DEFAULT_ENGINE_ARGS, 1))
    scripted = ["generator.engine=scripted", "weights.probe=false", "generator.engine_args={ token_seconds = 0.1 }"]
    load_config("quickstart", scripted)


def test_the_engine_sets_nothing_that_the_table_does_not_have(tiny_model):
    engine = build_engine(load_config("quickstart", [f"model.path={tiny_model}"]), str(tiny_model), seed=3)
    assert isinstance(engine, VllmEngine)
    assert engine.engine_args.keys() <= OWNED_ENGINE_ARGS.keys() | DEFAULT_ENGINE_ARGS
    assert engine.engine_args["seed"] == 3
    assert not OWNED_ENGINE_ARGS.keys() & DEFAULT_ENGINE_ARGS
    with pytest.raises(KeyError, match="max_tokens_of_nobody"):
        declare_engine_args(max_tokens_of_nobody=1)


@pytest.mark.parametrize(
    ("setting", "part"),
    [
        ("worker_cls=mine", r"worker_cls` cannot be set: what it changes in memory, log-probs or routes is unknown"),
        ("kv_cache_dtyp=fp8", r"did you mean 'kv_cache_dtype'\?"),
        ("kv_cache_dtype=nvfp4", r"kv_cache_dtype` = 'nvfp4': its memory is not planned; these are: auto, .*fp8_e5m2"),
        ("quantization_config={ a = 1 }", r"quantization_config` cannot be set: engines hold what the learner trains"),
        (
            "hf_overrides={ head_dtype = 'float32' }",
            r"the engine's logits and not the learner's\. `model\.head_dtype` sets",
        ),
        ("cpu_offload_gb=4", r"raise `generator\.engine_args\.tensor_parallel_size`"),
        ("kv_offloading_size=4", r"keys, values and routes of older weights must end with them"),
    ],
)
def test_what_is_neither_planned_nor_probed_is_refused(setting, part):
    with pytest.raises(ConfigError, match=part):
        load_config("quickstart", [f"generator.engine_args.{setting}"])


def test_what_changes_arithmetic_needs_the_probe():
    settings = ["generator.engine_args={ kv_cache_dtype = 'fp8_e5m2', block_size = 16 }"]
    load_config("quickstart", settings)
    with pytest.raises(ConfigError, match=r"kv_cache_dtype` changes what an engine computes.*set weights\.probe=true$"):
        load_config("quickstart", [*settings, "weights.probe=false"])


def test_an_engine_is_eager_on_cpu_alone_unless_a_user_says_so(tiny_model, monkeypatch):
    def eager(*settings: str) -> bool:
        config = load_config("quickstart", [f"model.path={tiny_model}", *settings])
        return build_engine(config, str(tiny_model), seed=3).engine_args["enforce_eager"]

    assert eager() is True
    assert eager("generator.engine_args.enforce_eager=false") is False
    monkeypatch.setattr(vllm_engine_module, "is_cpu_vllm", lambda: False)
    assert eager() is False
    assert eager("generator.engine_args.enforce_eager=true") is True


@pytest.mark.engine
def test_the_tables_are_of_vllms_arguments_and_the_plan_knows_its_defaults():
    from vllm.config.cache import CacheDType
    from vllm.config.scheduler import SchedulerConfig
    from vllm.engine.arg_utils import AsyncEngineArgs

    fields = {field.name: field.default for field in dataclasses.fields(AsyncEngineArgs)}
    tables = (OWNED_ENGINE_ARGS, PLANNED_ENGINE_ARGS, COMPUTING_ENGINE_ARGS, NEUTRAL_ENGINE_ARGS)
    assert {name for table in tables for name in table} <= fields.keys()
    assert {"kv_cache_dtype", "mamba_ssm_cache_dtype"} == PLANNED_ENGINE_ARGS & COMPUTING_ENGINE_ARGS
    assert not (PLANNED_ENGINE_ARGS | COMPUTING_ENGINE_ARGS) & NEUTRAL_ENGINE_ARGS
    assert CACHE_DTYPE_BYTES.keys() <= set(get_args(CacheDType))
    assert fields["gpu_memory_utilization"] == DEFAULT_ENGINE_SHARE
    assert SchedulerConfig.DEFAULT_MAX_NUM_BATCHED_TOKENS == ENGINE_BATCH_TOKENS


def test_a_start_that_a_package_beside_vllm_prevents_names_the_command_that_knows_the_remedy():
    """As pip installs them from an index that has torch for CPU, and torchvision for CUDA alone."""
    unfit = describe_start_failure("init", RuntimeError("operator torchvision::nms does not exist"))
    assert unfit.startswith(
        "vLLM could not start with init: operator torchvision::nms does not exist; `r3async doctor`"
    )
    assert "doctor" not in describe_start_failure("init", RuntimeError("no such file"))
