"""The section for evaluations: tasks, interval, sampling, and the metric of the best checkpoint."""

from __future__ import annotations

from typing import Annotated

import msgspec

from r3async.config.env import EnvConfig
from r3async.config.section import (
    NumberRange,
    PositiveInt,
    Section,
    Seed,
    SignedFloat,
)

Temperature = Annotated[float, NumberRange(0, 10**9)]


class EvaluationEnvConfig(EnvConfig):
    name: str = ""
    """Name of the environment, as `env.name`. Empty: see `[evaluation]`."""

    def check_values(self) -> None:
        super().check_values()
        if not self.name and self.args:
            raise ValueError("`args` without `name`: name the environment that they are for")


class EvaluationSetConfig(Section):
    """One of `evaluation.sets`. Unset keys have the values of `[evaluation]`."""

    env: EvaluationEnvConfig = msgspec.field(default_factory=lambda: EvaluationEnvConfig())
    """Environment of the set. An empty name: that of `[evaluation]`."""
    tasks: PositiveInt | None = None
    samples_per_task: PositiveInt | None = None
    temperature: Temperature | None = None
    pass_reward: SignedFloat | None = None
    seed: Seed | None = None


class EvaluationConfig(Section):
    """Episodes that run during training and are never trained."""

    every_steps: int = 0
    """Steps between two evaluations; one more follows the last step. 0: none."""
    at_start: bool = False
    """Evaluate before the first step too."""
    tasks: PositiveInt = 32
    """Number of tasks, or all of the environment's if it has fewer."""
    samples_per_task: PositiveInt = 1
    """Episodes of each task. With n of them the mean reward is avg@n, and pass@k is reported for
    k = 1, 2, 4, … n."""
    temperature: Temperature | None = None
    """Sampling temperature of the answers. 0: greedy. Unset: `episode.temperature`."""
    pass_reward: SignedFloat = 1.0
    """Reward at or above which an episode passes (pass@k)."""
    one_version: bool = False
    """Sample an evaluation with one version of the weights. Until it ends, its generator gets no
    newer one and begins no training episodes: with one generator, training waits."""
    env: EvaluationEnvConfig = msgspec.field(default_factory=lambda: EvaluationEnvConfig())
    """Environment of the evaluation. An empty name: the one that is trained, with its arguments."""
    sets: dict[str, EvaluationSetConfig] = msgspec.field(default_factory=dict)
    """Several sets of tasks, or of answers to the same tasks
    (docs/evaluate.md#while-a-run-trains). A set lists what differs."""
    seed: Seed = 0
    """Seed of the tasks. Every evaluation uses the same ones, and training uses none of them."""

    def check_values(self) -> None:
        for name in self.sets:
            if not name or not all(c.isalnum() or c in "-_." for c in name):
                raise ValueError(f"`sets`: {name!r} is no name: letters, digits, `-`, `_` and `.`")
        if not self.sets and self.temperature == 0 and self.samples_per_task > 1:
            raise ValueError(
                f"`temperature` = 0 is greedy, and {self.samples_per_task} greedy answers to a "
                "task are all the same: set `samples_per_task` = 1"
            )
        for name in self.sets:
            try:
                self.resolve_set(name)
            except ValueError as error:
                raise ValueError(f"`sets.{name}`: {error}") from error

    def resolve_sets(self) -> dict[str, EvaluationConfig]:
        """Return the sets by name, each as an evaluation without sets. If none is named, the
        evaluation itself is the only set, named ""."""
        return {name: self.resolve_set(name) for name in self.sets} or {"": self}

    def resolve_set(self, name: str) -> EvaluationConfig:
        """Return the set `name` as an evaluation, with everything that it leaves
        unset filled in."""
        own = self.sets[name]
        given = {
            field: value
            for field in own.__struct_fields__
            if (value := getattr(own, field)) is not None
        }
        if not own.env.name:
            del given["env"]
        return msgspec.structs.replace(self, sets={}, **given)

    def check_keep_best(self, metric: str, steps_per_publication: int) -> None:
        """Raise `ValueError` if no checkpoint can be the best by `metric`
        (`checkpoint.keep_best`)."""
        if not metric:
            return
        if not self.every_steps:
            raise ValueError(
                f"`checkpoint.keep_best` = {metric!r} needs evaluations: set "
                "`evaluation.every_steps`"
            )
        if self.every_steps % steps_per_publication:
            raise ValueError(
                "`checkpoint.keep_best` needs a checkpoint of each evaluated step, and only every "
                f"{steps_per_publication} steps make a version (`schedule.steps_per_publication`): "
                f"`evaluation.every_steps` = {self.every_steps} must be a multiple of that"
            )
        figures = [
            f"{name}/{figure}" if name else figure
            for name, each in self.resolve_sets().items()
            for figure in (
                "reward_mean",
                *(f"pass@{k}" for k in list_pass_ks(each.samples_per_task)),
            )
        ]
        if metric not in figures:
            raise ValueError(
                f"`checkpoint.keep_best` = {metric!r} is no figure of the evaluations: "
                f"{', '.join(figures)}"
            )


def list_pass_ks(samples: int) -> list[int]:
    """Return the values of k for which pass@k is reported with `samples_per_task` episodes of each
    task: powers of two, and `samples_per_task`."""
    return sorted({2**i for i in range(samples.bit_length()) if 2**i <= samples} | {samples})
