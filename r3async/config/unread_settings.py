"""Settings without effect beside the others, which are refused with what they need to be read."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple

from r3async.config.algorithm import BUILTIN_POLICY_LOSSES, AlgorithmConfig
from r3async.config.run import Config

CommandName = Literal["train", "sft", "eval", "tinker", "init-model"]
"""Command that reads the settings."""


class ReadCondition(NamedTuple):
    """The condition under which some settings are read.

    Attributes:
        settings: Dotted names of sections or single settings.
        requirement: The condition in words, as a continuation of "it needs".
        is_met: Returns whether a configuration meets the condition.
    """

    settings: tuple[str, ...]
    requirement: str
    is_met: Callable[[Config], object]
    is_shared_in_files: bool = False
    """True if another command reads the settings too, maybe from the same file; only on the command
    line are they then without effect."""


def _has_agent_env(config: Config) -> bool:
    names = [
        config.env.name,
        config.evaluation.env.name,
        *(each.env.name for each in config.evaluation.sets.values()),
    ]
    names += [str(each.get("name")) for each in config.env.args.values() if isinstance(each, dict)]
    return any(name.startswith(("agent:", "agent-")) for name in names)


LOSSES_OF_SECTIONS = {
    name: [name] for name in BUILTIN_POLICY_LOSSES if name in AlgorithmConfig.__struct_fields__
}
"""The policy losses that read each section of `algorithm` that is named as one."""
LOSSES_OF_SECTIONS["truncated_pg"].append("sequence_truncated_pg")
LOSSES_OF_SECTIONS["ppo"].append("clip_cov")


def _make_loss_predicate(names: Sequence[str]) -> Callable[[Config], bool]:
    """Return the condition for reading a section of the policy losses `names`. A user-defined loss
    may read the section of any."""
    return lambda c: c.algorithm.policy_loss in names or ":" in c.algorithm.policy_loss


READ_CONDITIONS = (
    ReadCondition(("model.init",), "an empty `model.path`", lambda c: not c.model.path),
    ReadCondition(
        ("model.init.warm_reward",),
        "`model.init.max_warm_steps`",
        lambda c: c.model.init.max_warm_steps,
    ),
    ReadCondition(
        ("schedule.window",), "`schedule.max_staleness`", lambda c: c.schedule.max_staleness
    ),
    ReadCondition(
        ("schedule.difficulty.groups",),
        "`schedule.difficulty.settled_share` below 1, or `schedule.difficulty.target`",
        lambda c: c.schedule.difficulty.is_active,
    ),
    ReadCondition(
        ("schedule.difficulty.easy", "schedule.difficulty.hard"),
        "`schedule.difficulty.settled_share` below 1",
        lambda c: c.schedule.difficulty.settled_share < 1,
    ),
    ReadCondition(
        ("routing.min_recorded_fraction",),
        '`routing.replay` = "rollout"',
        lambda c: c.routing.replay == "rollout",
    ),
    ReadCondition(
        ("algorithm.overlong_penalty.factor",),
        "`algorithm.overlong_penalty.buffer`",
        lambda c: c.algorithm.overlong_penalty.buffer,
    ),
    *(
        ReadCondition(
            (f"algorithm.{section}",),
            f"`algorithm.policy_loss` = {' or '.join(map(json.dumps, losses))}",
            _make_loss_predicate(losses),
        )
        for section, losses in LOSSES_OF_SECTIONS.items()
    ),
    ReadCondition(
        ("algorithm.loss_args",),
        "`algorithm.policy_loss` or `algorithm.advantage` = module:function, one of your own",
        lambda c: ":" in c.algorithm.policy_loss + c.algorithm.advantage,
    ),
    ReadCondition(
        ("algorithm.correction.weight_cap",),
        "`algorithm.correction.weight`",
        lambda c: c.algorithm.correction.weight != "none",
    ),
    ReadCondition(
        ("algorithm.rollout_kl.estimator",),
        "`algorithm.rollout_kl.coef`",
        lambda c: c.algorithm.rollout_kl.coef,
    ),
    ReadCondition(
        ("algorithm.rollout_kl.measure",),
        "`algorithm.rollout_kl.target` or `max`",
        lambda c: c.algorithm.rollout_kl.target or c.algorithm.rollout_kl.max,
    ),
    ReadCondition(
        ("algorithm.rollout_kl.probe_every",),
        "`algorithm.rollout_kl.probe_share`",
        lambda c: c.algorithm.rollout_kl.probe_share,
    ),
    ReadCondition(
        ("algorithm.reference_kl.weighted", "algorithm.reference_kl.weight_cap"),
        "`algorithm.reference_kl.coef`",
        lambda c: c.algorithm.reference_kl.coef,
    ),
    ReadCondition(
        ("algorithm.reference_kl.weight_cap",),
        "`algorithm.reference_kl.weighted`",
        lambda c: c.algorithm.reference_kl.weighted,
    ),
    ReadCondition(
        ("algorithm.distillation.coef", "algorithm.distillation.rewards"),
        "`algorithm.distillation.teacher`",
        lambda c: c.algorithm.distillation.teacher,
    ),
    ReadCondition(
        ("learner.min_lr_ratio",),
        '`learner.lr_schedule` = "linear" or "cosine"',
        lambda c: c.learner.lr_schedule != "constant",
    ),
    ReadCondition(
        ("learner.lora.alpha", "learner.lora.targets", "learner.lora.deliver"),
        "`learner.lora.rank`",
        lambda c: c.learner.lora.rank,
    ),
    ReadCondition(
        ("weights.probe_every", "weights.probe_tolerance"),
        "`weights.probe`",
        lambda c: c.weights.probe,
    ),
    ReadCondition(
        ("weights.relay",),
        '`weights.backend` = "tcp" or "auto"',
        lambda c: c.weights.backend in ("tcp", "auto"),
    ),
    ReadCondition(
        ("transport.trusted_network",),
        '`weights.backend` = "nccl"',
        lambda c: c.weights.backend == "nccl",
    ),
    ReadCondition(
        tuple(f"buffer.{name}" for name in ("memory_bytes", "disk_bytes", "fsync")),
        '`buffer.durability` = "disk"',
        lambda c: c.buffer.durability == "disk",
    ),
    ReadCondition(
        ("log.project",),
        '"wandb", "trackio" or "mlflow" in `log.to`',
        lambda c: {"wandb", "trackio", "mlflow"}.intersection(c.log.to),
    ),
    ReadCondition(
        ("observe.prometheus_host",),
        "`observe.prometheus_port`",
        lambda c: c.observe.prometheus_port is not None,
    ),
    ReadCondition(
        ("serving",),
        "`serving.enabled` = true, or an agent as `env.name`",
        lambda c: c.serving.enabled or _has_agent_env(c),
    ),
    ReadCondition(
        ("serving.max_sessions",), "`serving.enabled` = true", lambda c: c.serving.enabled
    ),
    ReadCondition(
        ("evaluation",),
        "`evaluation.every_steps`",
        lambda c: c.evaluation.every_steps,
        is_shared_in_files=True,
    ),
)
"""Conditions for settings to be read: a setting is read if all of its conditions hold. The settings
that a condition itself depends on are always read."""

SECTIONS_OF_OTHER_COMMANDS: dict[CommandName, dict[str, str]] = {
    "train": {"sft": "`r3async sft`"},
    "sft": dict.fromkeys(
        ("generator", "weights", "transport", "buffer", "serving", "schedule"), "`r3async train`"
    ),
    "tinker": {
        "model": "the argument MODEL",
        **dict.fromkeys(
            (
                *("sft", "env", "schedule", "algorithm", "transport", "buffer", "checkpoint"),
                *("serving", "evaluation", "steps", "resume"),
            ),
            "training",
        ),
    },
    "eval": dict.fromkeys(
        ("sft", "algorithm", "schedule", "buffer", "transport", "supervise"), "training"
    ),
}
"""Sections that a command does not read, each with the command or activity that does."""

ALWAYS_READ = frozenset({"evaluation.every_steps", "serving.enabled"})


def explain_unread(setting: str, config: Config, *, in_file: bool = False) -> str:
    """Return what is missing for `setting`, of a file or of the command line, to be read in
    training, as `ReadCondition.requirement`; "" if it is read."""
    if setting in ALWAYS_READ:
        return ""
    for condition in READ_CONDITIONS:
        if in_file and condition.is_shared_in_files:
            continue
        if any(_is_within(setting, each) for each in condition.settings) and not condition.is_met(
            config
        ):
            return condition.requirement
    return ""


def find_other_reader(setting: str, command: CommandName) -> str:
    """Return which other command or activity reads `setting`, if this command does not; else ""."""
    return next(
        (
            who
            for of, who in SECTIONS_OF_OTHER_COMMANDS.get(command, {}).items()
            if _is_within(setting, of)
        ),
        "",
    )


def _is_within(setting: str, section: str) -> bool:
    return setting == section or setting.startswith(f"{section}.")
