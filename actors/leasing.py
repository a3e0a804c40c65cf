"""Both ends of leasing: how a generator requests leases, and how the conductor answers.

A generator makes one kind of call, which is its heartbeat, its statistics, the ends of its episodes
and its request for leases in one. A call that finds nothing to lease waits at the conductor, and
the generator that waits longest is served first. The cost of a call does not grow with the fleet.
"""

from __future__ import annotations

import msgspec

from r3async.schedule.run_ahead import GroupLease
from r3async.schedule.task_failures import EpisodeEnd

HEARTBEAT_SECONDS = 5.0
"""Maximum seconds between two calls of one generator in a small fleet: a generator that is silent
is taken for lost."""
FLEET_HEARTBEATS_PER_SECOND = 64
"""Heartbeats per second of all generators of a large fleet together."""
MAX_EVENTS_PER_CALL = 256
"""Maximum number of events that one call reports."""
FLEET_CALLS_PER_SECOND = 400
"""Maximum calls per second of all generators together. Each takes the conductor about a
millisecond, most of it in Ray."""


class LeaseCall(msgspec.Struct, frozen=True, array_like=True):
    """A generator's call to the conductor.

    Attributes:
        process: Pid and host of the generator.
        free: Number of episodes that it could start now.
        stats: Statistics of the engine, and how many episodes the generator is `playing`, of
            at most `limit`.
        ended: Ends of episodes since the last call.
        wait: Seconds that the call may wait for leases.
        told: Lines of its event log, if its host does not see the run's directory.
    """

    generator_id: str
    process: tuple[int, str]
    free: int
    stats: dict[str, float]
    ended: list[EpisodeEnd] = []
    wait: float = 0.0
    told: list[bytes] = []


class LeaseAnswer(msgspec.Struct, frozen=True, array_like=True):
    """The conductor's answer to a `LeaseCall`.

    Attributes:
        leases: Groups, or parts of groups, to play.
        more: False if nothing will be left to lease, ever, or to this process: another process has
            taken its place, or it has to leave.
        fleet: Number of generators; 0 if the answer does not say it.
    """

    leases: list[GroupLease]
    more: bool
    fleet: int = 0
