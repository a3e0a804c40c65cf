"""Sender and receiver in one process, in virtual time, through faults of the network and the ends of both."""

import os
from typing import Any

import pytest

from r3async.data.control_messages import Ack
from r3async.transport import TrajectoryLedger, TrajectoryReceiver
from r3async.transport.memory_budget import MemoryBudget
from tests.sim.delivery import GROUPS, SAMPLES, Delivery

SEEDS = int(os.environ.get("R3ASYNC_SEEDS", "30"))
MUTANT_SEEDS = 40


class AckBeforeStore(TrajectoryReceiver):
    def _receive_delivery(self, identity: bytes, message: Any, frames: Any) -> None:
        super()._receive_delivery(identity, message, frames)
        for item in message.items:
            if item.trajectory_id in self._intake._unanswered:
                self._send_message(identity, Ack([item.trajectory_id]))


class NoDedupe(TrajectoryLedger):
    """Knows the groups that are over, and no trajectory."""

    def __contains__(self, key: tuple[int, str]) -> bool:
        return self.is_group_consumed(key[0])


class MemoryIgnored(MemoryBudget):
    """Takes whatever arrives."""

    def _fits_in_memory(self, nbytes: int) -> bool:
        return True


class Boundless(TrajectoryReceiver):
    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._memory.__class__ = MemoryIgnored


class HeldForEver(TrajectoryReceiver):
    """What a consumed group holds is not released."""

    def forget_group(self, group_index: int) -> None:
        self.ledger.forget_group(group_index)
        self._memory.advance_window(self.ledger.oldest_group)
        self._announce_soon()


def test_without_faults_everything_arrives_once_and_only_what_was_turned_away_is_sent_twice():
    done = Delivery(0).run(faults=0)
    assert not done.violations
    assert len(done.trained) == GROUPS
    assert done.delivered == GROUPS * SAMPLES + done.messages["Reject"]


@pytest.mark.long
@pytest.mark.parametrize("seed", range(SEEDS))
def test_through_faults_every_trajectory_arrives_once_and_memory_is_conserved(seed):
    done = Delivery(seed).run()
    assert not done.violations, "\n".join([f"seed {seed}", *done.faults, *done.violations])
    assert sorted(name for group in done.trained for name in group) == sorted(done.work)
    assert all(len(group) == SAMPLES for group in done.trained)


@pytest.mark.parametrize(
    ("mutant", "violation"),
    [
        ({"receiver": AckBeforeStore}, "is acknowledged, and not on the disk"),
        ({"ledger": NoDedupe}, "was taken twice"),
        ({"receiver": Boundless}, "bytes are held, more than"),
        ({"receiver": HeldForEver}, "holds memory, and is not here"),
    ],
    ids=["ack before store", "no dedupe", "memory ignored", "held for ever"],
)
def test_planted_faults_are_found(mutant, violation):
    assert any(
        violation in found for seed in range(MUTANT_SEEDS) for found in Delivery(seed, **mutant).run().violations
    )
