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


@pytest.mark.long
@pytest.mark.parametrize("word", sorted(EQUIVALENT_SETTINGS))
def test_every_word_is_answered_wherever_it_stands(word):
    name, _, value = word.partition("=")
    for prefix in ("", "actor_rollout_ref.actor.", "trainer."):
        assert find_equivalent_setting(f"{prefix}{name}", value) != ""
        assert "$" not in find_equivalent_setting(f"{prefix}{name}", value)
    if name.partition(".")[0] in Config.__struct_fields__:
        return  # a key of a section of ours, which has its own error
    with pytest.raises(ConfigError, match="unknown key") as caught:
        load_config("quickstart", {name: value or 3})
    assert find_equivalent_setting(name, value or 3) in str(caught.value)


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


PASTED = {
    # TRL 1.16.0
    "loss_type=cispo": '`algorithm.policy_loss="cispo"` .*1 \\+ `algorithm.cispo.clip_high`, 5 by default',
    "loss_type=dr_grpo": '`algorithm.policy_loss="ppo"` and `algorithm.reduction="sequence_mean_token_sum_norm"`',
    "loss_type=grpo": '`algorithm.policy_loss="ppo"` and `algorithm.reduction="sequence_mean"`',
    "loss_type=luspo": '`algorithm.policy_loss="gspo"` and `algorithm.reduction="sequence_mean_token_sum_norm"`',
    "scale_rewards=False": 'here it is `algorithm.advantage="dr_grpo"`$',
    "importance_sampling_level=sequence": '`algorithm.policy_loss="gspo"` and `algorithm.reduction="sequence_mean"`',
    "epsilon_high=5.0": "`algorithm.ppo.clip_high=5.0` .*`algorithm.cispo.clip_high=4` here",
    "steps_per_generation=8": "`schedule.minibatches_per_step` .8 / `gradient_accumulation_steps`",
    "generation_batch_size=64": "`schedule.prompts_per_step` .64 / `num_generations`",
    "max_steps=1000": "`steps` .TRL counts updates",
    "use_bias_correction_kl=True": "`algorithm.reference_kl.weighted=true` .*at most `algorithm.reference_kl.weight_cap`",
    "vllm_importance_sampling_correction=true": '`algorithm.correction.weight="sequence"` and .*product_high=3`',
    "vllm_importance_sampling_mode=token_truncate": '`algorithm.policy_loss="tis"` and `algorithm.tis.cap` .2 by default, and 3',
    "vllm_importance_sampling_clip_max=2.5": "`algorithm.correction.product_high=2.5` .*`algorithm.tis.cap=2.5`",
    "vllm_importance_sampling_cap=2": "`algorithm.correction.product_high=2` .*`algorithm.tis.cap=2`",
    "off_policy_mask_threshold=0.5": "`algorithm.correction.geometric_low=0.606531`",
    # verl 0.9.1
    "actor_rollout_ref.actor.policy_loss.loss_mode=dppo_tv": '`algorithm.policy_loss="dppo"` .*`algorithm.anchor="recomputed"`',
    "actor_rollout_ref.actor.policy_loss.loss_mode=vanilla": '`algorithm.policy_loss="ppo"` and `algorithm.ppo.dual_clip=3`',
    "actor_rollout_ref.actor.loss_agg_mode=seq-mean-token-mean": '`algorithm.reduction="sequence_mean"`$',
    "actor_rollout_ref.actor.loss_scale_factor=8192": '`algorithm.reduction="sequence_mean_token_sum_norm"` .*8192',
    "actor_rollout_ref.actor.kl_loss_type=low_var_kl": "`algorithm.reference_kl.weighted=false` .*value of 10",
    "actor_rollout_ref.actor.kl_loss_type=k1": "none here; .*a gradient of 1",
    "actor_rollout_ref.actor.grad_clip=1.0": "`learner.max_grad_norm`",
    "actor_rollout_ref.actor.tau_neg=1.05": "`algorithm.sapo.tau_negative`",
    "actor_rollout_ref.rollout.log_prob_max_token_len_per_gpu=16384": "`learner.max_tokens_per_micro_batch`",
    "algorithm.rollout_correction.rollout_rs=seq_sum_k1": '`algorithm.correction.product_low` and .*"0.2_2.0" is 0.5 and 5',
    "algorithm.rollout_correction.rollout_rs_threshold=0.8_1.6": "geometric_low=0.625` and .*geometric_high=1.25`",
    "algorithm.rollout_correction.rollout_rs_threshold=1.25": "geometric_low=0.8` and .*geometric_high=1.25`",
    "algorithm.rollout_correction.rollout_is_threshold=0.5_2.0": "`algorithm.correction.weight_cap=2` .*`icepop_low`",
    "algorithm.rollout_correction.bypass_mode=false": '`algorithm.anchor="recomputed"`',
    "algorithm.rollout_correction.loss_type=reinforce": '`algorithm.policy_loss="truncated_pg"`',
    "algorithm.adv_estimator=reinforce_plus_plus": '`algorithm.advantage="reinforce_pp"`',
    "algorithm.adv_estimator=gae": "there is no critic",
    # SkyRL 0.4.0
    "trainer.algorithm.zero_variance_filter=true": "`algorithm.filter_zero_variance`",
    "trainer.algorithm.entropy_loss_coef=0.01": "`algorithm.entropy_coef`",
    "trainer.algorithm.off_policy_correction.tis_ratio_type=sequence": '`algorithm.correction.weight="sequence"`',
    "trainer.algorithm.off_policy_correction.geo_mask_low=0.99": "`algorithm.correction.geometric_low=0.99`",
    "trainer.algorithm.cispo.cispo_eps_clip_high=4.0": "`algorithm.cispo.clip_high=4.0`",
    "trainer.algorithm.dppo.delta_high=0.2": "`algorithm.dppo.threshold_high=0.2`",
    # AReaL 1.0.4, miles 0.0.2
    "actor.eps_clip=0.2": "`algorithm.ppo.clip_low=0.2` and `algorithm.ppo.clip_high=0.2`",
    "actor.ppo_n_minibatches=4": "`schedule.minibatches_per_step`",
    "tis_clip=2.0": "`algorithm.tis.cap=2.0`",
    "use_tis=true": '`algorithm.policy_loss="tis"`',
    "gconfig.max_tokens=65536": "`episode.max_total_tokens`$",
    "use_routing_replay=true": '`routing.replay="learner"`',
    "rollout_num_gpus=8": "`generator.count` .engines, so 8 / `rollout_num_gpus_per_engine`",
    "global_batch_size=256": "`schedule.minibatches_per_step` .a step's episodes / 256",
    # prime-rl, NeMo RL, OpenRLHF
    "orchestrator.batch_size=128": "`schedule.prompts_per_step` .128 / `group_size`",
    "orchestrator.buffer.online_difficulty_filtering=true": "`schedule.replaced_groups`",
    "loss_fn.truncated_importance_sampling_type=icepop": "`algorithm.correction.icepop_high` .*the ratio is also the weight",
    "train_batch_size=128": "`schedule.prompts_per_step` .*OpenRLHF counts the episodes of an update",
    # what is set for evaluations, a critic, a teacher or another placement is no setting of the policy's training
    "actor_rollout_ref.rollout.val_kwargs.temperature=0.6": "`evaluation.temperature`$",
    "actor_rollout_ref.rollout.val_kwargs.top_p=0.7": "none here; evaluations sample as `episode` says",
    "eval_gconfig.n_samples=4": "`evaluation.samples_per_task`",
    "critic.optim.lr=1e-5": "there is no critic",
    "orchestrator.teacher_model.model.name=big": "`algorithm.distillation.teacher`",
    "algorithm.kl_ctrl.target_kl=0.1": "none here; `algorithm.reference_kl.coef` is constant",
    "trainer.algorithm.clip_cov.clip_ratio=0.0002": "`algorithm.clip_cov.share=0.0002`",
    "trainer.placement.colocate_all=true": '`generator.colocate` ."share"',
    "trainer.nothing.at_all=3": "unknown key `trainer.nothing.at_all`: no setting is known to be like it",
    # a value of theirs for a setting of ours
    "algorithm.policy_loss=dppo_tv": 'there is none of that name; here it is `algorithm.policy_loss="dppo"`',
    "algorithm.reduction=seq-mean-token-mean": 'here it is `algorithm.reduction="sequence_mean"`',
    "algorithm.advantage=reinforce++": 'here it is `algorithm.advantage="reinforce_pp"`',
}


@pytest.mark.parametrize("pasted", PASTED)
def test_a_pasted_setting_is_answered_with_what_its_value_means(pasted):
    with pytest.raises(ConfigError, match=PASTED[pasted]):
        load_config("quickstart", [pasted])


def test_what_the_answers_say_in_numbers_is_a_configuration():
    """Settings with values that answers about TRL's and verl's importance weights name, together."""
    both = {"algorithm.anchor": "recomputed", "algorithm.correction.numerator": "recomputed"}
    sequence_mask = {"correction.weight": "sequence", "correction.weight_cap": 1e9, "correction.product_high": 3}
    bounds = {"correction.geometric_low": 0.625, "correction.geometric_high": 1.25, "policy_loss": "ppo"}
    for settings in (sequence_mask, bounds):
        read = load_config("quickstart", both | {f"algorithm.{key}": value for key, value in settings.items()})
        for key, value in settings.items():
            assert operator.attrgetter(key)(read.algorithm) == value


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


def test_a_key_below_a_reward_is_no_key():
    with pytest.raises(ConfigError, match=r"unknown key `reward\.max_len`: `reward` is no section"):
        load_config("quickstart", {"reward.max_len": 3})
