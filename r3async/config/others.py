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
    "of GSPO it is `algorithm.gspo.clip_high`; of CISPO TRL's and Molt's number is the cap itself, "
    "`algorithm.cispo.clip_high=$less_one` here, and ART's is 1 less than the cap, as here"
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
_REFERENCE_TARGET_NOTE = (
    "- `algorithm.reference_kl.coef` is constant; only the drift from the engine has a target, "
    "`algorithm.rollout_kl.target`"
)
_WEIGHT_TOO_NOTE = (
    'there the ratio is also the weight: `algorithm.correction.weight="token"`, `weight_cap=1e9`'
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
    "gpg": "- it is -A log pi without a ratio, the example of your own loss in docs/api.md",
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
    "cispo": 'algorithm.policy_loss="cispo" + algorithm.advantage="grpo"',
    "group_norm": 'algorithm.advantage="grpo"',
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


EVALUATION_VALUES = {
    "temperature": "evaluation.temperature",
    "do_sample": "evaluation.temperature: 0 is greedy",
    **dict.fromkeys(("n", "n_samples"), "evaluation.samples_per_task"),
    **dict.fromkeys(
        ("top_p", "top_k", "min_p", "max_tokens", "max_new_tokens", "max_generate_length"),
        "- evaluations sample as `episode` says, but for `evaluation.temperature`",
    ),
}
"""Settings of others for the sampling of evaluations, in sections of their own."""


def _for_names(names: str, words: str) -> dict[str, str]:
    return dict.fromkeys(names.split(), words)


def _with_values(names: tuple[str, ...], values: dict[str, str]) -> dict[str, str]:
    return {f"{name}={value}": words for name in names for value, words in values.items()}


SAME_SETTINGS = """
learner.lr: lr learning_rate optim.lr actor_learning_rate
learner.lr_schedule: lr_scheduler_type lr_scheduler scheduler.type optimizer_config.scheduler
learner.lr_schedule: lr_decay_style
learner.min_lr_ratio: min_lr_ratio
learner.warmup_steps: warmup_steps num_warmup_steps lr_warmup_steps lr_warmup_iters
learner.weight_decay: weight_decay l2
learner.betas: betas adam_betas
learner.eps: adam_epsilon adam_eps
learner.max_grad_norm: max_grad_norm clip_grad grad_clip max_norm gradient_clipping
learner.offload_moments: optimizer_offload optimizer_cpu_offload optim_cpu_offload adam_offload
learner.offload_moments: offload_after_step optimizer.offload
learner.shard_optimizer: use_distributed_optimizer
learner.freeze_router: freeze_moe_router
learner.expert_bias_rate: moe_router_bias_update_rate
learner.deterministic: deterministic_mode full_determinism
schedule.tokens_per_step: token_batch_size
learner.max_tokens_per_micro_batch: ppo_max_token_len_per_gpu max_tokens_per_gpu
learner.max_tokens_per_micro_batch: max_tokens_per_microbatch token_budget max_tokens_per_mb
learner.max_tokens_per_micro_batch: train_mb_tokens train_max_tokens_per_gpu packed_sequence_length
schedule.minibatches_per_step: num_minibatches ppo_n_minibatches num_steps_per_rollout
steps: num_train_steps total_steps total_training_steps max_training_steps total_train_steps
steps: max_num_steps num_rollout
schedule.group_size: num_generations rollouts_per_example n_samples_per_prompt group_size rollout.n
schedule.group_size: n_samples num_generations_per_prompt
schedule.max_staleness: max_staleness max_staleness_steps max_async_level async_level
schedule.max_staleness: max_head_offpolicyness max_off_policy_steps max_off_policy_threshold
schedule.max_staleness: max_steps_off_policy max_weight_staleness max_trajectory_age_steps
algorithm.reference_kl.coef: kl_loss_coef init_kl_coef kl_ctrl.kl_coef kl.init_coef
algorithm.reference_kl.weighted: use_on_policy_kl_approximation
algorithm.entropy_coef: entropy_coeff ent_coef entropy_coef entropy_loss_coef
algorithm.policy_loss: policy_loss_type loss_mode custom_loss_function_path
algorithm.reduction: loss_reduction
algorithm.advantage: adv_estimator advantage_estimator custom_advantage_function_path
algorithm.overlong_filter: mask_truncated_completions overlong_filtering apply_overlong_filtering
algorithm.overlong_filter: mask_no_eos_with_zero
algorithm.overlong_penalty.buffer: overlong_buffer.len overlong_buffer_len overlong_tokens
algorithm.filter_zero_variance: zero_variance_filter
algorithm.sapo.tau_positive: sapo_temperature_pos tau_pos sapo_tau_pos
algorithm.sapo.tau_negative: sapo_temperature_neg tau_neg sapo_tau_neg
schedule.epochs_per_step: num_iterations ppo_epochs update_epochs_per_batch
algorithm.router_aux.coef: router_aux_loss_coef moe_aux_loss_coeff aux_loss_coef
episode.temperature: temperature rollout_temperature
episode.top_p: top_p rollout_top_p
episode.min_p: min_p
evaluation.temperature: eval_temperature
episode.ignore_eos: ignore_eos
episode.max_new_tokens: max_completion_length max_response_length response_length
episode.max_new_tokens: max_generate_length max_new_tokens max_tokens max_completion_tokens
episode.max_new_tokens: sampling.max_tokens generate_max_len rollout_max_response_len
episode.max_prompt_tokens: max_prompt_length prompt_length max_input_length prompt_max_len
episode.max_prompt_tokens: rollout_max_prompt_len
episode.max_total_tokens: seq_len max_seq_len max_seq_length max_length max_model_len
episode.max_total_tokens: vllm_max_model_length rollout_max_context_len max_total_sequence_length
episode.max_total_tokens: gconfig.max_tokens
episode.max_turns: max_turns max_assistant_turns max_rollout_turns
episode.template_args: chat_template_kwargs apply_chat_template_kwargs
generator.engine_args.gpu_memory_utilization: gpu_memory_utilization vllm_gpu_memory_utilization
generator.engine_args.tensor_parallel_size: vllm_tensor_parallel_size
generator.engine_args.tensor_parallel_size: inference_engine_tensor_parallel_size
learner.parallel.tp: megatron.tensor_model_parallel_size
learner.parallel.pp: pipeline_model_parallel_size
learner.parallel.ep: expert_model_parallel_size model.ep
learner.parallel.cp: context_parallel_size ulysses_sequence_parallel_size sequence_parallel_size
learner.parallel.cp: ring_attn_size model.cp
generator.engine_args.enforce_eager: enforce_eager
generator.engine_args.enable_prefix_caching: enable_prefix_caching
generator.engine_args.max_num_batched_tokens: max_num_batched_tokens
weights.backend: weight_sync_backend vllm_sync_backend weight_update_mode update_weight_transport
weights.backend: weight_broadcast.type
model.path: model_name_or_path model_name model.name policy.model.path actor.path
model.path: actor_rollout_ref.model.path pretrained_model_name_or_path hf_checkpoint pretrain
algorithm.distillation.teacher: teacher teacher_model teacher_models opd_teacher_load
algorithm.distillation.coef: opd_kl_coef distillation_loss_coef
env.name: env_class env.id taskset.id
env.workers: max_env_workers
data.subset: dataset_config dataset_config_name
data.split: dataset_train_split dataset_split train_split prompt_split
data.limit: train_max_samples max_train_samples max_samples
data.system: system_prompt
learner.lora.alpha: lora_alpha lora.alpha lora_cfg.alpha
checkpoint.directory: default_local_dir ckpt_path checkpoint_dir save
name: experiment_name run_name
log.project: project_name wandb.project
checkpoint.every_steps: save_freq save_interval save_period ckpt_interval ckpt.interval
checkpoint.every_steps: saver.freq_steps
checkpoint.keep_last: save_total_limit max_ckpts_to_keep max_actor_ckpt_to_keep max_ckpt_num
checkpoint.keep_every: keep_interval
resume: resume_from_checkpoint resume_mode resume_step resume_from_path load_checkpoint load
evaluation.samples_per_task: num_generations_eval eval_n_samples_per_prompt
evaluation.samples_per_task: n_samples_per_eval_prompt eval.rollouts_per_example
evaluation.tasks: val_max_samples max_val_samples eval.num_examples
evaluation.every_steps: test_freq eval_interval eval.interval val_period evaluator.freq_steps
evaluation.at_start: eval_before_train val_before_train eval_base_model val_at_start
"""
"""Lines of a setting of ours, and names of it elsewhere, without a difference to tell."""

EQUIVALENT_SETTINGS = {
    **{
        name: line.partition(":")[0]
        for line in SAME_SETTINGS.split("\n")
        for name in line.partition(":")[2].split()
    },
    # the optimizer
    "decay_steps": "learner.lr_schedule: it decays from the warm-up to the last update",
    "warmup_style": "learner.lr_schedule: the warm-up is `learner.warmup_steps` before any of them",
    "min_lr": "learner.min_lr_ratio: a share of `learner.lr`",
    **_for_names(
        "warmup_ratio lr_warmup_steps_ratio lr_warmup_ratio warmup_steps_proportion",
        "learner.warmup_steps: a number of steps",
    ),
    **_for_names(
        "adam_beta1 adam_beta2 betas1 betas2 beta1 beta2", "learner.betas: both, as [0.9, 0.95]"
    ),
    **_for_names("bf16 fp16", 'learner.dtype: "bfloat16" or "float32"'),
    **_for_names(
        "gradient_checkpointing enable_gradient_checkpointing activation_checkpointing "
        "recompute_granularity recompute_modules",
        'learner.recompute: "none", "selective" (MoE layers) or "full"',
    ),
    **_for_names(
        "param_offload cpu_offload fsdp_cpu_offload",
        "- weights stay on the GPU; `learner.offload_moments` keeps Adam's moments in host memory",
    ),
    "zero_stage": (
        "learner.shard_optimizer: stage 1; stage 2 is `learner.shard_gradients` too, stage 3 "
        '`learner.backend="torch"` (FSDP2)'
    ),
    # how much a step trains
    "batch_size": f"schedule.prompts_per_step: {_BATCH_SIZE_NOTE}",
    "train_batch_size": (
        f"schedule.prompts_per_step: {_BATCH_SIZE_NOTE}. OpenRLHF counts the episodes of an update"
    ),
    **_for_names(
        "rollout_batch_size num_prompts_per_step consumer_batch_size",
        f"schedule.prompts_per_step: {_BATCH_SIZE_NOTE}",
    ),
    "orchestrator.batch_size": (
        "schedule.prompts_per_step: $value / `group_size`, since prime-rl counts episodes"
    ),
    "generation_batch_size": (
        "schedule.prompts_per_step: $value / `num_generations`, since TRL counts completions"
    ),
    **_for_names(
        "per_device_train_batch_size micro_batch_size ppo_micro_batch_size "
        "ppo_micro_batch_size_per_gpu micro_train_batch_size_per_gpu "
        "micro_forward_batch_size_per_gpu log_prob_micro_batch_size_per_gpu "
        "micro_train_batch_size micro_rollout_batch_size train_micro_batch_size",
        f"learner.max_tokens_per_micro_batch: {_TOKEN_BUDGET_NOTE}",
    ),
    **_for_names(
        "log_prob_max_token_len_per_gpu ppo_infer_max_token_len_per_gpu "
        "log_probs_max_tokens_per_gpu",
        "learner.max_tokens_per_micro_batch: of all passes",
    ),
    **_for_names(
        "use_dynamic_bsz log_prob_use_dynamic_bsz use_sample_packing packing packing_samples "
        "use_dynamic_batch use_dynamic_batch_size use_remove_padding balance_batch balance_data",
        _PACKING_NOTE,
    ),
    **_for_names(
        "gradient_accumulation_steps grad_accum_steps accumulate_grad_batches",
        f"learner.max_tokens_per_micro_batch: {_ACCUMULATION_NOTE}",
    ),
    **_for_names(
        "ppo_mini_batch_size policy_mini_batch_size",
        f"schedule.minibatches_per_step: {_PROMPTS_OF_UPDATE_NOTE}",
    ),
    **_for_names(
        "global_batch_size train_global_batch_size",
        "schedule.minibatches_per_step: a step's episodes / $value, since there it is an update's",
    ),
    "steps_per_generation": (
        "schedule.minibatches_per_step: $value / `gradient_accumulation_steps`. TRL counts "
        "micro-steps: equal, as by default, they make 1 update of a generation"
    ),
    "max_steps": f"steps: {_COUNT_OF_UPDATES_NOTE}",
    **_for_names(
        "total_epochs num_train_epochs total_train_epochs max_num_epochs num_epoch num_episodes "
        "epochs",
        "steps: $value passes over N prompts are N * $value / `schedule.prompts_per_step`",
    ),
    # how far generation may be ahead
    **_for_names(
        "staleness_threshold async_generation_ratio",
        "schedule.max_staleness: versions, not a share",
    ),
    **_for_names(
        "async_train fully_async async_grpo.enabled", "schedule.max_staleness: 0 is synchronous"
    ),
    "partial_rollout": 'generator.on_update: with "keep", as by default, answers continue under the new weights',
    "mask_offpolicy_in_partial_rollout": (
        "schedule.max_token_age: older tokens are left out of the policy loss"
    ),
    **_for_names(
        "parameter_sync_step weight_sync_steps",
        "schedule.steps_per_publication: steps, not updates",
    ),
    # the algorithm
    "beta": f"algorithm.reference_kl.coef=$value: {_WEIGHTED_NOTE}",
    **_for_names(
        "use_bias_correction_kl use_unbiased_kl",
        f"algorithm.reference_kl.weighted=$value: {_WEIGHTED_NOTE}",
    ),
    "kl_coef": (
        "algorithm.reference_kl.coef: the drift from the engine has its own, "
        "`algorithm.rollout_kl.coef`"
    ),
    "reference_policy_kl_penalty": (
        "algorithm.reference_kl.coef=$value: with `algorithm.reference_kl.weighted=false`, unless "
        "`use_on_policy_kl_approximation` is on"
    ),
    "use_kl_loss": "algorithm.reference_kl.coef: 0 is none",
    **_for_names(
        "use_kl_in_reward kl_penalty",
        "- KL is a term of the loss, never of the reward: `algorithm.reference_kl.coef`",
    ),
    **_for_names(
        "kl_loss_type kl_estimator_type kl.estimator kl_estimator",
        "algorithm.reference_kl.weighted=false: k3 without a weight, as there",
    ),
    **_with_values(
        ("kl_loss_type", "kl_estimator_type", "kl_estimator", "kl.estimator"), KL_VALUES
    ),
    **_for_names(
        "kl_ctl kl_penalty_coef", "algorithm.reference_kl.coef: in the loss, not in the reward"
    ),
    **_for_names(
        "sync_ref_model ref_model_mixup_alpha ref_model_sync_steps ref_update_interval "
        "update_ref_every_epoch",
        "- the reference is always the start model",
    ),
    "coef_min": (
        "algorithm.rollout_kl.coef: the adapted coefficient never falls below where it starts"
    ),
    **_for_names(
        "target_kl kl_target kl_ctrl.type kl_ctrl.horizon kl_horizon", _REFERENCE_TARGET_NOTE
    ),
    **_for_names(
        "clip_range clip_ratio cliprange epsilon eps_clip",
        "algorithm.ppo.clip_low=$value + algorithm.ppo.clip_high=$value: with "
        '`algorithm.policy_loss="ppo"`. GSPO, CISPO and DPPO have their own sections',
    ),
    **_for_names(
        "epsilon_low clip_ratio_low eps_clip_low ratio_clip_min",
        f"algorithm.ppo.clip_low=$value: {_CLIP_LOW_NOTE}",
    ),
    **_for_names(
        "clip_ratio_high eps_clip_high eps_clip_higher ratio_clip_max",
        f"algorithm.ppo.clip_high=$value: {_CLIP_HIGH_NOTE}",
    ),
    **_for_names("epsilon_high clip_eps_high", f"algorithm.ppo.clip_high=$value: {_CAP_NOTE}"),
    "eps_clip_low_high": (
        "algorithm.ppo.clip_low + algorithm.ppo.clip_high: of CISPO the second number is the cap "
        "itself there, and `algorithm.cispo.clip_high` is 1 less"
    ),
    "clip_ratio_c": "algorithm.ppo.dual_clip=$value: off by default, where verl and SkyRL have 3",
    "eps_clip_c": "algorithm.ppo.dual_clip=$value: miles reads it, and uses it for nothing",
    **_for_names("c_clip dual_clip delta ratio_clip_c", "algorithm.ppo.dual_clip=$value"),
    "delta_low": 'algorithm.dppo.threshold_low=$value: with `dppo_type="binary_tv"`',
    "delta_high": 'algorithm.dppo.threshold_high=$value: with `dppo_type="binary_tv"`',
    **_for_names("dppo_mask_low ipo_mask_low", "algorithm.dppo.threshold_low=$value"),
    **_for_names("dppo_mask_high ipo_mask_high", "algorithm.dppo.threshold_high=$value"),
    "kl_tau": "algorithm.rollout_kl.coef: twice the number, since k2 is half the squared log-ratio",
    "dppo_type=binary_tv": 'algorithm.policy_loss="dppo"',
    "dppo_type": LOSS_VALUES["binary_kl"],
    "cispo_eps_clip_low": "algorithm.cispo.clip_low=$value",
    "cispo_eps_clip_high": "algorithm.cispo.clip_high=$value",
    "cispo_anchor": 'algorithm.anchor: "recomputed" for "old", which is SkyRL\'s default',
    "cispo_anchor=old": 'algorithm.anchor="recomputed"',
    "cispo_anchor=rollout": 'algorithm.anchor="rollout"',
    "use_entropy_loss": "algorithm.entropy_coef: 0 is none; SkyRL's is 0.01 when it is on",
    **_for_names("use_adaptive_entropy entropy_target entropy_coef_delta", _ADAPTIVE_NOTE),
    "top_entropy_quantile": "- tokens are not chosen by their entropy; all are trained",
    "loss_type": "algorithm.policy_loss: what it is a mean over is `algorithm.reduction`",
    **_with_values(("loss_type", "loss_mode", "policy_loss_type", "policy_loss"), LOSS_VALUES),
    "loss_agg_mode": 'algorithm.reduction: "token_mean", "sequence_mean" and others',
    **_with_values(("loss_agg_mode", "loss_reduction", "reduction"), REDUCTION_VALUES),
    **_for_names(
        "loss_scale_factor algorithm.max_seq_len",
        f'algorithm.reduction="sequence_mean_token_sum_norm": {_LOSS_SCALE_NOTE}',
    ),
    **_for_names(
        "calculate_per_token_loss token_level_loss",
        'algorithm.reduction="token_mean": "sequence_mean" if it is false',
    ),
    "importance_sampling_level": 'algorithm.policy_loss: "gspo" is by sequence',
    **_for_names(
        "importance_sampling_level=sequence sequence_level_importance_ratios", LOSS_VALUES["gspo"]
    ),
    "importance_sampling_level=token": '- every `algorithm.policy_loss` but "gspo" is by token',
    **_with_values(
        ("adv_estimator", "advantage_estimator", "advantage.estimator", "advantage"),
        ADVANTAGE_VALUES,
    ),
    **_for_names(
        "scale_rewards norm_adv_by_std_in_grpo grpo_norm_by_std normalize_rewards",
        _SCALED_BY_DEVIATION,
    ),
    "use_leave_one_out_baseline": (
        'algorithm.advantage: "rloo" leaves the answer out of its mean; with `normalize_rewards` '
        'the nearest is "grpo", which includes it'
    ),
    **_for_names("scale_rewards=none scale_rewards=false", 'algorithm.advantage="dr_grpo"'),
    "scale_rewards=batch": (
        'algorithm.advantage="reinforce_pp_baseline": the group\'s mean, then mean and deviation '
        "of the batch's tokens; TRL's deviation is of the batch's scores"
    ),
    "multi_objective_aggregation": "- rewards are added by their weights, and then compared",
    "reward_norm": "algorithm.advantage: AReaL's default, none, has no baseline at all",
    "adv_norm": 'algorithm.advantage: "reinforce_pp" and "reinforce_pp_baseline" scale by the batch',
    **_for_names(
        "advantage_batch_normalize normalize_advantages",
        'algorithm.advantage="reinforce_pp_baseline": after the group\'s mean',
    ),
    **_for_names(
        "reward_scaling reward_bias reward_clip reward.clip_range reward_clip_range",
        _NOT_SCALED_NOTE,
    ),
    "disable_grpo_std_normalization": 'algorithm.advantage="dr_grpo"',
    "zero_reward_on_non_stop": (
        "algorithm.overlong_filter: leaves cut answers out; a reward of 0 is your `reward`'s to give"
    ),
    **_for_names(
        "overlong_buffer.enable overlong_reward_penalty",
        "algorithm.overlong_penalty.buffer: 0 is none",
    ),
    **_for_names(
        "overlong_buffer.penalty_factor overlong_penalty_factor",
        "algorithm.overlong_penalty.factor: longer answers than the maximum stay at it",
    ),
    "zero_variance_filter_tol": (
        "- scores are equal within 5e-7 of the largest, which is rounding: "
        "`algorithm.filter_zero_variance`"
    ),
    **_for_names(
        "dynamic_filtering_enable dynamic_filtering filter_groups.enable dynamic_sampling "
        "dynamic_sampling.type dynamic_sampling_filter_path over_sampling_batch_size "
        "gen_batch_size online_difficulty_filtering",
        "schedule.replaced_groups: how many, with algorithm.filter_zero_variance=true",
    ),
    **_for_names(
        "dynamic_filtering_reward_range filter_groups.metric",
        "- groups are left out if all their scores are equal: `algorithm.filter_zero_variance`",
    ),
    **_for_names(
        "max_num_gen_batches max_sample_batches", "schedule.replaced_groups: groups, not batches"
    ),
    "easy_threshold": "schedule.difficulty.easy: with `schedule.difficulty.settled_share` below 1",
    "hard_threshold": "schedule.difficulty.hard: with `schedule.difficulty.settled_share` below 1",
    "use_sapo_loss": 'algorithm.policy_loss="sapo"',
    "max_epochs": "schedule.epochs_per_step: of the same answers, as in OpenRLHF",
    "ratio_cap": (
        'algorithm.truncated_pg.cap: the loss that was "tis" is "truncated_pg", and '
        '"tis" is now Yao\'s'
    ),
    **_for_names(
        "tis_imp_ratio_cap token_tis_ratio_clip_high tis_clip truncated_importance_sampling "
        "vllm_is_truncated_threshold",
        'algorithm.tis.cap=$value: with `algorithm.policy_loss="tis"`',
    ),
    "tis_clip_low": "- weights have a cap, and no lower bound: `algorithm.tis.cap`",
    **_for_names(
        "use_tis enable_vllm_is_correction", 'algorithm.policy_loss="tis": cap 2, as there'
    ),
    "use_importance_sampling_correction": (
        'algorithm.correction.weight="token": without a truncation there, so with `weight_cap=1e9`'
    ),
    "truncated_importance_sampling_type=tis": 'algorithm.policy_loss="tis"',
    "truncated_importance_sampling_type=icepop": (
        f"algorithm.correction.icepop_low + algorithm.correction.icepop_high: {_WEIGHT_TOO_NOTE}"
    ),
    "truncated_importance_sampling_type=seq-mask-tis": (
        "algorithm.correction.geometric_low + algorithm.correction.geometric_high: "
        f"{_WEIGHT_TOO_NOTE}"
    ),
    "truncated_importance_sampling_ratio": (
        'algorithm.tis.cap=$value: of "tis"; of "icepop" `algorithm.correction.icepop_high`, of '
        '"seq-mask-tis" `geometric_high`'
    ),
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
    **_for_names("vllm_importance_sampling_clip_max vllm_importance_sampling_cap", _TRL_CAP),
    "vllm_importance_sampling_clip_min": (
        f'algorithm.correction.product_low=$value: {_TRL_WEIGHTS_NOTE}. With "token_mask" it is '
        "`algorithm.correction.icepop_low=$value`; truncated weights have no lower bound"
    ),
    **_for_names("off_policy_mask_threshold opsm_delta", _OFF_POLICY_NOTE),
    "use_opsm": "algorithm.correction.geometric_low: for answers of either sign",
    "rollout_is": (
        'algorithm.correction.weight="$value": with `algorithm.policy_loss="ppo"`, `anchor` and '
        '`correction.numerator` "recomputed"'
    ),
    **_for_names("rollout_is=null rollout_is=none", 'algorithm.correction.weight="none"'),
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
    **_for_names("behav_imp_weight_cap behave_imp_weight_cap", "algorithm.tis.cap=$value"),
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
    **_for_names("clip_cov_ratio clip_cov.clip_ratio", "algorithm.clip_cov.share=$value"),
    "clip_cov_lb": "algorithm.clip_cov.low=$value",
    "clip_cov_ub": "algorithm.clip_cov.high=$value",
    **_for_names("kl_cov_ratio kl_cov_frac", "algorithm.kl_cov.share=$value"),
    "ppo_kl_coef": 'algorithm.kl_cov.coef=$value: of `policy_loss="kl_cov"`',
    "m2_threshold": 'algorithm.m2po.limit=$value: of `policy_loss="m2po"`',
    **_for_names(
        "rollout_token_veto_threshold outlier_token_is_threshold_low",
        f"algorithm.correction.veto_low=$value: with {_OLD_RATIO_NOTE}",
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
    **_for_names(
        "is_correction_level is_correction_threshold",
        'algorithm.correction.icepop_low + algorithm.correction.icepop_high: by token; "seq" has '
        'product_low and product_high, "geo" geometric_low and geometric_high',
    ),
    "is_correction_mode": (
        'algorithm.correction.icepop_high: of "mask"; "trunc" is `algorithm.policy_loss="tis"`'
    ),
    **_for_names(
        "router_replay enable_router_replay moe_enable_routing_replay "
        "enable_rollout_routing_replay use_rollout_routing_replay",
        'routing.replay: "rollout" (R3), "learner" (R2) or "off"',
    ),
    "router_replay.mode": 'routing.replay: "rollout" is R3, "learner" is R2',
    "use_routing_replay": 'routing.replay="learner": R2, as in slime and miles',
    **_for_names(
        "gamma discount",
        "- rewards are not discounted: how they are credited is `algorithm.credit`",
    ),
    **_for_names(
        "lam lambd gae_lambda vf_coef critic critic_warmup value_clip cliprange_value "
        "critic_learning_rate",
        _NO_CRITIC_NOTE,
    ),
    # sampling
    **_for_names(
        "top_k rollout_top_k",
        "episode.top_k: 0 is all tokens; verl, SkyRL and slime have -1 for it",
    ),
    **_for_names(
        "repetition_penalty frequency_penalty",
        "- a penalty depends on what was sampled before: the learner computes no such distribution",
    ),
    **{
        f"{section}.{name}": words
        for section in ("val_kwargs", "eval_sampling_params", "eval.sampling", "eval_gconfig")
        for name, words in EVALUATION_VALUES.items()
    },
    **_for_names("stop rollout_stop stop_strings", "episode.stop: a list"),
    **_for_names(
        "max_user_turns max_tool_calling_iterations",
        "episode.max_turns: the model's turns, one more than these",
    ),
    # engines
    **_for_names(
        "tensor_parallel_size tensor_model_parallel_size rollout_num_gpus_per_engine",
        f"generator.engine_args.tensor_parallel_size: {_ENGINE_TP_NOTE}",
    ),
    "sequence_parallel": "- it is always on where `learner.parallel.tp` is above 1",
    "fsdp_size": 'learner.parallel.dp: with `learner.backend="torch"`',
    **_for_names(
        "num_inference_engines num_engines rollout_num_engines num_generators vllm_num_engines",
        f"generator.count: {_ENGINE_COUNT_NOTE}",
    ),
    **_for_names(
        "max_num_seqs max_concurrent max_concurrent_rollouts max_inflight_rollouts "
        "max_inflight_tasks async_max_concurrent_samples",
        "generator.concurrency: episodes of one generator",
    ),
    **_for_names(
        "use_vllm rollout.name rollout.mode generator.backend generation.backend",
        '- generators always sample with vLLM: `generator.engine="vllm"` is the default',
    ),
    **_for_names(
        "vllm_mode colocate_all colocate_all_models colocate colocated.enabled",
        'generator.colocate: "share" puts engines on the learner\'s GPUs if there are too few for both',
    ),
    **_for_names(
        "free_cache_engine vllm_enable_sleep_mode vllm_enable_sleep",
        "- engines always keep their memory: `generator.engine_args.gpu_memory_utilization`",
    ),
    "rollout.n_gpus_per_node": (
        "generator.count: engines, so $value / `tensor_model_parallel_size`"
    ),
    "rollout_num_gpus": "generator.count: engines, so $value / `rollout_num_gpus_per_engine`",
    **_for_names(
        "n_gpus_per_node nnodes num_nodes num_gpus_per_node gpus_per_node "
        "actor_num_gpus_per_node actor_num_nodes policy_num_gpus_per_node policy_num_nodes",
        "learner.parallel.dp + generator.count: who gets GPUs; Ray's cluster knows its nodes",
    ),
    # model, data, environment
    "trust_remote_code": (
        "- the learner runs no code of a model's repository: docs/models.md has what it trains"
    ),
    "strategy": 'learner.backend: "megatron" or "torch" (FSDP2)',
    "environment": "env.name: with arguments in `env.args`",
    # rows
    **_for_names(
        "train_files train_file train_data train_data_path train_path train_dataset "
        "train_dataset.path dataset dataset_name dataset_path prompt_data",
        f"data.path: {_DATA_NOTE}",
    ),
    **_for_names(
        "val_files val_data val_data_path val_dataset valid_dataset validation_file "
        "eval_dataset eval_data eval_prompt_data dataset_test_split",
        f"data.eval: {_EVAL_NOTE}",
    ),
    **_for_names("prompt_key input_key prompt_column", f"data.prompt: {_PROMPT_NOTE}"),
    **_for_names("label_key answer_key output_key", "data.answer: a column"),
    **_for_names(
        "shuffle shuffle_dataset rollout_shuffle",
        "- rows are in an order of each epoch, which follows from `seed`",
    ),
    **_for_names(
        "filter_overlong_prompts truncation",
        "episode.max_prompt_tokens: longer prompts are always left out, and counted",
    ),
    **_for_names(
        "apply_chat_template return_raw_chat",
        "- prompts are always shown through the model's chat template",
    ),
    # rewards
    **_for_names(
        "custom_reward_function custom_reward_function.path custom_reward_function.name "
        "custom_rm_path reward_fn reward_function reward_manager",
        f"reward: {_REWARD_NOTE}",
    ),
    **_for_names("reward_funcs reward_functions", f"reward: {_REWARD_NOTE}, or a list of them"),
    "rm_type": 'reward: "exact", "contains", "number", "math", or your function',
    "reward_weights": 'reward: a list of { fn = "file.py:function", weight = 1.0 }',
    **_for_names(
        "reward_model reward_model_path reward_model_name_or_path reward_pretrain remote_rm_url "
        "rm_url",
        _REWARD_MODEL_NOTE,
    ),
    **_for_names(
        "ref_model ref_load", "algorithm.reference_kl.coef: the reference is always the start model"
    ),
    # adapters
    **_for_names(
        "peft_config use_peft use_lora enable_lora lora_r lora_rank lora_config lora_cfg lora "
        "lora.r lora.rank lora.dim lora_cfg.dim",
        f"learner.lora.rank: {_ADAPTER_NOTE}",
    ),
    "use_rslora": (
        "learner.lora.alpha: outputs are multiplied by alpha / rank, so larger by the root of the rank"
    ),
    **_for_names(
        "target_modules lora_target_modules lora.target_modules",
        'learner.lora.targets: "all-linear", or parts of names as ["q_proj", "experts"]',
    ),
    **_for_names("lora_dropout lora.dropout", _DROPOUT_NOTE),
    # keeping, watching
    "output_dir": "- it is runs/NAME: choose the place with --runs, and the `name`",
    **_for_names("report_to logger log_with", 'log.to: a list, as ["wandb"]'),
    "save_steps": f"checkpoint.every_steps: {_COUNT_OF_UPDATES_NOTE}",
    "eval_steps": f"evaluation.every_steps: {_COUNT_OF_UPDATES_NOTE}",
    "val_only": "- `r3async eval` evaluates a model",
    "logging_steps": "- every step is logged, in runs/NAME/metrics.jsonl",
}
"""Equivalents of the settings of TRL (`GRPOConfig`, `AsyncGRPOConfig`), verl, SkyRL, prime-rl,
AReaL, slime, miles, Molt, NeMo RL, OpenRLHF, Megatron, ART and ROLL."""

OTHER_MODELS = frozenset({"critic", "teacher", "teacher_model", "teacher_models"})
"""Sections of a model beside the policy. What is set in them is no setting of the policy."""

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
    other = next((part for part in parts[:-1] if sections and part in OTHER_MODELS), "")
    if other:
        return _format_equivalent(EQUIVALENT_SETTINGS[other])
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
