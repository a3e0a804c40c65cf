"""Equivalents of other trainers' settings, which the error about an unknown key names.

A key of the table is the end of a dotted name (`rollout.n` is the end of verl's
`actor_rollout_ref.rollout.n`), or a section in it (`reward_model` in verl's `reward_model.enable`);
the longest end that is in the table counts, and ends count before sections. An end with a value
(`loss_type=cispo`) counts before the same end without. Its value is our setting (`learner.lr`), or
`a + b` for two of them, with the difference after a colon; or, after a dash, the reason why there
is none. `_spell_numbers` has the words that stand for numbers (`$value`).

docs/same-name.md has the arithmetic behind the answers about `algorithm`.
"""

from __future__ import annotations

import math
from string import Template

_BATCH_SIZE_NOTE = (
    "groups of a step, each of `schedule.group_size` episodes; micro-batches follow from tokens"
)
_TOKEN_BUDGET_NOTE = "a budget in tokens, by which samples are packed"
_ACCUMULATION_NOTE = (
    "the step's groups are accumulated by themselves, in micro-batches of so many tokens"
)
_PACKING_NOTE = "- it follows from the packed tokens: see `learner.max_tokens_per_micro_batch`"
_NO_CRITIC_NOTE = (
    "- there is no critic: advantages compare the episodes of a group (`algorithm.advantage`, which "
    "is 'grpo' if unset)"
)
_ENGINE_TP_NOTE = "of an engine; the learner's is `learner.parallel.tp`"
_ENGINE_COUNT_NOTE = "engines, each in a process of its own"
_DATA_NOTE = "a file, a directory, or a dataset of the hub; `data=` is short for it"
_EVAL_NOTE = "a file, a split, or how many rows are held out; how often is `evaluation.every_steps`"
_PROMPT_NOTE = 'a column, or a template such as "{question}"'
_REWARD_NOTE = 'your function, as "file.py:function", beside `data`'
_REWARD_MODEL_NOTE = (
    "- write a reward that calls the model: `reward` = file.py:function, which may be `async def`"
)
_ADAPTER_NOTE = (
    "adapters are on if it is above 0, with `learner.lora.alpha` and `learner.lora.targets`"
)
_DROPOUT_NOTE = "- adapters have no dropout: the learner scores exactly the policy that generated"

_RECOMPUTED_NOTE = '`algorithm.anchor="recomputed"` as there'
_COUNT_OF_UPDATES_NOTE = (
    "TRL counts updates, so divide by `schedule.minibatches_per_step` times "
    "`schedule.epochs_per_step`"
)
_PROMPTS_OF_UPDATE_NOTE = "`train_batch_size` / $value, since there it is the prompts of an update"
_OLD_RATIO_NOTE = '`algorithm.correction.numerator="recomputed"` as there'
_CLIP_LOW_NOTE = (
    "of GSPO and CISPO it is `clip_low` of their own sections, of DPPO "
    "`algorithm.dppo.threshold_low`"
)
_CLIP_HIGH_NOTE = (
    "of GSPO and CISPO it is `clip_high` of their own sections, of DPPO "
    "`algorithm.dppo.threshold_high`"
)
_CAP_NOTE = (
    "of GSPO it is `algorithm.gspo.clip_high`; of CISPO it is the cap itself there, and "
    "`algorithm.cispo.clip_high=$less_one` here, whose cap is 1 more"
)
_LOSS_SCALE_NOTE = (
    "its constant is `episode.max_new_tokens`. The factor between that and $value is one that "
    "Adam takes out, but `learner.max_grad_norm` does not"
)
_NO_GRADIENT_NOTE = (
    "k3 as there, but beyond a value of 10 (a reference 2.6 nats above) theirs has no gradient, "
    "and ours has"
)
_ONLY_K3_NOTE = (
    "- KL to the reference is k3's, or weighted by learner / rollout: `algorithm.reference_kl`. "
    "As a loss, k1 has a gradient of 1 whatever the reference"
)
_WEIGHTED_NOTE = (
    "the weight here is learner / rollout, at most `algorithm.reference_kl.weight_cap`, and there "
    "learner / old without a cap"
)
_TRL_WEIGHTS_NOTE = (
    'with TRL\'s default mode, "sequence_mask", whose ratio is also the weight of the answer: '
    '`algorithm.correction.weight="sequence"`, `weight_cap=1e9`'
)
_TRL_CAP = (
    "algorithm.correction.product_high=$value: "
    f'{_TRL_WEIGHTS_NOTE}. With "token_truncate" it is `algorithm.tis.cap=$value`, with '
    '"sequence_truncate" `algorithm.correction.weight_cap=$value`, with "token_mask" '
    "`algorithm.correction.icepop_high=$value`"
)
_OFF_POLICY_NOTE = (
    "algorithm.correction.geometric_low=$exp_minus: exp(-threshold). It leaves out answers of either "
    "sign, and there only those of negative advantage"
)
_NOT_SCALED_NOTE = "- rewards are taken as they are: scale or clip them in your `reward`"
_SCALED_BY_DEVIATION = (
    'algorithm.advantage: "grpo" divides by the group\'s standard deviation, "dr_grpo" does not'
)
_ADAPTIVE_NOTE = "- the coefficient is constant: `algorithm.entropy_coef`"

