"""The section about tasks that are posed more or less often, by what their groups scored."""

from __future__ import annotations

from r3async.config.section import PositiveInt, Section, SignedFloat, UnitFraction


class DifficultyConfig(Section):
    """Difficulty filter and curriculum, for environments that know how many tasks they have. Off by default."""

    groups: PositiveInt = 3
    """A task is judged by the mean rewards of its last so many groups."""
    settled_share: UnitFraction = 1.0
    """Difficulty filter: in what share of its turns a task is posed that is settled: all of its last `groups` groups had a mean
    reward of `easy` or more, or all had `hard` or less. In the others another takes its place. 1: always posed; 0.1 is rare,
    and still notices a task that the model has learnt or forgotten."""
    easy: SignedFloat = 1.0
    """Mean reward of a group from which on it is too easy."""
    hard: SignedFloat = 0.0
    """Mean reward of a group up to which it is too hard."""
    target: SignedFloat | None = None
    """Curriculum: of `among` tasks, that whose turn it is and others at random, pose the one of which the mean reward of the last
    `groups` groups is nearest to this. A task without past groups goes before. Unset: tasks in turn."""
    among: PositiveInt = 4
    """Tasks that the curriculum chooses among."""

    @property
    def is_active(self) -> bool:
        """Whether past rewards change what is posed."""
        return self.settled_share < 1 or self.target is not None

    def check_values(self) -> None:
        if self.hard >= self.easy:
            raise ValueError(f"`hard` = {self.hard:g} must be less than `easy` = {self.easy:g}")
