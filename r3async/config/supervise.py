"""The configuration section `supervise`."""

from __future__ import annotations

from typing import Literal

from r3async.config.section import PositiveFloat, Section, UnitFraction


class SuperviseConfig(Section):
    stall_seconds: PositiveFloat = 600.0
    """Seconds for which a stage with work may make no progress before it counts as stalled. Set
    it above the longest call of an environment or tool. docs/operations.md#stalls lists the
    stages, some with their own limits."""
    step_seconds: PositiveFloat = 3600.0
    """Seconds that a learner's step may take before training counts as stalled."""
    on_stall: Literal["warn", "restart", "abort"] = "restart"
    """What a stall causes, after the event and the stacks. `warn`: nothing. `restart`: the
    generator, learner or conductor is restarted; a full disk is waited for; any other stage ends
    the run. `abort`: the run ends."""
    silence_seconds: PositiveFloat = 60.0
    """Seconds without a report after which a generator gets no new episodes; after twice as long
    its groups are leased again. An engine on CPU may block a generator for a while."""
    restart_backoff: PositiveFloat = 1.0
    """Seconds before a lost generator is loaded again; doubled for each further loss, up to a
    minute, until it was healthy for ten."""
    max_run_restarts: int = 3
    """Times the run restarts from its newest checkpoint when the learner or the conductor is
    lost."""
    copy_steps: int = 1
    """Steps between two copies of the state of a learner of several ranks on one host, from which
    they restart if one is lost. There are two, and a third while one is made, of 12 bytes a
    parameter (with LoRA, of the adapters) in host memory. 0: none; the run restarts from its
    newest checkpoint."""
    stop_grace_seconds: PositiveFloat = 30.0
    """Seconds that each part of the end of a run may take: engines, evaluations, records."""
    leave_seconds: PositiveFloat = 120.0
    """Seconds that a leaving generator (`r3async scale`) may take to finish its episodes; others
    take over the rest."""
    max_failed_fraction: UnitFraction = 0.1
    """Share of the last 100 tasks (or of as many as can be in flight) that may fail for good,
    after `episode.retries`, before the run stops with the last error. A task with some failed
    episodes counts with their share. Environments, engines and refusals of the learner count
    separately. 0: the first failure stops the run."""

    max_skipped_steps: int = 20
    """Steps in a row that may make no update because the gradient was not finite or drift was
    above `algorithm.rollout_kl.max`; the next one fails the run. Steps with zero variance do not
    count."""