LOSS_VALUES = {
    # TRL's `loss_type` says what the loss is a mean over, but for cispo and sapo.
    "grpo": 'algorithm.policy_loss="ppo" + algorithm.reduction="sequence_mean"',
    "dapo": (
        'algorithm.policy_loss="ppo" + algorithm.reduction="token_mean": both bounds are '
        "`algorithm.ppo.clip_low` and `clip_high`"
    ),
    "bnpo": (
        'algorithm.policy_loss="ppo" + algorithm.reduction="token_mean": over the tokens of a '
        "minibatch, where there it is a mean of the micro-batches' means"
    ),
    "dr_grpo": (
        'algorithm.policy_loss="ppo" + algorithm.reduction="sequence_mean_token_sum_norm": over '
        '`episode.max_new_tokens`. Its advantage is another setting, `algorithm.advantage="dr_grpo"`'
    ),
    "cispo": (
        'algorithm.policy_loss="cispo": a weight is at most 1 + `algorithm.cispo.clip_high`, 5 by '
        "default. TRL's `epsilon_high` and Molt's `clip_eps_high` are that cap itself; verl's "
        "`clip_ratio_high` is ours, and 0.2 by default"
    ),
    "sapo": (
        'algorithm.policy_loss="sapo" + algorithm.reduction="sequence_mean": TRL and verl always '
        "take that mean for it; ours is by token unless it is set"
    ),
    "luspo": (
        'algorithm.policy_loss="gspo" + algorithm.reduction="sequence_mean_token_sum_norm": but '
        "for a constant factor, `episode.max_new_tokens`"
    ),
    "vespo": "- sequence weights are truncated or masked, not shaped: `algorithm.correction`",
    "gspo": (
        'algorithm.policy_loss="gspo" + algorithm.reduction="sequence_mean": the mean of its '
        "paper; verl, Molt, miles and AReaL take a mean of tokens by default, as ours is"
    ),
    # verl's `loss_mode`
    "vanilla": (
        'algorithm.policy_loss="ppo" + algorithm.ppo.dual_clip=3: verl\'s default `clip_ratio_c`; '
        f"ours is off. With {_RECOMPUTED_NOTE}"
    ),
    "dppo_tv": (
        'algorithm.policy_loss="dppo": `clip_ratio_low`, `clip_ratio_high` are `threshold_low`, '
        "`threshold_high` of `algorithm.dppo`. Its ratio is truncated at `clip_ratio_c` (3 by "
        f"default), ours is not. With {_RECOMPUTED_NOTE}"
    ),
    "dppo_kl": (
        'algorithm.policy_loss="dppo": the distance here is a difference of probability '
        "(`dppo_tv`), so thresholds do not carry over"
    ),
    "binary_kl": (
        'algorithm.policy_loss="dppo": the distance here is a difference of probability '
        "(`binary_tv`), so thresholds do not carry over"
    ),
    "bypass_mode": (
        'algorithm.policy_loss="ppo" + algorithm.anchor="rollout": with `algorithm.ppo.dual_clip=3` '
        'as there. Its `loss_type="reinforce"` is "truncated_pg"'
    ),
    "gpg": "- it is -A log pi without a ratio, the example of your own loss in docs/algorithms.md",
    "clip_cov": (
        'algorithm.policy_loss="clip_cov": tokens are chosen in a minibatch, not in each '
        "micro-batch. Its clip range is `algorithm.ppo`"
    ),
    "kl_cov": (
        'algorithm.policy_loss="kl_cov": tokens are chosen in a minibatch, not in each micro-batch'
    ),
    "geo_mean": '- the loss by the mean ratio of an answer is `algorithm.policy_loss="gspo"`',
    "dro": "- the quadratic penalty is `algorithm.rollout_kl`, whose default estimator is k2",
    # `loss_type` of verl's bypass mode
    "reinforce": (
        'algorithm.policy_loss="truncated_pg": its cap, `algorithm.truncated_pg.cap`, is the '
        'threshold of `rollout_is="token"`; "sequence" is "sequence_truncated_pg"'
    ),
    "ppo_clip": (
        'algorithm.policy_loss="ppo" + algorithm.anchor="rollout": with `algorithm.ppo.dual_clip=3` '
        "as there"
    ),
    "decoupled_ppo": 'algorithm.policy_loss="tis" + algorithm.tis.cap=5',
    # SkyRL's `policy_loss_type`
    "regular": f'algorithm.policy_loss="ppo": with {_RECOMPUTED_NOTE}',
    "dual_clip": (
        'algorithm.policy_loss="ppo" + algorithm.ppo.dual_clip: SkyRL\'s `clip_ratio_c`, 3 by '
        "default"
    ),
    "rollout_is": (
        'algorithm.policy_loss="truncated_pg" + algorithm.correction.icepop_low=0.8 + '
        "algorithm.correction.icepop_high=1.2: 1 - `eps_clip_low` and 1 + `eps_clip_high`"
    ),
    "importance_sampling": 'algorithm.policy_loss="truncated_pg": capped at 2, where there is no cap',
    "cross_entropy": "- answers are trained on by `r3async sft`",
    "policy_loss": "algorithm.policy_loss=\"ppo\": miles' and slime's only one",
    "sft_loss": "- answers are trained on by `r3async sft`",
    "custom_loss": 'algorithm.policy_loss: "module:function"',
}
"""Values of others' settings for the policy loss."""

REDUCTION_VALUES = {
    "token-mean": 'algorithm.reduction="token_mean"',
    "token-sum": "- the loss is a mean, so that the learning rate does not depend on the batch",
    "seq-mean-token-mean": 'algorithm.reduction="sequence_mean"',
    "seq-mean-token-sum": (
        'algorithm.reduction="sequence_mean_token_sum_norm": over `episode.max_new_tokens` as well'
    ),
    "seq-mean-token-sum-norm": (
        'algorithm.reduction="sequence_mean_token_sum_norm": over `episode.max_new_tokens`, where '
        "verl takes `loss_scale_factor`, or the padded width"
    ),
    "seq_mean_token_sum_norm": (
        'algorithm.reduction="sequence_mean_token_sum_norm": over `episode.max_new_tokens`, where '
        "SkyRL takes `max_seq_len`"
    ),
    "prompt-mean-token-mean": 'algorithm.reduction="prompt_mean"',
    "token_mean_legacy": (
        'algorithm.reduction="token_mean": of all tokens; the legacy one is a mean of the means of '
        "micro-batches"
    ),
}
"""Values of others' settings for the reduction."""

ADVANTAGE_VALUES = {
    "gae": _NO_CRITIC_NOTE,
    "ppo": _NO_CRITIC_NOTE,
    "reinforce++": 'algorithm.advantage="reinforce_pp"',
    "reinforce_plus_plus": 'algorithm.advantage="reinforce_pp"',
    "reinforce_plus_plus_baseline": 'algorithm.advantage="reinforce_pp_baseline"',
    "reinforce": 'algorithm.advantage="reinforce_pp"',
    "reinforce_baseline": 'algorithm.advantage="reinforce_pp_baseline"',
    "grpo_vectorized": 'algorithm.advantage="grpo"',
    "rloo_vectorized": 'algorithm.advantage="rloo"',
    "gspo": 'algorithm.policy_loss="gspo" + algorithm.advantage="grpo"',
    "on_policy_distillation": "algorithm.distillation.teacher",
    "on_policy_distill": "algorithm.distillation.teacher",
    "remax": "- no greedy answer is sampled as a baseline; the others are one: `rloo`",
    "opo": '- answers count alike, whatever their lengths: `algorithm.advantage="dr_grpo"`',
    "gpg": '- the nearest is `algorithm.advantage="dr_grpo"`, without a factor for the batch',
    "grpo_passk": "- only the best answer has an advantage there: write it into your `reward`",
    "gdpo": "- rewards are added, and then compared: `reward` has their weights",
}
"""Values of others' settings for the advantage that are no values of ours."""

KL_VALUES = {
    **dict.fromkeys(
        ("k3", "low_var_kl"), f"algorithm.reference_kl.weighted=false: {_NO_GRADIENT_NOTE}"
    ),
    **dict.fromkeys(("k1", "kl", "k2", "mse", "abs", "k3+", "low_var_kl+", "full"), _ONLY_K3_NOTE),
}
"""Values of others' settings for the estimator of KL to the reference model."""


def _with_values(names: tuple[str, ...], values: dict[str, str]) -> dict[str, str]:
    return {f"{name}={value}": words for name in names for value, words in values.items()}


