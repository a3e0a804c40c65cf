"""Words of other trainers lead to settings that exist."""

import operator

import pytest

from r3async.config import Config, ConfigError, load_config
from r3async.config.generation import OWNED
from r3async.config.others import OTHERS, SETTINGS, ours

ENGINE = "generator.engine_args."


def test_every_setting_that_is_named_exists():
    for setting in SETTINGS:
        if setting.startswith(ENGINE):
            assert setting.removeprefix(ENGINE) not in OWNED
        else:
            operator.attrgetter(setting)(Config())


@pytest.mark.parametrize("name", sorted(OTHERS))
def test_every_word_is_answered_wherever_it_stands(name):
    for prefix in ("", "actor_rollout_ref.actor.", "trainer."):
        assert ours(f"{prefix}{name}") != ""
    if name.partition(".")[0] in Config.__struct_fields__:
        return  # a key of a section of ours, which has its own error
    with pytest.raises(ConfigError, match="unknown key") as caught:
        load_config("quickstart", {name: 3})
    assert ours(name) in str(caught.value)


def test_the_longest_end_of_a_name_counts():
    assert ours("model.name") == "here it is `model.path`"
    assert ours("trainer.nothing.at_all") == ""
    assert "`learner.parallel.tp`" in ours("actor.megatron.tensor_model_parallel_size")
    assert "engine_args.tensor_parallel_size" in ours("rollout.tensor_model_parallel_size")
