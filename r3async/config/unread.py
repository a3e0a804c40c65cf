"""Which settings nothing reads beside the others: what a person sets in vain is refused, with what would have it read."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Literal, NamedTuple

from r3async.config.algorithm import POLICY_LOSSES

if TYPE_CHECKING:
    from r3async.config.read import Config

Command = Literal["train", "sft", "eval", "init-model"]
"""Who reads the settings."""


class Condition(NamedTuple):
    """`settings`, sections or single ones, by their dotted names, are read where `holds`; `needs` says when, after "it needs"."""

    settings: tuple[str, ...]
    needs: str
    holds: Callable[[Config], object]
    file_shared: bool = False
    """Another command reads them, maybe from the same file, so that only the command line sets them in vain."""


def _has_agent(config: Config) -> bool:
    names = [config.env.name, config.evaluation.env.name, *(each.env.name for each in config.evaluation.sets.values())]
    names += [str(each.get("name")) for each in config.env.args.values() if isinstance(each, dict)]
    return any(name.startswith(("agent:", "agent-")) for name in names)


def _chosen_loss(name: str) -> Callable[[Config], bool]:
    """A loss of one's own may read the section of any."""
    return lambda c: c.algorithm.policy_loss == name or ":" in c.algorithm.policy_loss


CONDITIONS = (
    Condition(("model.init",), "an empty `model.path`", lambda c: not c.model.path),
    Condition(("model.init.warm_reward",), "`model.init.max_warm_steps`", lambda c: c.model.init.max_warm_steps),
    Condition(("episode.keep_sampling_mask",), "`episode.top_p`, `top_k` or `min_p`", lambda c: c.episode.truncates),
    Condition(("schedule.window",), "`schedule.max_staleness`", lambda c: c.schedule.max_staleness),
    Condition(
        ("schedule.difficulty.groups",),
        "`schedule.difficulty.settled_share` below 1, or `schedule.difficulty.target`",
        lambda c: c.schedule.difficulty.active,
    ),
    Condition(
        ("schedule.difficulty.easy", "schedule.difficulty.hard"),
        "`schedule.difficulty.settled_share` below 1",
        lambda c: c.schedule.difficulty.settled_share < 1,
    ),
    Condition(
        ("schedule.difficulty.among",),
        "`schedule.difficulty.target`",
        lambda c: c.schedule.difficulty.target is not None,
    ),
    Condition(
        ("routing.min_recorded_fraction",),
        '`routing.replay` = "rollout"',
        lambda c: c.routing.replay == "rollout",
    ),
    Condition(("routing.trace_every",), '`routing.trace` = "sample"', lambda c: c.routing.trace == "sample"),
    Condition(
        ("algorithm.normalize_std",), '`algorithm.advantage` = "grpo"', lambda c: c.algorithm.advantage == "grpo"
    ),
    Condition(
        ("algorithm.overlong_penalty.factor",),
        "`algorithm.overlong_penalty.buffer`",
        lambda c: c.algorithm.overlong_penalty.buffer,
    ),
    *(
        Condition((f"algorithm.{loss}",), f'`algorithm.policy_loss` = "{loss}"', _chosen_loss(loss))
        for loss in POLICY_LOSSES
    ),
    Condition(
        ("algorithm.loss_args",),
        "`algorithm.policy_loss` = module:function, a loss of your own",
        lambda c: ":" in c.algorithm.policy_loss,
    ),
    Condition(
        ("algorithm.correction.weight_cap",),
        "`algorithm.correction.weight`",
        lambda c: c.algorithm.correction.weight != "none",
    ),
    Condition(
        ("algorithm.rollout_kl.estimator",), "`algorithm.rollout_kl.coef`", lambda c: c.algorithm.rollout_kl.coef
    ),
    Condition(
        tuple(f"algorithm.rollout_kl.{name}" for name in ("coef_max", "gain", "gain_down")),
        "`algorithm.rollout_kl.target`",
        lambda c: c.algorithm.rollout_kl.target,
    ),
    Condition(
        ("algorithm.rollout_kl.measure",),
        "`algorithm.rollout_kl.target` or `max`",
        lambda c: c.algorithm.rollout_kl.target or c.algorithm.rollout_kl.max,
    ),
    Condition(
        ("algorithm.rollout_kl.probe_every", "algorithm.rollout_kl.probe_tokens"),
        "`algorithm.rollout_kl.probe_share`",
        lambda c: c.algorithm.rollout_kl.probe_share,
    ),
    Condition(
        ("algorithm.reference_kl.weighted", "algorithm.reference_kl.weight_cap"),
        "`algorithm.reference_kl.coef`",
        lambda c: c.algorithm.reference_kl.coef,
    ),
    Condition(
        ("algorithm.reference_kl.weight_cap",),
        "`algorithm.reference_kl.weighted`",
        lambda c: c.algorithm.reference_kl.weighted,
    ),
    Condition(
        ("algorithm.distillation.coef", "algorithm.distillation.rewards"),
        "`algorithm.distillation.teacher`",
        lambda c: c.algorithm.distillation.teacher,
    ),
    Condition(
        ("learner.min_lr_ratio",),
        '`learner.lr_schedule` = "linear" or "cosine"',
        lambda c: c.learner.lr_schedule != "constant",
    ),
    Condition(("learner.lora.alpha", "learner.lora.targets"), "`learner.lora.rank`", lambda c: c.learner.lora.rank),
    Condition(("weights.probe_every", "weights.probe_tolerance"), "`weights.probe`", lambda c: c.weights.probe),
    Condition(
        ("weights.relay",), '`weights.backend` = "tcp" or "auto"', lambda c: c.weights.backend in ("tcp", "auto")
    ),
    Condition(("transport.trusted_network",), '`weights.backend` = "nccl"', lambda c: c.weights.backend == "nccl"),
    Condition(
        tuple(f"buffer.{name}" for name in ("memory_bytes", "disk_bytes", "fsync")),
        '`buffer.durability` = "disk"',
        lambda c: c.buffer.durability == "disk",
    ),
    Condition(
        ("observe.project",),
        '"wandb", "trackio" or "mlflow" in `observe.sinks`',
        lambda c: {"wandb", "trackio", "mlflow"}.intersection(c.observe.sinks),
    ),
    Condition(("observe.wandb_mode",), '"wandb" in `observe.sinks`', lambda c: "wandb" in c.observe.sinks),
    Condition(("observe.mlflow_uri",), '"mlflow" in `observe.sinks`', lambda c: "mlflow" in c.observe.sinks),
    Condition(
        ("observe.prometheus_host",),
        "`observe.prometheus_port`",
        lambda c: c.observe.prometheus_port is not None,
    ),
    Condition(
        ("serving",),
        "`serving.enabled` = true, or an agent as `env.name`",
        lambda c: c.serving.enabled or _has_agent(c),
    ),
    Condition(("serving.max_sessions",), "`serving.enabled` = true", lambda c: c.serving.enabled),
    Condition(("evaluation",), "`evaluation.every`", lambda c: c.evaluation.every, file_shared=True),
)
"""All hold for a setting that is read; what a condition is about itself is always read."""

OF_OTHERS: dict[Command, dict[str, str]] = {
    "train": {"sft": "`r3async sft`"},
    "sft": dict.fromkeys(("generator", "weights", "transport", "buffer", "serving", "schedule"), "`r3async train`"),
    "eval": dict.fromkeys(("sft", "algorithm", "schedule", "buffer", "transport", "supervise"), "training"),
}
"""Sections that a command does not read, and who does."""

ALWAYS = frozenset({"evaluation.every", "serving.enabled"})


def why_unread(setting: str, config: Config, *, in_file: bool = False) -> str:
    """What `setting`, of a file or of the command line, needs to be read in training, as `Condition.needs`; "" if it is read."""
    if setting in ALWAYS:
        return ""
    for condition in CONDITIONS:
        if in_file and condition.file_shared:
            continue
        if any(_within(setting, each) for each in condition.settings) and not condition.holds(config):
            return condition.needs
    return ""


def reader_elsewhere(setting: str, command: Command) -> str:
    """Who reads `setting`, if this command does not; else ""."""
    return next((who for of, who in OF_OTHERS.get(command, {}).items() if _within(setting, of)), "")


def _within(setting: str, section: str) -> bool:
    return setting == section or setting.startswith(f"{section}.")
