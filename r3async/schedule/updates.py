"""Which steps made no update of the weights, and why; when that is reported, and when it ends the run. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

NO_CONTRAST = "no contrast"
BROKEN = "drift beyond algorithm.rollout_kl.max"
NOT_FINITE = "gradient not finite"


def why_no_update(metrics: Mapping[str, Any]) -> str:
    """Of a step's metrics, or of its row: why it made no update. Empty if it made one, or if the row does not say."""
    if metrics.get("optimizer/updates", 1):
        return ""
    if metrics.get("optimizer/no_contrast"):
        return NO_CONTRAST
    return BROKEN if metrics.get("optimizer/broken") else NOT_FINITE


class Updates:
    """Counts the steps of a run, as far as this process sees them, by what kept them from an update.

    Steps without contrast are the task's or the policy's, not a fault: one event, `no_contrast`, when they begin, and one,
    `contrast_returned`, when they end. They neither count as skipped nor end a row of skipped steps.

    `limit`: skipped steps in a row that are let pass (`supervise.max_skipped_steps`). `warn`, `inform`: called with an event's
    name and its fields.
    """

    def __init__(self, limit: int, warn: Callable[..., object], inform: Callable[..., object]):
        self._limit, self._warn, self._inform = limit, warn, inform
        self._flat = 0
        """Steps without contrast since the last one that had some."""
        self._skipped: list[tuple[int, str]] = []
        """Steps in a row that had contrast and made no update, and why."""
        self._all: Counter[str] = Counter()

    def stepped(self, step: int, metrics: Mapping[str, Any]) -> str:
        """Once after each step. Returns why the run must end; empty if it need not."""
        why = why_no_update(metrics)
        self._all[why] += 1
        if why == NO_CONTRAST:
            self._flat += 1
            if self._flat == 1:
                self._warn(
                    "no_contrast",
                    step=step,
                    groups=int(metrics["batch/groups"]),
                    groups_without=int(metrics["advantage/zero_variance_groups"]),
                    trained_tokens=int(metrics["batch/trained_tokens"]),
                    hint="no update is made until scores differ within a group: look at the reward and at how hard the "
                    "tasks are, or raise schedule.samples_per_group",
                )
            return ""
        if self._flat:
            self._inform("contrast_returned", step=step, steps_without=self._flat)
            self._flat = 0
        if not why:
            self._skipped.clear()
            return ""
        self._skipped.append((step, why))
        return self._reason() if len(self._skipped) > self._limit else ""

    def _reason(self) -> str:
        first, last = self._skipped[0][0], self._skipped[-1][0]
        return (
            f"{len(self._skipped)} steps in a row made no update, more than supervise.max_skipped_steps = {self._limit}: "
            f"{_counted(Counter(why for _, why in self._skipped))} (steps {first} to {last}). Lower learner.lr, or begin from "
            f"a checkpoint before step {first}; the events step_skipped and trust_region_broke have each step's figures"
        )

    def without(self) -> str:
        """What the steps without an update lacked, as `12 x no contrast, 1 x gradient not finite`; empty if there was none."""
        return _counted(Counter({why: steps for why, steps in self._all.items() if why}))


def _counted(reasons: Counter[str]) -> str:
    return ", ".join(f"{steps} x {why}" for why, steps in reasons.most_common())
