"""Words of other trainers lead to settings that exist."""

import operator

import pytest

from r3async.config import Config, ConfigError, load_config
from r3async.config.others import EQUIVALENT_SETTINGS, TARGET_SETTINGS, find_equivalent_setting
from r3async.config.rollout import OWNED_ENGINE_ARGS

ENGINE = "generator.engine_args."


def test_every_setting_that_is_named_exists():
    for setting in TARGET_SETTINGS:
        if setting.startswith(ENGINE):
            assert setting.removeprefix(ENGINE) not in OWNED_ENGINE_ARGS
        else:
            operator.attrgetter(setting)(Config())


@pytest.mark.parametrize("name", sorted(EQUIVALENT_SETTINGS))
def test_every_word_is_answered_wherever_it_stands(name):
    for prefix in ("", "actor_rollout_ref.actor.", "trainer."):
        assert find_equivalent_setting(f"{prefix}{name}") != ""
    if name.partition(".")[0] in Config.__struct_fields__:
        return  # a key of a section of ours, which has its own error
    with pytest.raises(ConfigError, match="unknown key") as caught:
        load_config("quickstart", {name: 3})
    assert find_equivalent_setting(name) in str(caught.value)


def test_the_longest_end_of_a_name_counts():
    assert find_equivalent_setting("model.name") == "here it is `model.path`"
    assert find_equivalent_setting("trainer.nothing.at_all") == ""
    assert "`learner.parallel.tp`" in find_equivalent_setting("actor.megatron.tensor_model_parallel_size")
    assert "engine_args.tensor_parallel_size" in find_equivalent_setting("rollout.tensor_model_parallel_size")
