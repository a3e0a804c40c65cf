"""The steps that made no update, and why. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

from r3async.world import EventReporter

ZERO_VARIANCE = "zero variance"
ALL_EPISODES_FAILED = "every episode failed"
DRIFT_TOO_LARGE = "drift beyond algorithm.rollout_kl.max"
GRADIENT_NOT_FINITE = "gradient not finite"


def explain_no_update(metrics: Mapping[str, Any]) -> str:
    """Return why a step made no update, from its metrics or its row; empty if it made one, or if
    they do not say."""
    if metrics.get("optimizer/updates", 1):
        return ""
    if metrics.get("optimizer/zero_variance"):
        episodes, failed = _count_ended_episodes(metrics)
        return ALL_EPISODES_FAILED if episodes and failed == episodes else ZERO_VARIANCE
    return DRIFT_TOO_LARGE if metrics.get("optimizer/broken") else GRADIENT_NOT_FINITE


def _count_ended_episodes(metrics: Mapping[str, Any]) -> tuple[int, int]:
    """Return how many episodes a step took, and how many of them had failed for good."""
    ended = {
        name: value
        for name, value in metrics.items()
        if "/ended_" in name and name.startswith("episode/")
    }
    return int(sum(ended.values())), int(ended.get("episode/ended_error", 0))


class UpdateMonitor:
    """Monitor that counts the steps of a run, as far as this process sees them, by the reason why
    they made no update.

    Steps with zero variance are due to the task or the policy, and no fault: there is one
    event, `zero_variance`, when they begin, and one, `variance_returned`, when they end. They
    neither count as skipped nor end a series of skipped steps. The same holds for steps of
    which every episode failed, which begin with `every_episode_failed`: `TaskFailures` checks
    how many may fail.

    Args:
        max_skipped: Number of skipped steps in a row that are tolerated
            (`supervise.max_skipped_steps`).
        report_warning: Function that is called with an event's name and its fields.
        report_info: Function that is called with an event's name and its fields.
    """

    def __init__(self, max_skipped: int, report_warning: EventReporter, report_info: EventReporter):
        self._max_skipped = max_skipped
        self._report_warning = report_warning
        self._report_info = report_info
        self._steps_with_zero_variance = 0
        """Number of steps with zero variance since the last other one."""
        self._skipped: list[tuple[int, str]] = []
        """Steps in a row that had advantages and made no update, each with the reason."""
        self._reason_counts: Counter[str] = Counter()
        self._episodes = self._failed_episodes = 0

    def record_step(self, step: int, metrics: Mapping[str, Any]) -> str:
        """Record a step, once after each, and return why the run must end; empty if it need not."""
        why = explain_no_update(metrics)
        self._reason_counts[why] += 1
        episodes, failed = _count_ended_episodes(metrics)
        self._episodes = self._episodes + episodes
        self._failed_episodes = self._failed_episodes + failed
        if why in (ZERO_VARIANCE, ALL_EPISODES_FAILED):
            self._steps_with_zero_variance += 1
            if self._steps_with_zero_variance == 1 and why == ALL_EPISODES_FAILED:
                self._report_warning(
                    "every_episode_failed",
                    step=step,
                    episodes=episodes,
                    hint="see the events episode_abandoned",
                )
            elif self._steps_with_zero_variance == 1:
                self._report_warning(
                    "zero_variance",
                    step=step,
                    groups=int(metrics["batch/groups"]),
                    groups_without=int(metrics["advantage/zero_variance_groups"]),
                    trained_tokens=int(metrics["batch/trained_tokens"]),
                    episodes_failed=failed,
                    hint=(
                        "no update is made until scores differ within a group: look at the reward "
                        "and at how hard the tasks are, or raise schedule.group_size"
                    ),
                )
            return ""
        if self._steps_with_zero_variance:
            self._report_info(
                "variance_returned", step=step, steps_without=self._steps_with_zero_variance
            )
            self._steps_with_zero_variance = 0
        if not why:
            self._skipped.clear()
            return ""
        self._skipped.append((step, why))
        return self._describe_skipped() if len(self._skipped) > self._max_skipped else ""

    def _describe_skipped(self) -> str:
        first = self._skipped[0][0]
        last = self._skipped[-1][0]
        return (
            f"{len(self._skipped)} steps in a row made no update, more than "
            f"supervise.max_skipped_steps = {self._max_skipped}: "
            f"{_format_counts(Counter(why for _, why in self._skipped))} (steps {first} to "
            f"{last}). Lower learner.lr, or begin from "
            f"a checkpoint before step {first}; the events step_skipped and trust_region_broke "
            "have each step's figures"
        )

    def describe_failure(self) -> str:
        """Return why a run without an update has failed, and was not merely idle: most of its
        episodes failed.

        The result is empty if it has not failed.
        """
        if 2 * self._failed_episodes <= self._episodes:
            return ""
        return (
            f"no step made an update, and {self._failed_episodes} of "
            f"{self._episodes} episodes failed"
        )

    def describe_no_updates(self) -> str:
        """Return what the steps without an update lacked, as
        `12 x zero variance, 1 x gradient not finite`.

        The result is empty if there was no such step.
        """
        return _format_counts(
            Counter({why: steps for why, steps in self._reason_counts.items() if why})
        )


def _format_counts(reasons: Counter[str]) -> str:
    return ", ".join(f"{steps} x {why}" for why, steps in reasons.most_common())
