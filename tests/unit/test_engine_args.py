"""Engine arguments that are not a user's to set are refused when they are read, and the engine sets no other ones."""

import dataclasses

import pytest

from r3async.config import ConfigError, load_config
from r3async.config.rollout import DEFAULT_ENGINE_ARGS, OWNED_ENGINE_ARGS, check_engine_args, declare_engine_args
from r3async.rollout import build_engine
from r3async.rollout.vllm.engine import VllmEngine


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
    assert engine._engine_args.keys() <= OWNED_ENGINE_ARGS.keys() | DEFAULT_ENGINE_ARGS
    assert engine._engine_args["seed"] == 3
    assert not OWNED_ENGINE_ARGS.keys() & DEFAULT_ENGINE_ARGS
    with pytest.raises(KeyError, match="max_tokens_of_nobody"):
        declare_engine_args(max_tokens_of_nobody=1)


@pytest.mark.engine
def test_every_key_of_the_table_is_an_argument_of_vllm():
    from vllm.engine.arg_utils import AsyncEngineArgs

    assert {*OWNED_ENGINE_ARGS, *DEFAULT_ENGINE_ARGS} <= {field.name for field in dataclasses.fields(AsyncEngineArgs)}
