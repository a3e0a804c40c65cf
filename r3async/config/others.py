"""What other trainers call a setting, and ours in its place: said of a key that does not exist here.

A key of the table is the end of a dotted name (`rollout.n` is the end of verl's `actor_rollout_ref.rollout.n`); the longest end
that is in it counts. Its value is our setting (`learner.lr`), or `a + b` for two of them, with what differs after a colon; or,
after a dash, why there is none.
"""

from __future__ import annotations

_EFFECTIVE = "groups of a step, each of `schedule.samples_per_group` episodes; micro-batches follow from tokens"
_TOKENS = "a budget in tokens, by which samples are packed"
_ACCUMULATED = "the step's groups are accumulated by themselves, in micro-batches of so many tokens"
_FOLLOWS = "- it follows from the packed tokens: see `learner.max_tokens_per_micro_batch`"
_NO_CRITIC = "- there is no critic: advantages compare the episodes of a group (`algorithm.advantage`)"
_PARTS = "how many parts of a step are trained one after the other, not their size"
_OF_ENGINES = "of an engine; the learner's is `learner.parallel.tp`"
_ENGINES = "engines, each in a process of its own"

OTHERS = {
    # the optimizer
    "lr": "learner.lr",
    "learning_rate": "learner.lr",
    "optim.lr": "learner.lr",
    "lr_scheduler_type": "learner.lr_schedule",
    "lr_scheduler": "learner.lr_schedule",
    "scheduler.type": "learner.lr_schedule",
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
    "batch_size": f"schedule.groups_per_step: {_EFFECTIVE}",
    "train_batch_size": f"schedule.groups_per_step: {_EFFECTIVE}",
    "rollout_batch_size": f"schedule.groups_per_step: {_EFFECTIVE}",
    "generation_batch_size": f"schedule.groups_per_step: {_EFFECTIVE}",
    "per_device_train_batch_size": f"learner.max_tokens_per_micro_batch: {_TOKENS}",
    "micro_batch_size": f"learner.max_tokens_per_micro_batch: {_TOKENS}",
    "ppo_micro_batch_size": f"learner.max_tokens_per_micro_batch: {_TOKENS}",
    "ppo_micro_batch_size_per_gpu": f"learner.max_tokens_per_micro_batch: {_TOKENS}",
    "micro_train_batch_size_per_gpu": f"learner.max_tokens_per_micro_batch: {_TOKENS}",
    "micro_forward_batch_size_per_gpu": f"learner.max_tokens_per_micro_batch: {_TOKENS}",
    "log_prob_micro_batch_size_per_gpu": f"learner.max_tokens_per_micro_batch: {_TOKENS}",
    "ppo_max_token_len_per_gpu": "learner.max_tokens_per_micro_batch",
    "max_tokens_per_gpu": "learner.max_tokens_per_micro_batch",
    "use_dynamic_bsz": _FOLLOWS,
    "use_sample_packing": _FOLLOWS,
    "packing": _FOLLOWS,
    "gradient_accumulation_steps": f"learner.max_tokens_per_micro_batch: {_ACCUMULATED}",
    "grad_accum_steps": f"learner.max_tokens_per_micro_batch: {_ACCUMULATED}",
    "accumulate_grad_batches": f"learner.max_tokens_per_micro_batch: {_ACCUMULATED}",
    "ppo_mini_batch_size": f"schedule.minibatches_per_step: {_PARTS}",
    "policy_mini_batch_size": f"schedule.minibatches_per_step: {_PARTS}",
    "num_minibatches": "schedule.minibatches_per_step",
    "max_steps": "steps",
    "num_train_steps": "steps",
    "total_steps": "steps",
    "total_training_steps": "steps",
    "total_epochs": "steps: passes over the data follow from steps and `schedule.groups_per_step`",
    "num_train_epochs": "steps: passes over the data follow from steps and `schedule.groups_per_step`",
    "num_generations": "schedule.samples_per_group",
    "rollouts_per_example": "schedule.samples_per_group",
    "n_samples_per_prompt": "schedule.samples_per_group",
    "group_size": "schedule.samples_per_group",
    "rollout.n": "schedule.samples_per_group",
    # how far generation may be ahead
    "max_staleness": "schedule.max_staleness",
    "max_staleness_steps": "schedule.max_staleness",
    "max_async_level": "schedule.max_staleness",
    "async_level": "schedule.max_staleness",
    "staleness_threshold": "schedule.max_staleness: versions, not a share",
    "max_head_offpolicyness": "schedule.max_staleness",
    "max_off_policy_steps": "schedule.max_staleness",
    "async_generation_ratio": "schedule.max_staleness: versions, not a share",
    # the algorithm
    "beta": "algorithm.reference_kl.coef",
    "kl_coef": "algorithm.reference_kl.coef: the drift from the engine has its own, `algorithm.rollout_kl.coef`",
    "kl_loss_coef": "algorithm.reference_kl.coef",
    "init_kl_coef": "algorithm.reference_kl.coef",
    "kl_ctrl.kl_coef": "algorithm.reference_kl.coef",
    "use_kl_loss": "algorithm.reference_kl.coef: 0 is none",
    "use_kl_in_reward": "- KL is a term of the loss, never of the reward: `algorithm.reference_kl.coef`",
    "kl_loss_type": "- KL to the reference model is always k3's: `algorithm.reference_kl.coef`",
    "target_kl": "algorithm.rollout_kl.target",
    "kl_target": "algorithm.rollout_kl.target",
    "clip_range": 'algorithm.ppo.clip_low + algorithm.ppo.clip_high: with `algorithm.policy_loss="ppo"`',
    "clip_ratio": 'algorithm.ppo.clip_low + algorithm.ppo.clip_high: with `algorithm.policy_loss="ppo"`',
    "cliprange": 'algorithm.ppo.clip_low + algorithm.ppo.clip_high: with `algorithm.policy_loss="ppo"`',
    "epsilon": 'algorithm.ppo.clip_low + algorithm.ppo.clip_high: with `algorithm.policy_loss="ppo"`',
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
    "filter_groups.enable": "algorithm.filter_zero_variance",
    "dynamic_sampling": "algorithm.filter_zero_variance",
    "sapo_temperature_pos": "algorithm.sapo.tau_positive",
    "sapo_temperature_neg": "algorithm.sapo.tau_negative",
    "num_iterations": "schedule.minibatches_per_step: a token is trained once; a step is divided instead",
    "ppo_epochs": "schedule.minibatches_per_step: a token is trained once; a step is divided instead",
    "update_epochs_per_batch": "schedule.minibatches_per_step: a token is trained once; a step is divided instead",
    "tis_imp_ratio_cap": "algorithm.ratio_cap",
    "vllm_importance_sampling_cap": "algorithm.ratio_cap",
    "router_aux_loss_coef": "algorithm.router_aux.coef",
    "moe_aux_loss_coeff": "algorithm.router_aux.coef",
    "router_replay": 'routing.replay: "rollout" (R3), "learner" (R2) or "off"',
    "router_replay.mode": 'routing.replay: "rollout" is R3, "learner" is R2',
    "enable_router_replay": 'routing.replay: "rollout" (R3), "learner" (R2) or "off"',
    "gamma": "- rewards are not discounted: how they are credited is `algorithm.credit`",
    "lam": _NO_CRITIC,
    "gae_lambda": _NO_CRITIC,
    "vf_coef": _NO_CRITIC,
    "critic": _NO_CRITIC,
    "reward_model": "- an environment rewards answers, with whatever it calls: `env.name` = module:Class",
    # sampling
    "temperature": "episode.temperature",
    "top_p": "episode.top_p",
    "top_k": "episode.top_k",
    "min_p": "episode.min_p",
    "repetition_penalty": "- a penalty depends on what was sampled before: the learner computes no such distribution",
    "ignore_eos": "episode.ignore_eos",
    "max_completion_length": "episode.max_new_tokens",
    "max_response_length": "episode.max_new_tokens",
    "response_length": "episode.max_new_tokens",
    "max_generate_length": "episode.max_new_tokens",
    "max_new_tokens": "episode.max_new_tokens",
    "max_tokens": "episode.max_new_tokens",
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
    "tensor_parallel_size": f"generator.engine_args.tensor_parallel_size: {_OF_ENGINES}",
    "tensor_model_parallel_size": f"generator.engine_args.tensor_parallel_size: {_OF_ENGINES}",
    "vllm_tensor_parallel_size": "generator.engine_args.tensor_parallel_size",
    "inference_engine_tensor_parallel_size": "generator.engine_args.tensor_parallel_size",
    "megatron.tensor_model_parallel_size": "learner.parallel.tp",
    "pipeline_model_parallel_size": "learner.parallel.pp",
    "expert_model_parallel_size": "learner.parallel.ep",
    "context_parallel_size": "- `learner.parallel` has no context parallelism: use `learner.parallel.tp` for long samples",
    "fsdp_size": 'learner.parallel.dp: with `learner.backend="torch"`',
    "num_inference_engines": f"generator.count: {_ENGINES}",
    "num_engines": f"generator.count: {_ENGINES}",
    "rollout_num_engines": f"generator.count: {_ENGINES}",
    "num_generators": f"generator.count: {_ENGINES}",
    "max_num_seqs": "generator.concurrency",
    "max_concurrent": "generator.concurrency",
    "max_concurrent_rollouts": "generator.concurrency",
    "max_inflight_rollouts": "generator.concurrency",
    "enforce_eager": "generator.engine_args.enforce_eager",
    "max_num_batched_tokens": "generator.engine_args.max_num_batched_tokens",
    "use_vllm": '- generators always play with vLLM: `generator.engine="vllm"` is the default',
    "vllm_mode": "- learner and engines are processes of their own: `generator.count` and `learner.parallel` divide the GPUs",
    "colocate_all": "- learner and engines are processes of their own: `generator.count` and `learner.parallel` divide the GPUs",
    "n_gpus_per_node": "learner.parallel.dp + generator.count: who gets GPUs; Ray's cluster knows its nodes",
    "nnodes": "learner.parallel.dp + generator.count: who gets GPUs; Ray's cluster knows its nodes",
    "num_nodes": "learner.parallel.dp + generator.count: who gets GPUs; Ray's cluster knows its nodes",
    "weight_sync_backend": "weights.backend",
    # model, data, environment
    "model_name_or_path": "model.path",
    "model_name": "model.path",
    "model.name": "model.path",
    "policy.model.path": "model.path",
    "pretrained_model_name_or_path": "model.path",
    "hf_checkpoint": "model.path",
    "strategy": 'learner.backend: "megatron" or "torch" (FSDP2)',
    "env_class": "env.name",
    "env.id": "env.name",
    "environment": "env.name: with arguments in `env.args`",
    "max_env_workers": "env.workers",
    # keeping, watching
    "output_dir": "- it is runs/NAME: choose the place with --runs, and the `name`",
    "default_local_dir": "checkpoint.directory",
    "ckpt_path": "checkpoint.directory",
    "experiment_name": "name",
    "run_name": "name",
    "project_name": "observe.project",
    "wandb.project": "observe.project",
    "report_to": 'observe.sinks: a list, as ["wandb"]',
    "logger": 'observe.sinks: a list, as ["wandb"]',
    "log_with": 'observe.sinks: a list, as ["wandb"]',
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
    "eval_steps": "evaluation.every",
    "test_freq": "evaluation.every",
    "eval_interval": "evaluation.every",
    "eval.interval": "evaluation.every",
    "eval_before_train": "evaluation.at_start",
    "val_before_train": "evaluation.at_start",
    "eval_base_model": "evaluation.at_start",
    "logging_steps": "- every step is logged, in runs/NAME/metrics.jsonl",
}
"""Of TRL (`GRPOConfig`), verl, SkyRL, prime-rl, AReaL, slime and ROLL."""

SETTINGS = frozenset(
    setting
    for words in OTHERS.values()
    if not words.startswith("- ")
    for setting in words.partition(":")[0].split(" + ")
)
"""Those of ours that the table names."""


def ours(name: str) -> str:
    """What to set instead of another trainer's `name`, dotted; "" if nobody's is known."""
    parts = name.split(".")
    for start in range(len(parts)):
        words = OTHERS.get(".".join(parts[start:]))
        if words is not None:
            return _said(words)
    return ""


def _said(words: str) -> str:
    if words.startswith("- "):
        return f"there is none here; {words[2:]}"
    settings, colon, more = words.partition(":")
    return f"here it is {' and '.join(f'`{s}`' for s in settings.split(' + '))}" + (
        f" ({more.strip()})" if colon else ""
    )
