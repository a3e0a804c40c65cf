"""The actors of a learner's ranks: how they are started and called."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from r3async.actors.rank_actor import RankActor
from r3async.actors.run_placements import rank_placement
from r3async.config import Config, config_to_dict
from r3async.learner import LearnerError
from r3async.world import ActorLostError, ActorOptions, ActorRef, Actors, World
from r3async.world.disk_retries import is_disk_error

R = TypeVar("R")


LOSS_NOTICE_SECONDS = 10.0
"""Seconds to wait, after a rank has lost a connection, for the news that the process at its
other end has ended. A rank notices a broken connection at once; the end of a process is
known a little later."""
COLLECTIVE_ERRORS = (
    "gloo",
    "NCCL",
    "Connection closed by peer",
    "Connection reset by peer",
    "Broken pipe",
)
"""Words by which an error of a collective operation shows that another rank did not take part: it
contains one of them."""


class RankLost(LearnerError, ActorLostError):
    """The process of a rank was lost, or stopped answering, and with it what all
    ranks had in memory."""


class RankCalls:
    """The calls on the ranks' actors. A rank that fails leaves the others waiting for it in a
    collective operation, so the first failure ends all of them. It is raised as `LearnerError`, or
    as `RankLost` if restarted ranks may do better."""

    def __init__(self, actors: Actors, ranks: Sequence[ActorRef]):
        self._actors = actors
        self.ranks = ranks

    def begin_call(self, rank: int, method: str, *args: Any, lane: str = "", **kwargs: Any) -> Any:
        """Begin a call of a method on the actor of `rank`. Returns a reference for `wait_all`."""
        return self._actors.begin_call(
            self.ranks[rank], method, *args, concurrency_group=lane, **kwargs
        )

    def call_all(
        self,
        method: str,
        *args: Any,
        lane: str = "",
        timeout: float | None = None,
        independent: bool = False,
        **kwargs: Any,
    ) -> list[Any]:
        """Call a method of the actor of every rank, and return all results; see `wait_all`."""
        calls = [
            self.begin_call(rank, method, *args, lane=lane, **kwargs)
            for rank in range(len(self.ranks))
        ]
        return self.wait_all(calls, timeout, independent=independent)

    def begin_local_rank(
        self, rank: int, method: Callable[..., object], *args: Any, lane: str = "", **kwargs: Any
    ) -> Any:
        """Begin a call of a method of `LocalRank` on `rank`. The method travels by its name."""
        return self.begin_call(rank, "call_method", method.__name__, *args, lane=lane, **kwargs)

    def call_local_ranks(
        self,
        method: Callable[..., R],
        *args: Any,
        lane: str = "",
        timeout: float | None = None,
        independent: bool = False,
    ) -> list[R]:
        """Call a method of `LocalRank` on every rank, and return all results; see `wait_all`."""
        begun = [
            self.begin_local_rank(rank, method, *args, lane=lane) for rank in range(len(self.ranks))
        ]
        return self.wait_all(begun, timeout, independent=independent)

    def wait_all(
        self, calls: Sequence[Any], timeout: float | None = None, *, independent: bool = False
    ) -> list[Any]:
        """Wait for all calls and return their results. The first call is that of rank 0, and so on.

        Args:
            timeout: Seconds after which ranks that have not answered count as lost.
            independent: The calls need no other rank. So one that fails ends nothing, and its error
                is raised when all have ended; an `OSError` if its disk did not take something.
        """
        waiting = list(calls)
        failed = list[Exception]()
        while waiting:
            ready, waiting = self._actors.wait_for_call(waiting, timeout)
            if not ready:
                self.kill_ranks()
                raise RankLost(
                    f"{len(waiting)} ranks of the learner did not answer within {timeout:.0f} s"
                )
            for call in ready:
                try:
                    self._actors.get(call)
                except Exception as error:
                    if independent and is_disk_error(error):
                        failed.append(error)
                        continue
                    cause = self._find_cause(
                        calls.index(call), error, {calls.index(other): other for other in waiting}
                    )
                    if not independent or isinstance(cause, RankLost):
                        self.kill_ranks()
                        raise cause from error
                    failed.append(cause)
        if failed:
            raise failed[0]
        return [self._actors.get(call) for call in calls]

    def _find_cause(self, rank: int, error: Exception, waiting: dict[int, Any]) -> LearnerError:
        """Return the cause of the failure of `rank`: if it only lost its connection to another
        rank, the loss of that one, which is among those still `waiting`."""
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
        """Return a reference to `value`, which can be passed to many calls."""
        return self._actors.put(value)

    def kill_ranks(self) -> None:
        """End the ranks' processes."""
        for rank in self.ranks:
            self._actors.kill_actor(rank)


@dataclass(frozen=True, eq=False)
class RankProcesses:
    """One start of the ranks. `processes` has the process id and host of each."""

    calls: RankCalls
    vocab_size: int
    processes: Sequence[tuple[int, str]]

    @property
    def ranks_by_host(self) -> list[list[int]]:
        """The ranks of each host, those of the first rank's host first."""
        by_host: dict[str, list[int]] = {}
        for rank, (_, host) in enumerate(self.processes):
            by_host.setdefault(host, []).append(rank)
        return list(by_host.values())

    @property
    def is_one_host(self) -> bool:
        return len(self.ranks_by_host) == 1


def start_ranks(
    actor_class: type[RankActor],
    config: Config,
    model_path: Path,
    run_dir: Path,
    placements: Sequence[ActorOptions],
    world: World,
) -> RankProcesses:
    """Start the ranks at `placements`, or all of them beside this process. They meet and load the
    model. Blocking. Raises `LearnerError`."""
    learner = config.learner
    plain = config_to_dict(config)
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
        for rank, place in enumerate(
            placements or [rank_placement(config)] * learner.parallel.world_size
        )
    ]
    calls = RankCalls(world.actors, actors)
    limit = config.supervise.limits.start
    processes = calls.call_all("describe_process", timeout=limit)
    alone = len({host for _, host in processes}) == 1
    ((address, port),) = calls.wait_all([calls.begin_call(0, "open_store", alone)], limit)
    loaded = calls.call_all("load_model", address, port, alone, timeout=limit)
    return RankProcesses(calls, loaded[0], processes)
