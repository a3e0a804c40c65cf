"""The section about evaluations: which tasks, how often, how they are answered, and by which figure a checkpoint is the best."""

from __future__ import annotations

from typing import Annotated

import msgspec

from r3async.config.generation import EnvConfig
from r3async.config.section import NumberRange, PositiveFloat, PositiveInt, Section, Seed, SignedFloat

Temperature = Annotated[float, NumberRange(0, 10**9)]


class EvaluationEnvConfig(EnvConfig):
    name: str = ""
    """As `env.name`. Empty: see `[evaluation]`."""

    def check_values(self) -> None:
        super().check_values()
        if not self.name and self.args:
            raise ValueError("`args` without `name`: name the environment that they are for")


class EvaluationSetConfig(Section):
    """One of `evaluation.sets`. What it leaves unset is as `[evaluation]` has it."""

    env: EvaluationEnvConfig = msgspec.field(default_factory=lambda: EvaluationEnvConfig())
    """Which environment. An empty name: that of `[evaluation]`."""
    episodes: PositiveInt | None = None
    samples: PositiveInt | None = None
    temperature: Temperature | None = None
    pass_reward: SignedFloat | None = None
    seed: Seed | None = None


class EvaluationConfig(Section):
    """Episodes that are played beside the training, and are never trained."""

    every: int = 0
    """Steps between two evaluations; one more follows the last step. 0: none."""
    at_start: bool = False
    """Also before the first step."""
    episodes: PositiveInt = 32
    """Tasks, or as many as the environment has if those are fewer. Each is played `samples` times."""
    samples: PositiveInt = 1
    """Episodes of each task. With n of them the mean reward is avg@n, and pass@k is reported for k = 1, 2, 4, … n."""
    temperature: Temperature | None = None
    """Of the answers. 0: greedy. Unset: `episode.temperature`."""
    pass_reward: SignedFloat = 1.0
    """An episode with this reward, or more, passes (pass@k)."""
    env: EvaluationEnvConfig = msgspec.field(default_factory=lambda: EvaluationEnvConfig())
    """Which environment. An empty name: the one that is trained, with its arguments."""
    sets: dict[str, EvaluationSetConfig] = msgspec.field(default_factory=dict)
    """Several sets of tasks, or of answers to the same tasks: `[evaluation.sets.greedy]` with `temperature = 0` beside
    `[evaluation.sets.sampled]` with `samples = 8`. A set says what differs from `[evaluation]` (`env`, `episodes`, `samples`,
    `temperature`, `pass_reward`, `seed`). They are played one after the other; the first is the one that views show first."""
    seed: Seed = 0
    """Of the tasks. Every evaluation poses the same ones, and training poses none of them."""
    timeout: PositiveFloat = 1800.0
    """Seconds after which an evaluation times out."""

    def check_values(self) -> None:
        for name in self.sets:
            if not name or not all(c.isalnum() or c in "-_." for c in name):
                raise ValueError(f"`sets`: {name!r} is no name: letters, digits, `-`, `_` and `.`")
        if not self.sets and self.temperature == 0 and self.samples > 1:
            raise ValueError(
                f"`temperature` = 0 is greedy, and {self.samples} greedy answers to a task are all the same: set `samples` = 1"
            )
        for name in self.sets:
            try:
                self.resolve_set(name)
            except ValueError as error:
                raise ValueError(f"`sets.{name}`: {error}") from error

    def resolve_sets(self) -> dict[str, EvaluationConfig]:
        """The sets, each as an evaluation of one set; the only one, where none is named, as ""."""
        return {name: self.resolve_set(name) for name in self.sets} or {"": self}

    def resolve_set(self, name: str) -> EvaluationConfig:
        """With all that the set leaves unset."""
        own = self.sets[name]
        given = {field: value for field in own.__struct_fields__ if (value := getattr(own, field)) is not None}
        if not own.env.name:
            del given["env"]
        return msgspec.structs.replace(self, sets={}, **given)

    def check_keep_best(self, metric: str, steps_per_publication: int) -> None:
        """Raise `ValueError` if no checkpoint can be the best by `metric` (`checkpoint.keep_best`)."""
        if not metric:
            return
        if not self.every:
            raise ValueError(f"`checkpoint.keep_best` = {metric!r} needs evaluations: set `evaluation.every`")
        if self.every % steps_per_publication:
            raise ValueError(
                f"`checkpoint.keep_best` needs a checkpoint of each evaluated step, and only every {steps_per_publication} steps "
                f"make a version (`schedule.steps_per_publication`): `evaluation.every` = {self.every} must be a multiple of that"
            )
        figures = [
            f"{name}/{figure}" if name else figure
            for name, each in self.resolve_sets().items()
            for figure in ("reward_mean", *(f"pass@{k}" for k in list_pass_ks(each.samples)))
        ]
        if metric not in figures:
            raise ValueError(
                f"`checkpoint.keep_best` = {metric!r} is no figure of the evaluations: {', '.join(figures)}"
            )


def list_pass_ks(samples: int) -> list[int]:
    """The k of pass@k that is reported of so many episodes of each task: powers of two, and their number."""
    return sorted({2**i for i in range(samples.bit_length()) if 2**i <= samples} | {samples})
