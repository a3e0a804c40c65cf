"""Words of other trainers, and old names of metrics, lead to those that exist."""

import operator

import pytest

from r3async.config import Config, ConfigError, load_config
from r3async.config.data import DataConfig
from r3async.config.others import EQUIVALENT_SETTINGS, TARGET_SETTINGS, find_equivalent_setting
from r3async.config.shorthand import SHORTHAND_KEYS
from r3async.config.vllm_arguments import OWNED_ENGINE_ARGS
from r3async.data.metrics import METRICS, find_metric, find_new_name
from r3async.views.summary import RunSummary

ENGINE = "generator.engine_args."


def test_every_setting_that_is_named_exists():
    for setting in TARGET_SETTINGS:
        if setting.startswith(ENGINE):
            assert setting.removeprefix(ENGINE) not in OWNED_ENGINE_ARGS
        elif setting.partition(".")[0] in SHORTHAND_KEYS:
            assert setting == "reward" or setting.removeprefix("data.") in DataConfig.__struct_fields__
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


@pytest.mark.parametrize(
    ("name", "setting"),
    [
        ("data.train_files", "`data.path`"),
        ("data.val_files", "`data.eval`"),
        ("custom_reward_function.path", "`reward`"),
        ("peft_config", "`learner.lora.rank`"),
        ("lora_r", "`learner.lora.rank`"),
        ("learner.lora.r", "`learner.lora.rank`"),
        ("actor_rollout_ref.model.lora_rank", "`learner.lora.rank`"),
        ("actor_rollout_ref.model.target_modules", "`learner.lora.targets`"),
        ("actor_rollout_ref.model.path", "`model.path`"),
        ("reward_model.enable", "`reward` = file.py:function"),
        ("trainer.policy.model.lora.alpha", "`learner.lora.alpha`"),
        ("policy.lora_cfg.enabled", "`learner.lora.rank`"),
    ],
)
def test_settings_for_rows_rewards_and_adapters_are_answered(name, setting):
    with pytest.raises(ConfigError, match="unknown key") as caught:
        load_config("quickstart", {name: 3})
    assert setting in str(caught.value)


RENAMED = {
    "env/moves_mean": "env/moves/mean",
    "env/small/episode_tokens_p95": "env/small/response_length_p95",
    "env/small/episode_truncated_share": "env/small/response_length_clip_ratio",
    "env/small/reward_brief_mean": "env/small/rewards/brief/mean",
    "episode/tokens_mean": "response_length/mean",
    "episode/tokens_p95": "response_length/p95",
    "episode/tokens_max": "response_length/max",
    "episode/truncated_share": "response_length/clip_ratio",
    "optimizer/no_contrast": "optimizer/zero_variance",
    "reward/brief_mean": "rewards/brief/mean",
    "reward/std_of_all_std": "rewards/std_of_all/std",
    "rollout_corr/ess": "ratio/ess",
    "rollout_corr/k3_kl": "rollout_kl/k3",
    "rollout_corr/kl": "rollout_kl/k1",
    "rollout_kl/k3_age_7": "rollout_kl/k3_staleness_7",
    "served_kl/k3": "rollout_kl/served_k3",
    "served_kl/k3_age_0": "rollout_kl/served_k3_staleness_0",
    "served_kl/k3_low": "rollout_kl/served_k3_low",
    "served_kl/predicted": "rollout_kl/served_k3_predicted",
    "served_kl/tokens": "rollout_kl/served_tokens",
    "staleness/age_3": "staleness/tokens_3",
    "learner/step_seconds": "timing/train_seconds",
    "weights/pause_seconds": "timing/engine_pause_seconds",
    "weights/snapshot_seconds": "timing/snapshot_seconds",
    "weights/update_seconds": "timing/weight_update_seconds",
}


@pytest.mark.parametrize("old", RENAMED)
def test_an_old_name_is_refused_with_the_new_one_and_the_new_one_exists(old: str) -> None:
    assert find_metric(RENAMED[old]).description != RENAMED[old]
    message = f"no run has '{old}': it is '{RENAMED[old]}' now"
    with pytest.raises(KeyError, match=message):
        RunSummary(name="run", status="finished")[old]


def test_no_name_of_the_catalogue_is_an_old_one() -> None:
    names = [*METRICS, "rewards/brief/mean", "env/moves_mean/mean", "env/small/reward_mean", "env/small/moves/std"]
    names += ["env/small/response_length_mean", "env/small/reward_std_in_group"]
    assert [name for name in names if find_new_name(name)] == []