EQUIVALENT_SETTINGS = {
    # the optimizer
    "lr": "learner.lr",
    "learning_rate": "learner.lr",
    "optim.lr": "learner.lr",
    "lr_scheduler_type": "learner.lr_schedule",
    "lr_scheduler": "learner.lr_schedule",
    "scheduler.type": "learner.lr_schedule",
    "optimizer_config.scheduler": "learner.lr_schedule",
    "lr_decay_style": "learner.lr_schedule",
    "warmup_style": "learner.lr_schedule: the warm-up is `learner.warmup_steps` before any of them",
    "min_lr_ratio": "learner.min_lr_ratio",
    "min_lr": "learner.min_lr_ratio: a share of `learner.lr`",
    "warmup_steps": "learner.warmup_steps",
    "num_warmup_steps": "learner.warmup_steps",
    "lr_warmup_steps": "learner.warmup_steps",
    "warmup_ratio": "learner.warmup_steps: a number of steps",
    "lr_warmup_steps_ratio": "learner.warmup_steps: a number of steps",
    "weight_decay": "learner.weight_decay",
    "betas": "learner.betas",
    "adam_betas": "learner.betas",
    "adam_beta1": "learner.betas: both, as [0.9, 0.95]",
    "adam_beta2": "learner.betas: both, as [0.9, 0.95]",
    "betas1": "learner.betas: both, as [0.9, 0.95]",
    "betas2": "learner.betas: both, as [0.9, 0.95]",
    "adam_epsilon": "learner.eps",
    "max_grad_norm": "learner.max_grad_norm",
    "clip_grad": "learner.max_grad_norm",
    "grad_clip": "learner.max_grad_norm",
    "max_norm": "learner.max_grad_norm",
    "bf16": 'learner.dtype: "bfloat16" or "float32"',
    "fp16": 'learner.dtype: "bfloat16" or "float32"',
    "gradient_checkpointing": 'learner.recompute: "none", "selective" or "full"',
    "enable_gradient_checkpointing": 'learner.recompute: "none", "selective" or "full"',
    # how much a step trains
    "batch_size": f"schedule.prompts_per_step: {_BATCH_SIZE_NOTE}",
    "train_batch_size": f"schedule.prompts_per_step: {_BATCH_SIZE_NOTE}",
    "rollout_batch_size": f"schedule.prompts_per_step: {_BATCH_SIZE_NOTE}",
    "generation_batch_size": (
        "schedule.prompts_per_step: $value / `num_generations`, since TRL counts completions"
    ),
    "token_batch_size": "schedule.tokens_per_step",
    "per_device_train_batch_size": f"learner.max_tokens_per_micro_batch: {_TOKEN_BUDGET_NOTE}",
    "micro_batch_size": f"learner.max_tokens_per_micro_batch: {_TOKEN_BUDGET_NOTE}",
    "ppo_micro_batch_size": f"learner.max_tokens_per_micro_batch: {_TOKEN_BUDGET_NOTE}",
    "ppo_micro_batch_size_per_gpu": f"learner.max_tokens_per_micro_batch: {_TOKEN_BUDGET_NOTE}",
    "micro_train_batch_size_per_gpu": f"learner.max_tokens_per_micro_batch: {_TOKEN_BUDGET_NOTE}",
    "micro_forward_batch_size_per_gpu": f"learner.max_tokens_per_micro_batch: {_TOKEN_BUDGET_NOTE}",
    "log_prob_micro_batch_size_per_gpu": (
        f"learner.max_tokens_per_micro_batch: {_TOKEN_BUDGET_NOTE}"
    ),
    "log_prob_max_token_len_per_gpu": "learner.max_tokens_per_micro_batch: of all passes",
    "ppo_infer_max_token_len_per_gpu": "learner.max_tokens_per_micro_batch: of all passes",
    "ppo_max_token_len_per_gpu": "learner.max_tokens_per_micro_batch",
    "max_tokens_per_gpu": "learner.max_tokens_per_micro_batch",
    "max_tokens_per_microbatch": "learner.max_tokens_per_micro_batch",
    "token_budget": "learner.max_tokens_per_micro_batch",
    "use_dynamic_bsz": _PACKING_NOTE,
    "log_prob_use_dynamic_bsz": _PACKING_NOTE,
    "use_sample_packing": _PACKING_NOTE,
    "packing": _PACKING_NOTE,
    "gradient_accumulation_steps": f"learner.max_tokens_per_micro_batch: {_ACCUMULATION_NOTE}",
    "grad_accum_steps": f"learner.max_tokens_per_micro_batch: {_ACCUMULATION_NOTE}",
    "accumulate_grad_batches": f"learner.max_tokens_per_micro_batch: {_ACCUMULATION_NOTE}",
    "ppo_mini_batch_size": f"schedule.minibatches_per_step: {_PROMPTS_OF_UPDATE_NOTE}",
    "policy_mini_batch_size": f"schedule.minibatches_per_step: {_PROMPTS_OF_UPDATE_NOTE}",
    "steps_per_generation": (
        "schedule.minibatches_per_step: $value / `gradient_accumulation_steps`. TRL counts "
        "micro-steps: equal, as by default, they make 1 update of a generation"
    ),
    "num_minibatches": "schedule.minibatches_per_step",
    "ppo_n_minibatches": "schedule.minibatches_per_step",
    "num_steps_per_rollout": "schedule.minibatches_per_step",
    "max_steps": f"steps: {_COUNT_OF_UPDATES_NOTE}",
    "num_train_steps": "steps",
    "total_steps": "steps",
    "total_training_steps": "steps",
    "max_training_steps": "steps",
    "total_epochs": "steps: passes over the data follow from steps and `schedule.prompts_per_step`",
    "num_train_epochs": (
        "steps: passes over the data follow from steps and `schedule.prompts_per_step`"
    ),
    "num_generations": "schedule.group_size",
    "rollouts_per_example": "schedule.group_size",
    "n_samples_per_prompt": "schedule.group_size",
    "group_size": "schedule.group_size",
    "rollout.n": "schedule.group_size",
    # how far generation may be ahead
    "max_staleness": "schedule.max_staleness",
    "max_staleness_steps": "schedule.max_staleness",
    "max_async_level": "schedule.max_staleness",
    "async_level": "schedule.max_staleness",
    "staleness_threshold": "schedule.max_staleness: versions, not a share",
    "max_head_offpolicyness": "schedule.max_staleness",
    "max_off_policy_steps": "schedule.max_staleness",
    "max_off_policy_threshold": "schedule.max_staleness",
    "max_steps_off_policy": "schedule.max_staleness",
    "max_weight_staleness": "schedule.max_staleness",
    "max_trajectory_age_steps": "schedule.max_staleness",
    "async_generation_ratio": "schedule.max_staleness: versions, not a share",
    # the algorithm
    "beta": f"algorithm.reference_kl.coef=$value: {_WEIGHTED_NOTE}",
    "use_bias_correction_kl": f"algorithm.reference_kl.weighted=$value: {_WEIGHTED_NOTE}",
    "use_unbiased_kl": f"algorithm.reference_kl.weighted=$value: {_WEIGHTED_NOTE}",
    "kl_coef": (
        "algorithm.reference_kl.coef: the drift from the engine has its own, "
        "`algorithm.rollout_kl.coef`"
    ),
    "kl_loss_coef": "algorithm.reference_kl.coef",
    "init_kl_coef": "algorithm.reference_kl.coef",
    "kl_ctrl.kl_coef": "algorithm.reference_kl.coef",
    "use_kl_loss": "algorithm.reference_kl.coef: 0 is none",
    "use_kl_in_reward": (
        "- KL is a term of the loss, never of the reward: `algorithm.reference_kl.coef`"
    ),
    "kl_loss_type": "algorithm.reference_kl.weighted=false: k3 without a weight, as there",
    "kl_estimator_type": "algorithm.reference_kl.weighted=false: k3 without a weight, as there",
    "kl.estimator": "algorithm.reference_kl.weighted=false: k3 without a weight, as there",
    "kl.init_coef": "algorithm.reference_kl.coef",
    "kl_estimator": "algorithm.reference_kl.weighted=false: k3 without a weight, as there",
    **_with_values(
        ("kl_loss_type", "kl_estimator_type", "kl_estimator", "kl.estimator"), KL_VALUES
    ),
    "kl_ctl": "algorithm.reference_kl.coef: in the loss, not in the reward",
    "sync_ref_model": "- the reference is always the start model",
    "coef_min": (
        "algorithm.rollout_kl.coef: the adapted coefficient never falls below where it starts"
    ),
    "target_kl": "algorithm.rollout_kl.target",
    "kl_target": "algorithm.rollout_kl.target",
    **dict.fromkeys(
        ("clip_range", "clip_ratio", "cliprange", "epsilon", "eps_clip"),
        "algorithm.ppo.clip_low=$value + algorithm.ppo.clip_high=$value: with "
        '`algorithm.policy_loss="ppo"`. GSPO, CISPO and DPPO have their own sections',
    ),
    **dict.fromkeys(
        ("epsilon_low", "clip_ratio_low", "eps_clip_low"),
        f"algorithm.ppo.clip_low=$value: {_CLIP_LOW_NOTE}",
    ),
    **dict.fromkeys(
        ("clip_ratio_high", "eps_clip_high", "eps_clip_higher"),
        f"algorithm.ppo.clip_high=$value: {_CLIP_HIGH_NOTE}",
    ),
    "epsilon_high": f"algorithm.ppo.clip_high=$value: {_CAP_NOTE}",
    "clip_eps_high": f"algorithm.ppo.clip_high=$value: {_CAP_NOTE}",
    "eps_clip_low_high": (
        "algorithm.ppo.clip_low + algorithm.ppo.clip_high: of CISPO the second number is the cap "
        "itself there, and `algorithm.cispo.clip_high` is 1 less"
    ),
    "clip_ratio_c": "algorithm.ppo.dual_clip=$value: off by default, where verl and SkyRL have 3",
    "eps_clip_c": "algorithm.ppo.dual_clip=$value: miles reads it, and uses it for nothing",
    "c_clip": "algorithm.ppo.dual_clip=$value",
    "dual_clip": "algorithm.ppo.dual_clip=$value",
    "delta": "algorithm.ppo.dual_clip=$value",
    "delta_low": 'algorithm.dppo.threshold_low=$value: with `dppo_type="binary_tv"`',
    "delta_high": 'algorithm.dppo.threshold_high=$value: with `dppo_type="binary_tv"`',
    "dppo_type=binary_tv": 'algorithm.policy_loss="dppo"',
    "dppo_type": LOSS_VALUES["binary_kl"],
    "cispo_eps_clip_low": "algorithm.cispo.clip_low=$value",
    "cispo_eps_clip_high": "algorithm.cispo.clip_high=$value",
    "cispo_anchor": 'algorithm.anchor: "recomputed" for "old", which is SkyRL\'s default',
    "cispo_anchor=old": 'algorithm.anchor="recomputed"',
    "cispo_anchor=rollout": 'algorithm.anchor="rollout"',
    "entropy_coeff": "algorithm.entropy_coef",
    "ent_coef": "algorithm.entropy_coef",
    "entropy_coef": "algorithm.entropy_coef",
    "entropy_loss_coef": "algorithm.entropy_coef",
    "use_entropy_loss": "algorithm.entropy_coef: 0 is none; SkyRL's is 0.01 when it is on",
    "use_adaptive_entropy": _ADAPTIVE_NOTE,
    "entropy_target": _ADAPTIVE_NOTE,
    "entropy_coef_delta": _ADAPTIVE_NOTE,
    "top_entropy_quantile": "- tokens are not chosen by their entropy; all are trained",
    "loss_type": "algorithm.policy_loss: what it is a mean over is `algorithm.reduction`",
    "policy_loss_type": "algorithm.policy_loss",
    "loss_mode": "algorithm.policy_loss",
    **_with_values(("loss_type", "loss_mode", "policy_loss_type", "policy_loss"), LOSS_VALUES),
    "loss_agg_mode": 'algorithm.reduction: "token_mean", "sequence_mean" and others',
    **_with_values(("loss_agg_mode", "loss_reduction", "reduction"), REDUCTION_VALUES),
    "loss_scale_factor": (
        f'algorithm.reduction="sequence_mean_token_sum_norm": {_LOSS_SCALE_NOTE}'
    ),
    "algorithm.max_seq_len": (
        f'algorithm.reduction="sequence_mean_token_sum_norm": {_LOSS_SCALE_NOTE}'
    ),
    "calculate_per_token_loss": 'algorithm.reduction="token_mean": "sequence_mean" if it is false',
    "loss_reduction": "algorithm.reduction",
    "importance_sampling_level": 'algorithm.policy_loss: "gspo" is by sequence',
    "importance_sampling_level=sequence": LOSS_VALUES["gspo"],
    "importance_sampling_level=token": '- every `algorithm.policy_loss` but "gspo" is by token',
    "adv_estimator": "algorithm.advantage",
    "advantage_estimator": "algorithm.advantage",
    **_with_values(
        ("adv_estimator", "advantage_estimator", "advantage.estimator", "advantage"),
        ADVANTAGE_VALUES,
    ),
    "scale_rewards": _SCALED_BY_DEVIATION,
    **dict.fromkeys(("scale_rewards=none", "scale_rewards=false"), 'algorithm.advantage="dr_grpo"'),
    "scale_rewards=batch": (
        'algorithm.advantage="reinforce_pp_baseline": the group\'s mean, then mean and deviation '
        "of the batch's tokens; TRL's deviation is of the batch's scores"
    ),
    "multi_objective_aggregation": "- rewards are added by their weights, and then compared",
    "reward_norm": "algorithm.advantage: AReaL's default, none, has no baseline at all",
    "adv_norm": 'algorithm.advantage: "reinforce_pp" and "reinforce_pp_baseline" scale by the batch',
    "advantage_batch_normalize": (
        'algorithm.advantage="reinforce_pp_baseline": after the group\'s mean'
    ),
    "normalize_advantages": (
        'algorithm.advantage="reinforce_pp_baseline": after the group\'s mean'
    ),
    "reward_scaling": _NOT_SCALED_NOTE,
    "reward_bias": _NOT_SCALED_NOTE,
    "reward_clip": _NOT_SCALED_NOTE,
    "reward.clip_range": _NOT_SCALED_NOTE,
    "norm_adv_by_std_in_grpo": _SCALED_BY_DEVIATION,
    "grpo_norm_by_std": _SCALED_BY_DEVIATION,
    "disable_grpo_std_normalization": 'algorithm.advantage="dr_grpo"',
    "mask_truncated_completions": "algorithm.overlong_filter",
    "overlong_filtering": "algorithm.overlong_filter",
    "apply_overlong_filtering": "algorithm.overlong_filter",
    "mask_no_eos_with_zero": "algorithm.overlong_filter",
    "zero_reward_on_non_stop": (
        "algorithm.overlong_filter: leaves cut answers out; a reward of 0 is your `reward`'s to give"
    ),
    "overlong_buffer.len": "algorithm.overlong_penalty.buffer",
    "overlong_buffer.enable": "algorithm.overlong_penalty.buffer: 0 is none",
    "overlong_buffer.penalty_factor": (
        "algorithm.overlong_penalty.factor: longer answers than the maximum stay at it"
    ),
    "overlong_tokens": "algorithm.overlong_penalty.buffer",
    "overlong_penalty_factor": (
        "algorithm.overlong_penalty.factor: longer answers than the maximum stay at it"
    ),
    "zero_variance_filter": "algorithm.filter_zero_variance",
    "zero_variance_filter_tol": (
        "- scores are equal within 5e-7 of the largest, which is rounding: "
        "`algorithm.filter_zero_variance`"
    ),
    "dynamic_filtering_enable": (
        "schedule.replaced_groups: how many, with algorithm.filter_zero_variance=true"
    ),
    "max_num_gen_batches": "schedule.replaced_groups: groups, not batches",
    "max_sample_batches": "schedule.replaced_groups: groups, not batches",
    "filter_groups.enable": (
        "schedule.replaced_groups: how many, with algorithm.filter_zero_variance=true"
    ),
    "online_difficulty_filtering": "schedule.difficulty.settled_share",
    "dynamic_sampling": (
        "schedule.replaced_groups: how many, with algorithm.filter_zero_variance=true"
    ),
    "dynamic_sampling.type": (
        "schedule.replaced_groups: how many, with algorithm.filter_zero_variance=true"
    ),
    **dict.fromkeys(
        ("sapo_temperature_pos", "tau_pos", "sapo_tau_pos"), "algorithm.sapo.tau_positive"
    ),
    **dict.fromkeys(
        ("sapo_temperature_neg", "tau_neg", "sapo_tau_neg"), "algorithm.sapo.tau_negative"
    ),
    "use_sapo_loss": 'algorithm.policy_loss="sapo"',
    "num_iterations": "schedule.epochs_per_step",
    "ppo_epochs": "schedule.epochs_per_step",
    "update_epochs_per_batch": "schedule.epochs_per_step",
    "ratio_cap": (
        'algorithm.truncated_pg.cap: the loss that was "tis" is "truncated_pg", and '
        '"tis" is now Yao\'s'
    ),
    **dict.fromkeys(
        ("tis_imp_ratio_cap", "token_tis_ratio_clip_high", "tis_clip"),
        'algorithm.tis.cap=$value: with `algorithm.policy_loss="tis"`',
    ),
    "tis_clip_low": "- weights have a cap, and no lower bound: `algorithm.tis.cap`",
    "use_tis": 'algorithm.policy_loss="tis": cap 2, as there',
    "tis_ratio_type": 'algorithm.policy_loss="tis": by token',
    "tis_ratio_type=sequence": (
        'algorithm.correction.weight="sequence": `weight_cap` is 2, and 5 there by default. With '
        '`policy_loss="ppo"`, `anchor` and `correction.numerator` "recomputed"'
    ),
    "sequence_tis_ratio_clip_high": "algorithm.correction.weight_cap=$value",
    "vllm_importance_sampling_correction": (
        'algorithm.correction.weight="sequence" + algorithm.correction.product_high=3: what TRL '
        'does by default, with `weight_cap=1e9`, `policy_loss="ppo"`, `anchor` and '
        '`correction.numerator` "recomputed". `policy_loss="tis"` is the mode "token_truncate"'
    ),
    "vllm_importance_sampling_correction=false": 'algorithm.correction.weight="none"',
    "vllm_importance_sampling_mode": f"algorithm.correction.weight: {_TRL_WEIGHTS_NOTE}",
    "vllm_importance_sampling_mode=token_truncate": (
        'algorithm.policy_loss="tis" + algorithm.tis.cap: 2 by default, and 3 there'
    ),
    "vllm_importance_sampling_mode=token_mask": (
        'algorithm.correction.weight="token" + algorithm.correction.icepop_high: 3 there by '
        "default. The ratio is also the weight, so with `weight_cap=1e9`"
    ),
    "vllm_importance_sampling_mode=sequence_truncate": (
        'algorithm.correction.weight="sequence" + algorithm.correction.weight_cap: 2 by default, '
        "and 3 there"
    ),
    "vllm_importance_sampling_mode=sequence_mask": (
        'algorithm.correction.weight="sequence" + algorithm.correction.product_high: 3 there by '
        "default. The ratio is also the weight, so with `weight_cap=1e9`"
    ),
    "vllm_importance_sampling_clip_max": _TRL_CAP,
    "vllm_importance_sampling_cap": _TRL_CAP,
    "vllm_importance_sampling_clip_min": (
        f'algorithm.correction.product_low=$value: {_TRL_WEIGHTS_NOTE}. With "token_mask" it is '
        "`algorithm.correction.icepop_low=$value`; truncated weights have no lower bound"
    ),
    "off_policy_mask_threshold": _OFF_POLICY_NOTE,
    "opsm_delta": _OFF_POLICY_NOTE,
    "use_opsm": "algorithm.correction.geometric_low: for answers of either sign",
    "rollout_is": (
        'algorithm.correction.weight="$value": with `algorithm.policy_loss="ppo"`, `anchor` and '
        '`correction.numerator` "recomputed"'
    ),
    "rollout_is=null": 'algorithm.correction.weight="none"',
    "rollout_is=none": 'algorithm.correction.weight="none"',
    "rollout_is_threshold": (
        'algorithm.correction.weight_cap=$high: a band such as "0.5_2.0" also leaves tokens out, '
        "here `icepop_low` and `icepop_high` of `algorithm.correction`, beside the weight"
    ),
    "rollout_is_batch_normalize": "- weights are truncated, not normalised",
    "rollout_rs": (
        "algorithm.correction.geometric_low + algorithm.correction.geometric_high: of "
        '"seq_mean_k1"; of "seq_sum_k1" product_low and product_high. Bounds are reciprocals'
    ),
    "rollout_rs=seq_mean_k1": (
        "algorithm.correction.geometric_low + algorithm.correction.geometric_high: the reciprocals "
        'of the bounds there, exchanged: "0.8_1.6" is 0.625 and 1.25. With '
        f"{_OLD_RATIO_NOTE}"
    ),
    "rollout_rs=seq_sum_k1": (
        "algorithm.correction.product_low + algorithm.correction.product_high: the reciprocals of "
        'the bounds there, exchanged: "0.2_2.0" is 0.5 and 5. With '
        f"{_OLD_RATIO_NOTE}"
    ),
    "rollout_rs=token_k1": (
        "algorithm.correction.icepop_low + algorithm.correction.icepop_high: the reciprocals of the "
        'bounds there, exchanged: "0.2_2.0" is 0.5 and 5. With '
        f"{_OLD_RATIO_NOTE}"
    ),
    "rollout_rs=seq_max_k3": (
        f"algorithm.correction.max_token_kl: the same bound, with {_OLD_RATIO_NOTE}"
    ),
    "rollout_rs_threshold": (
        "algorithm.correction.geometric_low=$reciprocal_low + "
        "algorithm.correction.geometric_high=$reciprocal_high: the reciprocals, exchanged, since "
        'verl bounds rollout / old. So with "seq_mean_k1"; "seq_sum_k1" has product_low and '
        'product_high, "token_k1" icepop_low and icepop_high; "seq_max_k3" has the same bound as '
        "`max_token_kl`"
    ),
    "bypass_mode": 'algorithm.anchor: "rollout" if it is true, which is the default here',
    "bypass_mode=true": 'algorithm.anchor="rollout": the default',
    "bypass_mode=false": 'algorithm.anchor="recomputed"',
    "use_rollout_logprobs": 'algorithm.anchor="rollout": the default',
    "recompute_logprob": 'algorithm.anchor="recomputed"',
    "use_decoupled_loss": (
        'algorithm.policy_loss="tis" + algorithm.tis.cap=5: AReaL\'s default leaves '
        f"tokens out above 5, which is `algorithm.correction.icepop_high=5`, {_OLD_RATIO_NOTE}"
    ),
    "behav_imp_weight_cap": "algorithm.tis.cap=$value",
    "behave_imp_weight_cap": "algorithm.tis.cap=$value",
    "rejection_sampling.upper": (
        f'algorithm.correction.icepop_high=$value: with {_OLD_RATIO_NOTE}, for `action="mask"`; of '
        '"clamp" it is `algorithm.tis.cap=$value`'
    ),
    "rejection_sampling.lower": "algorithm.correction.icepop_low=$value",
    "rejection_sampling": "algorithm.correction.icepop_high: 5 is the default there",
    "sequence_mask_metric": (
        "algorithm.correction.geometric_low + algorithm.correction.geometric_high: of "
        '"geometric"; of "product" product_low and product_high'
    ),
    "clip_cov_ratio": "algorithm.clip_cov.share=$value",
    "clip_cov_lb": "algorithm.clip_cov.low=$value",
    "clip_cov_ub": "algorithm.clip_cov.high=$value",
    "kl_cov_ratio": "algorithm.kl_cov.share=$value",
    "kl_cov_frac": "algorithm.kl_cov.share=$value",
    "ppo_kl_coef": 'algorithm.kl_cov.coef=$value: of `policy_loss="kl_cov"`',
    "m2_threshold": 'algorithm.m2po.limit=$value: of `policy_loss="m2po"`',
    "rollout_token_veto_threshold": f"algorithm.correction.veto_low=$value: with {_OLD_RATIO_NOTE}",
    "outlier_token_is_threshold_low": (
        f"algorithm.correction.veto_low=$value: with {_OLD_RATIO_NOTE}"
    ),
    "outlier_token_is_threshold_high": (
        f"algorithm.correction.veto_high=$value: with {_OLD_RATIO_NOTE}"
    ),
    "sequence_mask_low": "algorithm.correction.veto_low=$value",
    "sequence_mask_high": "algorithm.correction.veto_high=$value",
    "geo_mask_low": f"algorithm.correction.geometric_low=$value: with {_OLD_RATIO_NOTE}",
    "geo_mask_high": f"algorithm.correction.geometric_high=$value: with {_OLD_RATIO_NOTE}",
    "product_mask_low": f"algorithm.correction.product_low=$value: with {_OLD_RATIO_NOTE}",
    "product_mask_high": f"algorithm.correction.product_high=$value: with {_OLD_RATIO_NOTE}",
    "token_mask_is_threshold_low": f"algorithm.correction.icepop_low=$value: with {_OLD_RATIO_NOTE}",
    "token_mask_is_threshold_high": f"algorithm.correction.icepop_high=$value: with {_OLD_RATIO_NOTE}",
    "is_correction_level": (
        'algorithm.correction.icepop_low + algorithm.correction.icepop_high: by token; "seq" has '
        'product_low and product_high, "geo" geometric_low and geometric_high'
    ),
    "is_correction_threshold": (
        'algorithm.correction.icepop_low + algorithm.correction.icepop_high: by token; "seq" has '
        'product_low and product_high, "geo" geometric_low and geometric_high'
    ),
    "is_correction_mode": (
        'algorithm.correction.icepop_high: of "mask"; "trunc" is `algorithm.policy_loss="tis"`'
    ),
    "router_aux_loss_coef": "algorithm.router_aux.coef",
    "moe_aux_loss_coeff": "algorithm.router_aux.coef",
    "router_replay": 'routing.replay: "rollout" (R3), "learner" (R2) or "off"',
    "router_replay.mode": 'routing.replay: "rollout" is R3, "learner" is R2',
    "enable_router_replay": 'routing.replay: "rollout" (R3), "learner" (R2) or "off"',
    "moe_enable_routing_replay": 'routing.replay: "rollout" (R3), "learner" (R2) or "off"',
    "enable_rollout_routing_replay": 'routing.replay: "rollout" (R3), "learner" (R2) or "off"',
    "use_rollout_routing_replay": 'routing.replay: "rollout" (R3), "learner" (R2) or "off"',
    "gamma": "- rewards are not discounted: how they are credited is `algorithm.credit`",
    "discount": "- rewards are not discounted: how they are credited is `algorithm.credit`",
    "lam": _NO_CRITIC_NOTE,
    "lambd": _NO_CRITIC_NOTE,
    "gae_lambda": _NO_CRITIC_NOTE,
    "vf_coef": _NO_CRITIC_NOTE,
    "critic": _NO_CRITIC_NOTE,
    # sampling
    "temperature": "episode.temperature",
    "top_p": "episode.top_p",
    "top_k": "episode.top_k",
    "min_p": "episode.min_p",
    "repetition_penalty": (
        "- a penalty depends on what was sampled before: the learner computes no such distribution"
    ),
    "ignore_eos": "episode.ignore_eos",
    "max_completion_length": "episode.max_new_tokens",
    "max_response_length": "episode.max_new_tokens",
    "response_length": "episode.max_new_tokens",
    "max_generate_length": "episode.max_new_tokens",
    "max_new_tokens": "episode.max_new_tokens",
    "max_tokens": "episode.max_new_tokens",
    "max_completion_tokens": "episode.max_new_tokens",
    "sampling.max_tokens": "episode.max_new_tokens",
    "max_prompt_length": "episode.max_prompt_tokens",
    "prompt_length": "episode.max_prompt_tokens",
    "max_input_length": "episode.max_prompt_tokens",
    "seq_len": "episode.max_total_tokens",
    "max_seq_len": "episode.max_total_tokens",
    "max_seq_length": "episode.max_total_tokens",
    "max_length": "episode.max_total_tokens",
    "max_model_len": "episode.max_total_tokens",
    "vllm_max_model_length": "episode.max_total_tokens",
    "max_turns": "episode.max_turns",
    "max_assistant_turns": "episode.max_turns",
    "chat_template_kwargs": "episode.template_args",
    # engines
    "gpu_memory_utilization": "generator.engine_args.gpu_memory_utilization",
    "vllm_gpu_memory_utilization": "generator.engine_args.gpu_memory_utilization",
    "tensor_parallel_size": f"generator.engine_args.tensor_parallel_size: {_ENGINE_TP_NOTE}",
    "tensor_model_parallel_size": f"generator.engine_args.tensor_parallel_size: {_ENGINE_TP_NOTE}",
    "vllm_tensor_parallel_size": "generator.engine_args.tensor_parallel_size",
    "inference_engine_tensor_parallel_size": "generator.engine_args.tensor_parallel_size",
    "megatron.tensor_model_parallel_size": "learner.parallel.tp",
    "pipeline_model_parallel_size": "learner.parallel.pp",
    "expert_model_parallel_size": "learner.parallel.ep",
    "context_parallel_size": "learner.parallel.cp",
    "fsdp_size": 'learner.parallel.dp: with `learner.backend="torch"`',
    "num_inference_engines": f"generator.count: {_ENGINE_COUNT_NOTE}",
    "num_engines": f"generator.count: {_ENGINE_COUNT_NOTE}",
    "rollout_num_engines": f"generator.count: {_ENGINE_COUNT_NOTE}",
    "num_generators": f"generator.count: {_ENGINE_COUNT_NOTE}",
    "max_num_seqs": "generator.concurrency",
    "max_concurrent": "generator.concurrency",
    "max_concurrent_rollouts": "generator.concurrency",
    "max_inflight_rollouts": "generator.concurrency",
    "enforce_eager": "generator.engine_args.enforce_eager",
    "max_num_batched_tokens": "generator.engine_args.max_num_batched_tokens",
    "use_vllm": '- generators always sample with vLLM: `generator.engine="vllm"` is the default',
    "vllm_mode": (
        "- learner and engines are processes of their own: `generator.count` and "
        "`learner.parallel` divide the GPUs"
    ),
    "colocate_all": (
        "- learner and engines are processes of their own: `generator.count` and "
        "`learner.parallel` divide the GPUs"
    ),
    "rollout.n_gpus_per_node": (
        "generator.count: engines, so $value / `tensor_model_parallel_size`"
    ),
    "n_gpus_per_node": (
        "learner.parallel.dp + generator.count: who gets GPUs; Ray's cluster knows its nodes"
    ),
    "nnodes": "learner.parallel.dp + generator.count: who gets GPUs; Ray's cluster knows its nodes",
    "num_nodes": (
        "learner.parallel.dp + generator.count: who gets GPUs; Ray's cluster knows its nodes"
    ),
    "weight_sync_backend": "weights.backend",
    # model, data, environment
    "model_name_or_path": "model.path",
    "model_name": "model.path",
    "model.name": "model.path",
    "policy.model.path": "model.path",
    "actor.path": "model.path",
    "actor_rollout_ref.model.path": "model.path",
    "pretrained_model_name_or_path": "model.path",
    "hf_checkpoint": "model.path",
    "strategy": 'learner.backend: "megatron" or "torch" (FSDP2)',
    "env_class": "env.name",
    "env.id": "env.name",
    "taskset.id": "env.name",
    "environment": "env.name: with arguments in `env.args`",
    "max_env_workers": "env.workers",
    # rows
    "train_files": f"data.path: {_DATA_NOTE}",
    "train_file": f"data.path: {_DATA_NOTE}",
    "train_data": f"data.path: {_DATA_NOTE}",
    "train_data_path": f"data.path: {_DATA_NOTE}",
    "train_path": f"data.path: {_DATA_NOTE}",
    "train_dataset": f"data.path: {_DATA_NOTE}",
    "train_dataset.path": f"data.path: {_DATA_NOTE}",
    "dataset": f"data.path: {_DATA_NOTE}",
    "dataset_name": f"data.path: {_DATA_NOTE}",
    "dataset_path": f"data.path: {_DATA_NOTE}",
    "prompt_data": f"data.path: {_DATA_NOTE}",
    "dataset_config": "data.subset",
    "dataset_config_name": "data.subset",
    "dataset_train_split": "data.split",
    "dataset_split": "data.split",
    "train_split": "data.split",
    "val_files": f"data.eval: {_EVAL_NOTE}",
    "val_data": f"data.eval: {_EVAL_NOTE}",
    "val_data_path": f"data.eval: {_EVAL_NOTE}",
    "val_dataset": f"data.eval: {_EVAL_NOTE}",
    "valid_dataset": f"data.eval: {_EVAL_NOTE}",
    "validation_file": f"data.eval: {_EVAL_NOTE}",
    "eval_dataset": f"data.eval: {_EVAL_NOTE}",
    "eval_data": f"data.eval: {_EVAL_NOTE}",
    "eval_prompt_data": f"data.eval: {_EVAL_NOTE}",
    "dataset_test_split": f"data.eval: {_EVAL_NOTE}",
    "train_max_samples": "data.limit",
    "max_train_samples": "data.limit",
    "max_samples": "data.limit",
    "prompt_key": f"data.prompt: {_PROMPT_NOTE}",
    "input_key": f"data.prompt: {_PROMPT_NOTE}",
    "prompt_column": f"data.prompt: {_PROMPT_NOTE}",
    "label_key": "data.answer: a column",
    "answer_key": "data.answer: a column",
    "output_key": "data.answer: a column",
    "system_prompt": "data.system",
    "shuffle": "- rows are in an order of each epoch, which follows from `seed`",
    "rollout_shuffle": "- rows are in an order of each epoch, which follows from `seed`",
    "filter_overlong_prompts": (
        "episode.max_prompt_tokens: longer prompts are always left out, and counted"
    ),
    "apply_chat_template": "- prompts are always shown through the model's chat template",
    "return_raw_chat": "- prompts are always shown through the model's chat template",
    # rewards
    "custom_reward_function": f"reward: {_REWARD_NOTE}",
    "custom_reward_function.path": f"reward: {_REWARD_NOTE}",
    "custom_reward_function.name": f"reward: {_REWARD_NOTE}",
    "custom_rm_path": f"reward: {_REWARD_NOTE}",
    "reward_funcs": f"reward: {_REWARD_NOTE}, or a list of them",
    "reward_functions": f"reward: {_REWARD_NOTE}, or a list of them",
    "reward_fn": f"reward: {_REWARD_NOTE}",
    "reward_function": f"reward: {_REWARD_NOTE}",
    "rm_type": 'reward: "exact", "contains", "number", "math", or your function',
    "reward_weights": 'reward: a list of { fn = "file.py:function", weight = 1.0 }',
    "reward_model": _REWARD_MODEL_NOTE,
    "reward_model_path": _REWARD_MODEL_NOTE,
    "reward_model_name_or_path": _REWARD_MODEL_NOTE,
    "reward_pretrain": _REWARD_MODEL_NOTE,
    "remote_rm_url": _REWARD_MODEL_NOTE,
    "rm_url": _REWARD_MODEL_NOTE,
    "ref_model": "algorithm.reference_kl.coef: the reference is always the start model",
    "ref_load": "algorithm.reference_kl.coef: the reference is always the start model",
    # adapters
    "peft_config": f"learner.lora.rank: {_ADAPTER_NOTE}",
    "use_peft": f"learner.lora.rank: {_ADAPTER_NOTE}",
    "use_lora": f"learner.lora.rank: {_ADAPTER_NOTE}",
    "enable_lora": f"learner.lora.rank: {_ADAPTER_NOTE}",
    "lora_r": f"learner.lora.rank: {_ADAPTER_NOTE}",
    "lora_rank": f"learner.lora.rank: {_ADAPTER_NOTE}",
    "lora_config": f"learner.lora.rank: {_ADAPTER_NOTE}",
    "lora_cfg": f"learner.lora.rank: {_ADAPTER_NOTE}",
    "lora": f"learner.lora.rank: {_ADAPTER_NOTE}",
    "lora.r": f"learner.lora.rank: {_ADAPTER_NOTE}",
    "lora.rank": f"learner.lora.rank: {_ADAPTER_NOTE}",
    "lora.dim": f"learner.lora.rank: {_ADAPTER_NOTE}",
    "lora_cfg.dim": f"learner.lora.rank: {_ADAPTER_NOTE}",
    "lora_alpha": "learner.lora.alpha",
    "lora.alpha": "learner.lora.alpha",
    "lora_cfg.alpha": "learner.lora.alpha",
    "target_modules": (
        'learner.lora.targets: "all-linear", or parts of names as ["q_proj", "experts"]'
    ),
    "lora_target_modules": (
        'learner.lora.targets: "all-linear", or parts of names as ["q_proj", "experts"]'
    ),
    "lora.target_modules": (
        'learner.lora.targets: "all-linear", or parts of names as ["q_proj", "experts"]'
    ),
    "lora_dropout": _DROPOUT_NOTE,
    "lora.dropout": _DROPOUT_NOTE,
    # keeping, watching
    "output_dir": "- it is runs/NAME: choose the place with --runs, and the `name`",
    "default_local_dir": "checkpoint.directory",
    "ckpt_path": "checkpoint.directory",
    "experiment_name": "name",
    "run_name": "name",
    "project_name": "log.project",
    "wandb.project": "log.project",
    "report_to": 'log.to: a list, as ["wandb"]',
    "logger": 'log.to: a list, as ["wandb"]',
    "log_with": 'log.to: a list, as ["wandb"]',
    "save_steps": f"checkpoint.every_steps: {_COUNT_OF_UPDATES_NOTE}",
    "save_freq": "checkpoint.every_steps",
    "save_interval": "checkpoint.every_steps",
    "ckpt_interval": "checkpoint.every_steps",
    "ckpt.interval": "checkpoint.every_steps",
    "save_total_limit": "checkpoint.keep_last",
    "max_ckpts_to_keep": "checkpoint.keep_last",
    "resume_from_checkpoint": "resume",
    "resume_mode": "resume",
    "resume_step": "resume",
    "eval_steps": f"evaluation.every_steps: {_COUNT_OF_UPDATES_NOTE}",
    "num_generations_eval": "evaluation.samples_per_task",
    "test_freq": "evaluation.every_steps",
    "eval_interval": "evaluation.every_steps",
    "eval.interval": "evaluation.every_steps",
    "eval_before_train": "evaluation.at_start",
    "val_before_train": "evaluation.at_start",
    "eval_base_model": "evaluation.at_start",
    "logging_steps": "- every step is logged, in runs/NAME/metrics.jsonl",
}
"""Equivalents of the settings of TRL (`GRPOConfig`, `AsyncGRPOConfig`), verl, SkyRL, prime-rl,
AReaL, slime, miles, Molt, NeMo RL, ART and ROLL."""

