"""The configuration section `supervise`."""

from __future__ import annotations

from typing import Literal

import msgspec

from r3async.config.section import PositiveFloat, Section, UnitFraction


class TimeLimits(msgspec.Struct, frozen=True):
    """Seconds that parts of a run may take."""

    start: float = 600.0
    """Of a process to load its model or engine."""
    step: float = 3600.0
    """Of a learner's step, before training counts as stalled."""
    collective: float = 600.0
    """Of one rank to wait for the others."""
    evaluation: float = 1800.0
    leave: float = 120.0
    """Of a leaving generator to finish its episodes."""
    base_install: float = 120.0
    base_version_write: float = 600.0
    base_checkpoint_write: float = 1800.0
    """Bases, to which the time for the bytes is added."""
    full_bytes_per_second: float = 2e8
    """Minimum rate where all of a file is written, or fetched and loaded by vLLM's own loader: the
    61 GB of 30 B parameters take an engine 100 to 280 s."""
    delta_bytes_per_second: float = 5e8
    """Minimum rate where only changes are fetched and the file is loaded by the plan."""

    def install(self, nbytes: int, *, first: bool) -> float:
        """Return the seconds of an engine to get and install a version of `nbytes`; `first` if it
        has no weights yet."""
        rate = self.full_bytes_per_second if first else self.delta_bytes_per_second
        return self.base_install + nbytes / rate

    def version_write(self, nbytes: int) -> float:
        """Return the seconds to write a version of `nbytes`; the step after the next waits for
        it."""
        return self.base_version_write + nbytes / self.full_bytes_per_second

    def checkpoint_write(self, nbytes: int) -> float:
        """Return the seconds to write a checkpoint of `nbytes`."""
        return self.base_checkpoint_write + nbytes / self.full_bytes_per_second

    def scale(self, factor: float) -> TimeLimits:
        """Return the limits for a machine that takes `factor` times as long."""
        scaled = {
            name: value / factor if name.endswith("per_second") else value * factor
            for name, value in msgspec.structs.asdict(self).items()
        }
        return TimeLimits(**scaled)


TIME_LIMITS = TimeLimits()
"""The limits with `supervise.patience` = 1."""


class SuperviseConfig(Section):
    patience: PositiveFloat = 1.0
    """Factor of the time limits for loading a model or engine (600 s), a step (3600), an
    evaluation (1800), writing a checkpoint (1800, plus 1 per 200 MB) or a version (600, the same),
    installing it (120, plus 1 per 200 MB at first, then per 500 MB), a rank's wait for the others
    (600), and the last episodes of a generator that leaves (120). Raise it for slow disks and
    networks."""
    stall_seconds: PositiveFloat = 600.0
    """Seconds for which a stage with work may make no progress (docs/operations.md#stalls). Set
    it above the longest call of an environment or tool."""
    on_stall: Literal["warn", "restart", "abort"] = "restart"
    """Reaction to a stall. `warn`: none. `restart`: the generator, learner or conductor is
    restarted; a full disk is waited for; any other stage ends the run. `abort`: the run ends."""
    silence_seconds: PositiveFloat = 60.0
    """Seconds without a report after which a generator gets no new episodes; after twice as long
    its groups are leased again."""
    restart_backoff: PositiveFloat = 1.0
    """Seconds before a lost generator is loaded again; doubled for each further loss, up to a
    minute."""
    max_run_restarts: int = 3
    """Times the run restarts from its newest checkpoint when the learner or the conductor is
    lost."""
    copy_steps: int = 1
    """Steps between two copies of the ranks' state, from which they restart if one is lost
    (docs/operations.md#a-rank-is-lost). 0: none."""
    stop_grace_seconds: PositiveFloat = 30.0
    """Seconds that each part of the end of a run may take."""
    max_failed_fraction: UnitFraction = 0.1
    """Share of the last 100 tasks that may fail for good before the run stops with the last
    error. A task that fails in part counts for that part. 0: the first failure stops the
    run."""

    max_skipped_steps: int = 20
    """Steps in a row that may make no update because the gradient was not finite or drift was
    above `algorithm.rollout_kl.max`; the next one fails the run."""

    @property
    def limits(self) -> TimeLimits:
        """The time limits with this `patience`."""
        return TIME_LIMITS.scale(self.patience)
