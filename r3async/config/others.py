"""Equivalents of other trainers' settings, which the error about an unknown key names.

A key of the table is the end of a dotted name (`rollout.n` is the end of verl's
`actor_rollout_ref.rollout.n`), or a section in it (`reward_model` in verl's `reward_model.enable`);
the longest end that is in the table counts, and ends count before sections. Its value is our
setting (`learner.lr`), or `a + b` for two of them, with the difference after a colon; or, after a
dash, the reason why there is none.
"""

from __future__ import annotations

_BATCH_SIZE_NOTE = (
    "groups of a step, each of `schedule.group_size` episodes; micro-batches follow from tokens"
)
_TOKEN_BUDGET_NOTE = "a budget in tokens, by which samples are packed"
_ACCUMULATION_NOTE = (
    "the step's groups are accumulated by themselves, in micro-batches of so many tokens"
)
_PACKING_NOTE = "- it follows from the packed tokens: see `learner.max_tokens_per_micro_batch`"
_NO_CRITIC_NOTE = (
    "- there is no critic: advantages compare the episodes of a group (`algorithm.advantage`)"
)
_MINIBATCH_NOTE = "how many parts of a step are trained one after the other, not their size"
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
    "max_norm": "learner.max_grad_norm",
    "bf16": 'learner.dtype: "bfloat16" or "float32"',
    "fp16": 'learner.dtype: "bfloat16" or "float32"',
    "gradient_checkpointing": 'learner.recompute: "none", "selective" or "full"',
    "enable_gradient_checkpointing": 'learner.recompute: "none", "selective" or "full"',
    # how much a step trains
    "batch_size": f"schedule.prompts_per_step: {_BATCH_SIZE_NOTE}",
    "train_batch_size": f"schedule.prompts_per_step: {_BATCH_SIZE_NOTE}",
    "rollout_batch_size": f"schedule.prompts_per_step: {_BATCH_SIZE_NOTE}",
    "generation_batch_size": f"schedule.prompts_per_step: {_BATCH_SIZE_NOTE}",
    "per_device_train_batch_size": f"learner.max_tokens_per_micro_batch: {_TOKEN_BUDGET_NOTE}",
    "micro_batch_size": f"learner.max_tokens_per_micro_batch: {_TOKEN_BUDGET_NOTE}",
    "ppo_micro_batch_size": f"learner.max_tokens_per_micro_batch: {_TOKEN_BUDGET_NOTE}",
    "ppo_micro_batch_size_per_gpu": f"learner.max_tokens_per_micro_batch: {_TOKEN_BUDGET_NOTE}",
    "micro_train_batch_size_per_gpu": f"learner.max_tokens_per_micro_batch: {_TOKEN_BUDGET_NOTE}",
    "micro_forward_batch_size_per_gpu": f"learner.max_tokens_per_micro_batch: {_TOKEN_BUDGET_NOTE}",
    "log_prob_micro_batch_size_per_gpu": (
        f"learner.max_tokens_per_micro_batch: {_TOKEN_BUDGET_NOTE}"
    ),
    "ppo_max_token_len_per_gpu": "learner.max_tokens_per_micro_batch",
    "max_tokens_per_gpu": "learner.max_tokens_per_micro_batch",
    "max_tokens_per_microbatch": "learner.max_tokens_per_micro_batch",
    "token_budget": "learner.max_tokens_per_micro_batch",
    "use_dynamic_bsz": _PACKING_NOTE,
    "use_sample_packing": _PACKING_NOTE,
    "packing": _PACKING_NOTE,
    "gradient_accumulation_steps": f"learner.max_tokens_per_micro_batch: {_ACCUMULATION_NOTE}",
    "grad_accum_steps": f"learner.max_tokens_per_micro_batch: {_ACCUMULATION_NOTE}",
    "accumulate_grad_batches": f"learner.max_tokens_per_micro_batch: {_ACCUMULATION_NOTE}",
    "ppo_mini_batch_size": f"schedule.minibatches_per_step: {_MINIBATCH_NOTE}",
    "policy_mini_batch_size": f"schedule.minibatches_per_step: {_MINIBATCH_NOTE}",
    "steps_per_generation": f"schedule.minibatches_per_step: {_MINIBATCH_NOTE}",
    "num_minibatches": "schedule.minibatches_per_step",
    "max_steps": "steps",
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
    "beta": "algorithm.reference_kl.coef",
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
    "kl_loss_type": (
        "- KL to the reference model is always k3's, weighted: `algorithm.reference_kl.coef`"
    ),
    "coef_min": (
        "algorithm.rollout_kl.coef: the adapted coefficient never falls below where it starts"
    ),
    "target_kl": "algorithm.rollout_kl.target",
    "kl_target": "algorithm.rollout_kl.target",
    "clip_range": (
        'algorithm.ppo.clip_low + algorithm.ppo.clip_high: with `algorithm.policy_loss="ppo"`'
    ),
    "clip_ratio": (
        'algorithm.ppo.clip_low + algorithm.ppo.clip_high: with `algorithm.policy_loss="ppo"`'
    ),
    "cliprange": (
        'algorithm.ppo.clip_low + algorithm.ppo.clip_high: with `algorithm.policy_loss="ppo"`'
    ),
    "epsilon": (
        'algorithm.ppo.clip_low + algorithm.ppo.clip_high: with `algorithm.policy_loss="ppo"`'
    ),
    "epsilon_low": "algorithm.ppo.clip_low",
    "clip_ratio_low": "algorithm.ppo.clip_low",
    "eps_clip_low": "algorithm.ppo.clip_low",
    "epsilon_high": "algorithm.ppo.clip_high",
    "clip_ratio_high": "algorithm.ppo.clip_high",
    "eps_clip_high": "algorithm.ppo.clip_high",
    "clip_ratio_c": "algorithm.ppo.dual_clip",
    "delta": "algorithm.ppo.dual_clip",
    "entropy_coeff": "algorithm.entropy_coef",
    "ent_coef": "algorithm.entropy_coef",
    "loss_type": "algorithm.policy_loss: what it is a mean over is `algorithm.reduction`",
    "policy_loss_type": "algorithm.policy_loss",
    "loss_mode": "algorithm.policy_loss",
    "loss_agg_mode": 'algorithm.reduction: "token_mean", "sequence_mean" and others',
    "loss_reduction": "algorithm.reduction",
    "importance_sampling_level": 'algorithm.policy_loss: "gspo" is by sequence',
    "adv_estimator": "algorithm.advantage",
    "advantage_estimator": "algorithm.advantage",
    "scale_rewards": "algorithm.normalize_std: true or false",
    "norm_adv_by_std_in_grpo": "algorithm.normalize_std",
    "grpo_norm_by_std": "algorithm.normalize_std",
    "mask_truncated_completions": "algorithm.overlong_filter",
    "overlong_filtering": "algorithm.overlong_filter",
    "apply_overlong_filtering": "algorithm.overlong_filter",
    "overlong_buffer.len": "algorithm.overlong_penalty.buffer",
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
    "sapo_temperature_pos": "algorithm.sapo.tau_positive",
    "sapo_temperature_neg": "algorithm.sapo.tau_negative",
    "num_iterations": "schedule.epochs_per_step",
    "ppo_epochs": "schedule.epochs_per_step",
    "update_epochs_per_batch": "schedule.epochs_per_step",
    "ratio_cap": (
        'algorithm.truncated_pg.cap: the loss that was "tis" is "truncated_pg", and '
        '"tis" is now Yao\'s'
    ),
    "tis_imp_ratio_cap": 'algorithm.tis.cap: with algorithm.policy_loss="tis"',
    "vllm_importance_sampling_cap": 'algorithm.tis.cap: with algorithm.policy_loss="tis"',
    "rollout_is": 'algorithm.correction.weight: "token" or "sequence"',
    "rollout_is_threshold": "algorithm.correction.weight_cap",
    "router_aux_loss_coef": "algorithm.router_aux.coef",
    "moe_aux_loss_coeff": "algorithm.router_aux.coef",
    "router_replay": 'routing.replay: "rollout" (R3), "learner" (R2) or "off"',
    "router_replay.mode": 'routing.replay: "rollout" is R3, "learner" is R2',
    "enable_router_replay": 'routing.replay: "rollout" (R3), "learner" (R2) or "off"',
    "moe_enable_routing_replay": 'routing.replay: "rollout" (R3), "learner" (R2) or "off"',
    "enable_rollout_routing_replay": 'routing.replay: "rollout" (R3), "learner" (R2) or "off"',
    "use_rollout_routing_replay": 'routing.replay: "rollout" (R3), "learner" (R2) or "off"',
    "gamma": "- rewards are not discounted: how they are credited is `algorithm.credit`",
    "lam": _NO_CRITIC_NOTE,
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
    "save_steps": "checkpoint.every_steps",
    "save_freq": "checkpoint.every_steps",
    "save_interval": "checkpoint.every_steps",
    "ckpt_interval": "checkpoint.every_steps",
    "ckpt.interval": "checkpoint.every_steps",
    "save_total_limit": "checkpoint.keep_last",
    "max_ckpts_to_keep": "checkpoint.keep_last",
    "resume_from_checkpoint": "resume",
    "resume_mode": "resume",
    "resume_step": "resume",
    "eval_steps": "evaluation.every_steps",
    "test_freq": "evaluation.every_steps",
    "eval_interval": "evaluation.every_steps",
    "eval.interval": "evaluation.every_steps",
    "eval_before_train": "evaluation.at_start",
    "val_before_train": "evaluation.at_start",
    "eval_base_model": "evaluation.at_start",
    "logging_steps": "- every step is logged, in runs/NAME/metrics.jsonl",
}
"""Equivalents of the settings of TRL (`GRPOConfig`, `AsyncGRPOConfig`), verl, SkyRL, prime-rl,
AReaL, slime, miles, NeMo RL, ART and ROLL."""

TARGET_SETTINGS = frozenset(
    setting
    for words in EQUIVALENT_SETTINGS.values()
    if not words.startswith("- ")
    for setting in words.partition(":")[0].split(" + ")
)
"""Settings of r3async that the table names."""


def find_equivalent_setting(name: str, *, sections: bool = True) -> str:
    """Return the text on what to set instead of another trainer's dotted `name`; "" if no trainer
    is known to have it.

    Args:
        sections: A section in the name counts too, as it does unless the name begins with a
            section of ours.
    """
    parts = name.split(".")
    for stop in range(len(parts), 0 if sections else len(parts) - 1, -1):
        for start in range(stop):
            words = EQUIVALENT_SETTINGS.get(".".join(parts[start:stop]))
            if words is not None:
                return _format_equivalent(words)
    return ""


def _format_equivalent(words: str) -> str:
    if words.startswith("- "):
        return f"there is none here; {words[2:]}"
    settings, colon, more = words.partition(":")
    return f"here it is {' and '.join(f'`{s}`' for s in settings.split(' + '))}" + (
        f" ({more.strip()})" if colon else ""
    )
