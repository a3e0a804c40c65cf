"""The configuration section `schedule`, with the difficulty filter and the curriculum."""

from __future__ import annotations

from typing import Literal

import msgspec

from r3async.config.section import PositiveInt, Section, SignedFloat, UnitFraction


class DifficultyConfig(Section):
    """Difficulty filter and curriculum, for environments that know how many tasks they
    have. Off by default."""

    groups: PositiveInt = 3
    """Number of a task's latest groups that decide its difficulty."""
    settled_share: UnitFraction = 1.0
    """Difficulty filter: share of its turns in which a settled task is used
    (docs/environments.md#tasks-by-past-reward). 1: no filter."""
    easy: SignedFloat = 1.0
    """Mean reward of a group at or above which it is too easy."""
    hard: SignedFloat = 0.0
    """Mean reward of a group at or below which it is too hard."""
    target: SignedFloat | None = None
    """Curriculum: of the next task and three random ones, use the one whose latest mean reward
    is nearest to this. Unset: off."""

    @property
    def is_active(self) -> bool:
        """True if past rewards change which tasks are posed."""
        return self.settled_share < 1 or self.target is not None

    def check_values(self) -> None:
        if self.hard >= self.easy:
            raise ValueError(f"`hard` = {self.hard:g} must be less than `easy` = {self.easy:g}")


class ScheduleConfig(Section):
    max_staleness: int = 1
    """Versions that the oldest trained token may lag behind, with `window = 1`. 0: exactly
    on-policy (synchronous), whatever the window."""
    window: PositiveInt = 1
    """Number of the oldest untrained groups that a step may choose from. 1: lease order. Larger:
    younger groups may overtake a late one, and tokens may be older
    (docs/asynchrony.md#the-bound)."""
    max_token_age: int | None = None
    """Age in versions above which a token is left out of the policy loss, but not of the KL
    terms."""
    split: Literal["idle", "capacity"] = "idle"
    """When one group runs on several generators. `idle`: when generators would be idle, or it
    is too large for one. `capacity`: also whenever a generator has capacity for a part."""
    prompts_per_step: PositiveInt = 16
    """Groups that a step trains; with `tokens_per_step`, the minimum."""
    tokens_per_step: int = 0
    """Minimum number of trainable tokens a step, which takes more groups until it has them. 0:
    off."""
    replaced_groups: int = 0
    """Dynamic sampling: maximum number of groups that a step takes in place of those with equal
    scores. Set `algorithm.filter_zero_variance` too."""
    difficulty: DifficultyConfig = msgspec.field(default_factory=DifficultyConfig)
    group_size: PositiveInt = 8
    """Episodes per prompt, whose rewards are compared."""
    minibatches_per_step: PositiveInt = 1
    """Parts of a step's groups, each with its own optimizer update; at most
    `prompts_per_step`."""
    epochs_per_step: PositiveInt = 1
    """Passes of a step through its minibatches, with an update for each."""
    steps_per_publication: PositiveInt = 1
    """Steps between two versions of the weights that engines get."""

    @property
    def updates_per_step(self) -> int:
        """The number of optimizer updates of a step in which none is skipped."""
        return self.minibatches_per_step * self.epochs_per_step

    @property
    def updates_per_version(self) -> int:
        """The number of optimizer updates from one version that engines are given to the next."""
        return self.updates_per_step * self.steps_per_publication

    @property
    def takes_extra_groups(self) -> bool:
        """True if a step may take more than `prompts_per_step`."""
        return bool(self.tokens_per_step or self.replaced_groups)

    def check_values(self) -> None:
        if self.replaced_groups and self.tokens_per_step:
            raise ValueError(
                "`replaced_groups` and `tokens_per_step` both say how many more groups a "
                "step takes: set one"
            )
        if self.replaced_groups and self.max_staleness == 0:
            raise ValueError(
                "`replaced_groups` needs `max_staleness` = 1 or more: with 0 no group is in flight "
                "besides those of the step"
            )
        if self.minibatches_per_step > self.prompts_per_step:
            raise ValueError(
                f"`minibatches_per_step` = {self.minibatches_per_step} is more than "
                f"`prompts_per_step` = {self.prompts_per_step}: a group is trained in one "
                "minibatch. Lower the first or raise the second"
            )
