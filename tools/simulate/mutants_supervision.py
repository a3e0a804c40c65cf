"""Planted defects of evaluations, of episodes that fail, and of what is done about processes that are lost or lack something."""

from __future__ import annotations

import errno
from typing import Any

from r3async.actors.tasks import Evaluator
from r3async.rollout.episode import GroupPlayer
from r3async.tools.simulate.planting import mutant
from r3async.transport.sender import TrajectorySender
from r3async.weights.fetch import HostVersionCache
from r3async.world import files as disk_waits

# -- evaluations -------------------------------------------------------------------------------------------------------


@mutant(Evaluator, "resume_evaluations")
def cut_off_evaluation_forgotten(start: Any) -> Any:
    """An evaluation that was played when the run was stopped or lost is left out."""

    def nothing(self: Evaluator, step: int, version: int) -> None:
        self._last_step = step

    return nothing


@mutant(Evaluator, "_read_row_steps")
def evaluation_played_again(written: Any) -> Any:
    """A resumed run does not know which evaluations its record has."""
    return lambda self: set()


@mutant(Evaluator, "_wait_for_generator")
def evaluated_with_old_weights(player: Any) -> Any:
    """An evaluation is played with whatever weights a generator has."""
    return lambda self, version, left: player(self, 0, left)


# -- episodes ----------------------------------------------------------------------------------------------------------


@mutant(GroupPlayer, "__init__")
def given_up_at_once(init: Any) -> Any:
    """An episode is dropped when its environment fails for the first time."""

    def once(self: GroupPlayer, **facts: Any) -> None:
        init(self, **facts)
        self._retry_budgets["environment"] = 0

    return once


# -- processes ---------------------------------------------------------------------------------------------------------


@mutant(TrajectorySender, "_try_reconnect")
def no_second_try_to_connect(reconnect: Any) -> Any:
    """A sender that cannot make a socket when it connects again has failed."""
    return lambda self: self._open_connection()


@mutant(disk_waits, "is_disk_error")
def full_process_not_waited_for(is_disk_trouble: Any) -> Any:
    """Weights that cannot be written for want of descriptors are not tried again."""
    return lambda error: is_disk_trouble(error) and error.errno != errno.EMFILE


@mutant(HostVersionCache, "remove_unused_versions")
def tidied_while_it_is_used(tidy: Any) -> Any:
    """A process that fetches a version removes all others of its host."""

    def everything(self: HostVersionCache, keep: Any) -> None:
        for name in self._files.list_names(self.path):
            path = self.path / name
            if name.startswith("version-") and (keep is None or path != self.version_path(keep)):
                self._files.remove(path)

    return everything