TARGET_SETTINGS = frozenset(
    setting.partition("=")[0]
    for words in EQUIVALENT_SETTINGS.values()
    if not words.startswith("- ")
    for setting in words.partition(":")[0].split(" + ")
)
"""Settings of r3async that the table names."""


def find_equivalent_setting(name: str, value: object = None, *, sections: bool = True) -> str:
    """Return the text on what to set instead of another trainer's dotted `name` = `value`; "" if no
    trainer is known to have it.

    Args:
        sections: A section in the name counts too, as it does unless the name begins with a
            section of ours.
    """
    parts = name.split(".")
    for stop in range(len(parts), 0 if sections else len(parts) - 1, -1):
        for start in range(stop):
            end = ".".join(parts[start:stop])
            words = EQUIVALENT_SETTINGS.get(f"{end}={_spell_value(value)}")
            if words is None or stop < len(parts):
                words = EQUIVALENT_SETTINGS.get(end)
            if words is not None:
                return _format_equivalent(Template(words).substitute(_spell_numbers(name, value)))
    return ""


def find_equivalent_value(name: str, value: object) -> str:
    """Return the text on what to set instead of another trainer's `value` of a setting of ours; ""
    if no trainer is known to have it."""
    words = EQUIVALENT_SETTINGS.get(f"{name.rpartition('.')[2]}={_spell_value(value)}")
    return "" if words is None else _format_equivalent(words)


