"""How a run is watched: what is too long, what is too often, and what then."""

from __future__ import annotations

from typing import Literal

from r3async.config.section import Positive, Section, Share


class SuperviseConfig(Section):
    stall_seconds: Positive = 600.0
    """Seconds for which a stage may have work and do nothing (no token, no trajectory, no acknowledgement) before it counts as
    stalled; then `on_stall`. More than the longest call of an environment or tool. What has a limit of its own is given that,
    and a little more: an optimizer step (`step_seconds`), writing weights (`weights.write_timeout`), installing them
    (`weights.install_timeout`)."""
    step_seconds: Positive = 3600.0
    """Seconds that one step of the learner may take before training counts as stalled."""
    on_stall: Literal["warn", "restart", "abort"] = "restart"
    """What a stall leads to, after the event `stalled` and the stacks in `runs/NAME/stacks`. `warn`: nothing else. `restart`: a
    generator that stalled is restarted, which counts for `generator.max_restarts`; a learner or a conductor that does not
    answer is lost (`max_run_restarts`); a full disk is waited for; any other stage ends the run. `abort`: the run ends, and
    says which stage it was."""
    silence_seconds: Positive = 60.0
    """A generator that did not report for so long is suspect: it is leased no new episodes and nobody waits for it, until it
    reports again; after twice as long its groups are leased again. They report many times a second, but an engine on CPU may
    keep one busy for a while."""
    restart_backoff: Positive = 1.0
    """Seconds before a generator that died is loaded again; doubled for every further death, up to a minute, until it was well
    for ten minutes."""
    max_run_restarts: int = 3
    """How often the run begins again from its newest checkpoint when the learner's or the conductor's process has died. A
    generator that dies is restarted by itself (`generator.max_restarts`)."""
    stop_grace_seconds: Positive = 30.0
    max_failed_fraction: Share = 0.1
    """Share of the run's last 100 tasks (or of as many as can be in flight) that may fail for good (after `episode.retries`)
    before it stops with what the last one failed with; a task of which some episodes fail counts for their share. Failures of
    environments, of the engine and refusals of the learner are counted apart. A failed episode is not trained, and is
    compared with nobody in its group. A task of which every episode fails (not by the engine) is quarantined: it is not posed
    again. 0: the first failure stops it."""

    max_skipped_steps: int = 20
    """Steps in a row that may make no update because the gradient was not finite or the drift beyond `algorithm.rollout_kl.max`;
    at the next one the run fails. Steps without contrast do not count: they have an event of their own, `no_contrast`. 0: the
    first one stops it."""
