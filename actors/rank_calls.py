"""The actors of a learner's ranks: how they are started, and called."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from r3async.actors.places import rank_placement
from r3async.actors.ranks import RankActor
from r3async.config import Config, config_to_dict
from r3async.learner import LearnerError
from r3async.world import ActorLostError, ActorOptions, ActorRef, Actors, World
from r3async.world.disk_waits import is_disk_error

LOSS_NOTICE_SECONDS = 10.0
"""A rank whose connection broke learns of it at once; that the process at its other end has ended is known a little later."""
COLLECTIVE_ERRORS = ("gloo", "NCCL", "Connection closed by peer", "Connection reset by peer", "Broken pipe")
"""What a collective operation raises if another rank does not take part in it contains one of these."""


class RankLost(LearnerError, ActorLostError):
    """The process of a rank was lost, or stopped answering, and with it what all ranks had in memory."""


class RankCalls:
    """Calls on the ranks' actors. A rank that fails leaves the others waiting for it in a collective operation: the first failure
    ends all of them and is raised as `LearnerError`; as `RankLost` where ranks that are started again may do better."""

    def __init__(self, actors: Actors, ranks: Sequence[ActorRef]):
        self._actors, self.ranks = actors, ranks

    def begin_call(self, rank: int, method: str, *args: Any, lane: str = "", **kwargs: Any) -> Any:
        """Begin a method of the actor of `rank`."""
        return self._actors.begin_call(self.ranks[rank], method, *args, concurrency_group=lane, **kwargs)

    def call_all(
        self,
        method: str,
        *args: Any,
        lane: str = "",
        timeout: float | None = None,
        independent: bool = False,
        **kwargs: Any,
    ) -> list[Any]:
        """What the actors' method returns, on every rank."""
        calls = [self.begin_call(rank, method, *args, lane=lane, **kwargs) for rank in range(len(self.ranks))]
        return self.wait_all(calls, timeout, independent=independent)

    def wait_all(self, calls: Sequence[Any], timeout: float | None = None, *, independent: bool = False) -> list[Any]:
        """What the calls return; the first is of rank 0, and so on. `independent`: they need no other rank, so one that fails
        ends nothing, and what it failed with is raised when all have ended; where its disk did not take something, as
        `OSError`."""
        waiting, failed = list(calls), list[Exception]()
        while waiting:
            ready, waiting = self._actors.wait_for_call(waiting, timeout)
            if not ready:
                self.kill_ranks()
                raise RankLost(f"{len(waiting)} ranks of the learner did not answer within {timeout:.0f} s")
            for call in ready:
                try:
                    self._actors.get(call)
                except Exception as error:
                    if independent and is_disk_error(error):
                        failed.append(error)
                        continue
                    cause = self._find_cause(calls.index(call), error, {calls.index(other): other for other in waiting})
                    if not independent or isinstance(cause, RankLost):
                        self.kill_ranks()
                        raise cause from error
                    failed.append(cause)
        if failed:
            raise failed[0]
        return [self._actors.get(call) for call in calls]

    def _find_cause(self, rank: int, error: Exception, waiting: dict[int, Any]) -> LearnerError:
        """Of the failure of `rank`: if that only lost its connection to another one, which of those still `waiting` was lost."""
        if not isinstance(error, ActorLostError):
            if not any(words in str(error) for words in COLLECTIVE_ERRORS):
                return LearnerError(f"rank {rank} of the learner failed: {error}")
            while waiting:
                ready, _ = self._actors.wait_for_call(list(waiting.values()), LOSS_NOTICE_SECONDS)
                if not ready:
                    break
                for other in [r for r, call in waiting.items() if call in ready]:
                    try:
                        self._actors.get(waiting.pop(other))
                    except ActorLostError as lost:
                        return RankLost(f"rank {other} of the learner was lost: {lost}")
                    except Exception:  # it lost its connection, too
                        continue
            return RankLost(f"rank {rank} of the learner waited in vain for another one: {error}")
        return RankLost(f"rank {rank} of the learner was lost: {error}")

    def put_shared(self, value: Any) -> Any:
        """A reference to `value`, which many calls may be given."""
        return self._actors.put(value)

    def kill_ranks(self) -> None:
        """End the ranks' processes."""
        for rank in self.ranks:
            self._actors.kill_actor(rank)


@dataclass(frozen=True, eq=False)
class RankProcesses:
    """One start of the ranks. `processes`: id and host of each."""

    calls: RankCalls
    vocab_size: int
    processes: Sequence[tuple[int, str]]

    @property
    def is_one_host(self) -> bool:
        return len({host for _, host in self.processes}) == 1


def start_ranks(
    actor_class: type[RankActor],
    config: Config,
    model_path: Path,
    run_dir: Path,
    placements: Sequence[ActorOptions],
    world: World,
) -> RankProcesses:
    """At these `placements`, or all beside this process; they meet and load the model. Blocking. Raises `LearnerError`."""
    learner, plain = config.learner, config_to_dict(config)
    actors = [
        world.actors.spawn_actor(
            actor_class,
            rank,
            plain,
            str(model_path),
            str(run_dir),
            name=f"learner-rank-{rank}",
            actor_options=place,
        )
        for rank, place in enumerate(placements or [rank_placement(config)] * learner.parallel.world_size)
    ]
    calls = RankCalls(world.actors, actors)
    processes = calls.call_all("describe_process", timeout=learner.start_timeout)
    alone = len({host for _, host in processes}) == 1
    ((address, port),) = calls.wait_all([calls.begin_call(0, "open_store", alone)], learner.start_timeout)
    loaded = calls.call_all("load_model", address, port, alone, timeout=learner.start_timeout)
    return RankProcesses(calls, loaded[0], processes)