def _spell_value(value: object) -> str:
    """Return a value as tables have it: YAML's True, and TOML's true, are "true"."""
    return str(value).lower()


def _spell_numbers(name: str, value: object) -> dict[str, str]:
    """Return what the words of an answer about `name` = `value` stand for: numbers that follow from
    `value`, or, if it is no number, how to compute them. "LOW_HIGH" is verl's notation of a band,
    whose lower bound is 1 / HIGH if it is one number."""
    own = f"`{name.rpartition('.')[2]}`"
    is_plain = isinstance(value, str | int | float)
    words = {
        "value": _spell_value(value) if is_plain else own,
        "high": own,
        "less_one": f"{own} - 1",
        "exp_minus": f"exp(-{own})",
        "reciprocal_low": "1 / HIGH",
        "reciprocal_high": "1 / LOW",
    }
    try:
        *lower, high = [float(part) for part in _spell_value(value).split("_")]
        numbers = {
            "high": high,
            "exp_minus": math.exp(-high),
            "reciprocal_low": 1 / high,
            "reciprocal_high": 1 / lower[0] if lower else high,
        }
    except (ValueError, ArithmeticError):
        return words
    if high > 1:  # below, it is no cap
        numbers["less_one"] = high - 1
    return words | {word: f"{number:.6g}" for word, number in numbers.items()}


def _format_equivalent(words: str) -> str:
    if words.startswith("- "):
        return f"there is none here; {words[2:]}"
    settings, colon, more = words.partition(":")
    named = " and ".join(f"`{setting}`" for setting in settings.split(" + "))
    return f"here it is {named}" + (f" ({more.strip()})" if colon else "")
