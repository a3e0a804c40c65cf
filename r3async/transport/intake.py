"""What happens to a trajectory between its arrival and its answer: decoded, validated, stored, handed over. And what was accepted
already, so that a redelivery is harmless, and how much of it is held.
"""

from __future__ import annotations

import asyncio
import logging
import math
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol

from r3async.data.records import Trajectory
from r3async.data.window import Consumed
from r3async.transport.codec import Frame, WireError
from r3async.transport.sockets import OFFLOAD_BYTES, Validate, off_loop
from r3async.transport.wire import Item, NotAcceptable, decode_trajectory, decoded_bytes, frames_of
from r3async.world import TURN_SECONDS, World
from r3async.world.real import REAL

logger = logging.getLogger(__name__)

TOKEN_BYTES = 16
"""Of columns, at the least: what a token weighs when it is decided where to work on it."""
TOGETHER = 16
"""Trajectories that are opened and validated in one go, at most."""


class Refuse(ValueError):
    """Raised by `admit`: this trajectory will never be taken. The message is the reason that its sender is given."""


class Opened(NamedTuple):
    """What arrived, and its bytes in memory."""

    trajectory: Trajectory
    nbytes: int


class Outcome(NamedTuple):
    """`over`: its episode is, so it is a duplicate. `refused`: what it says is not accepted. `damaged`: it is not what a sender
    makes, so it changed on its way."""

    kind: Literal["taken", "over", "refused", "damaged"]
    reason: str = ""


class Kept(Protocol):
    """A trajectory that is on disk, and takes `nbytes` of memory."""

    @property
    def trajectory(self) -> Trajectory: ...
    @property
    def nbytes(self) -> int: ...


class Store(Protocol):
    """What makes trajectories durable (`r3async.schedule.spool.Spool`)."""

    memory_bytes: int

    @property
    def free_bytes(self) -> int: ...
    def note_waiting(self, waiting: bool) -> None: ...
    async def recover(self) -> Sequence[Kept]: ...
    async def put(self, trajectory: Trajectory, frames: Sequence[Frame], *, spill: bool) -> Kept | None: ...
    async def commit(self, groups: Iterable[int]) -> int: ...
    async def remove(self, refused: Mapping[tuple[int, str], str]) -> int: ...


@dataclass(slots=True)
class Arrival:
    """A trajectory that arrived and was not answered yet. `senders`: the first one's is judged. `frames`: in pieces, until they
    are `join`ed."""

    senders: list[bytes]
    item: Item
    frames: Sequence[Frame]

    @property
    def trajectory_id(self) -> str:
        return self.item.trajectory_id

    @property
    def nbytes(self) -> int:
        """What it takes in memory, as its sender says."""
        return self.item.nbytes

    @property
    def wire_bytes(self) -> int:
        return sum(map(len, self.frames))

    def join(self) -> None:
        """Off the event loop: this may copy. Raises `WireError`."""
        self.frames = frames_of(self.item, self.frames)


class Intake:
    """Takes in one trajectory after the other, small ones a few at a time, so that answers come in the order of deliveries.

    `answer(arrival, outcome)` is called on the event loop when all is done.
    """

    def __init__(
        self,
        ledger: Ledger,
        capacity: Capacity,
        on_trajectory: Callable[[Trajectory, int], None],
        validate: Validate | None,
        admit: Callable[[Trajectory], bool] | None,
        store: Store | None,
        answer: Callable[[Arrival, Outcome], None],
        world: World = REAL,
    ):
        self._ledger, self._capacity = ledger, capacity
        self._on_trajectory, self._validate, self._admit, self._store = on_trajectory, validate, admit, store
        self._answer = answer
        self._clock, self._threads = world.clock.monotonic, world.threads
        self.nbytes = 0
        """Of those that arrived and are not answered yet."""
        self._in_hand: dict[str, Arrival] = {}
        self._inbox: asyncio.Queue[Arrival] = asyncio.Queue()

    def also_from(self, identity: bytes, trajectory_id: str) -> bool:
        """Whether this one is in hand: then its sender will be answered with the first."""
        arrival = self._in_hand.get(trajectory_id)
        if arrival is not None and identity not in arrival.senders:
            arrival.senders.append(identity)
        return arrival is not None

    def __len__(self) -> int:
        """How many arrived, and are not answered yet."""
        return len(self._in_hand)

    def of(self, identity: bytes) -> list[str]:
        """What is in hand of one sender."""
        return [p.trajectory_id for p in self._in_hand.values() if identity in p.senders]

    def add(self, arrival: Arrival) -> None:
        self._in_hand[arrival.trajectory_id] = arrival
        self.nbytes += arrival.nbytes
        self._inbox.put_nowait(arrival)

    async def run(self) -> None:
        """Until it is cancelled. What is in hand then was not answered."""
        turn = self._clock()
        while True:
            if self._inbox.empty() or self._clock() - turn > TURN_SECONDS:
                await asyncio.sleep(0)
                turn = self._clock()
            arrivals = self._next(await self._inbox.get())
            nbytes = sum(arrival.nbytes for arrival in arrivals)
            opened = await off_loop(self._threads, nbytes, self._open, arrivals)
            for arrival, found in zip(arrivals, opened, strict=True):
                try:
                    outcome = await self._take_in(arrival, found)
                finally:
                    del self._in_hand[arrival.trajectory_id]
                    self.nbytes -= arrival.nbytes
                try:
                    self._answer(arrival, outcome)
                except Exception:
                    logger.exception("the trajectory receiver continues after an error")

    def _next(self, arrival: Arrival) -> list[Arrival]:
        """It, and those behind it that are opened with it: small ones, which cost less together."""
        arrivals, nbytes = [arrival], arrival.nbytes
        while nbytes < OFFLOAD_BYTES and len(arrivals) < TOGETHER and not self._inbox.empty():
            arrivals.append(self._inbox.get_nowait())
            nbytes += arrivals[-1].nbytes
        return arrivals

    async def recover(self, store: Store) -> tuple[int, int]:
        """What was accepted and not trained is handed over again; what the ledger knows besides was never kept, and what
        is over, or not accepted any more, is removed from the store. Returns how many there were, and how many of them are
        not taken any more."""
        self._ledger.forget_live()
        over, count = set(), 0
        refused: dict[tuple[int, str], str] = {}
        for kept in await store.recover():
            trajectory = kept.trajectory
            group_index, trajectory_id = trajectory.group_index, trajectory.trajectory_id
            if self._ledger.is_forgotten(group_index):
                over.add(group_index)
                continue
            count += 1
            try:
                wrong = await off_loop(self._threads, trajectory.tokens * TOKEN_BYTES, self._check, [trajectory])
                for error in wrong.values():
                    raise error
                if not self._admits(trajectory):
                    raise Refuse("its episode is here already")
                self._hand_over(trajectory, kept.nbytes)
            except Exception as error:
                refused[group_index, trajectory_id] = str(error) or type(error).__name__
                logger.warning("trajectory %r was kept, but is not taken again: %s", trajectory_id, error)
        await store.commit(over)
        await store.remove(refused)
        return count, len(refused)

    async def _take_in(self, arrival: Arrival, opened: Opened | Exception) -> Outcome:
        """Everything that may refuse it comes before it is stored. `opened`: what it is, or why it is not."""
        stored = False
        try:
            if isinstance(opened, Exception):
                raise opened
            trajectory, nbytes = opened
            if self._ledger.is_forgotten(arrival.item.group_index) or not self._admits(trajectory):
                self._capacity.release(arrival.trajectory_id)
                return Outcome("over")
            if self._store is not None:
                spill = self._capacity.held > self._store.memory_bytes
                kept = await self._store.put(trajectory, arrival.frames, spill=spill)
                stored = True
                if kept is not None:
                    trajectory, nbytes = kept.trajectory, kept.nbytes
            if self._ledger.is_forgotten(arrival.item.group_index):  # Meanwhile.
                self._capacity.release(arrival.trajectory_id)
                return Outcome("over")
            self._hand_over(trajectory, nbytes)
        except Exception as error:
            self._capacity.release(arrival.trajectory_id)
            if isinstance(error, WireError | Refuse) and not stored:
                again = isinstance(error, WireError) and not isinstance(error, NotAcceptable)
                return Outcome("damaged" if again else "refused", str(error) or type(error).__name__)
            logger.exception("trajectory %r was not taken", arrival.trajectory_id)
            reason = f"the learner failed to take it: {type(error).__name__}: {error}"
            if stored and self._store is not None:  # a defect; it must not be met again at every start
                await self._store.remove({(arrival.item.group_index, arrival.trajectory_id): reason})
            return Outcome("refused", reason)
        return Outcome("taken")

    def _open(self, arrivals: Sequence[Arrival]) -> list[Opened | Exception]:
        """Decode and validate: the work that is proportional to the payload. What is wrong with one is no other's matter."""
        opened: list[Opened | Exception] = []
        for arrival in arrivals:
            try:
                opened.append(self._decoded(arrival))
            except Exception as error:
                opened.append(error)
        good = [(at, found) for at, found in enumerate(opened) if isinstance(found, Opened)]
        for which, refusal in self._check([found.trajectory for _, found in good]).items():
            opened[good[which][0]] = refusal
        return opened

    def _decoded(self, arrival: Arrival) -> Opened:
        """Raises `WireError`."""
        arrival.join()
        trajectory = decode_trajectory(arrival.frames)
        if (trajectory.trajectory_id, trajectory.group_index) != (arrival.trajectory_id, arrival.item.group_index):
            raise WireError(f"the payload is trajectory {trajectory.trajectory_id!r} of {trajectory.group_index}")
        nbytes = decoded_bytes(arrival.frames, trajectory)
        if nbytes > arrival.nbytes:
            raise WireError(f"it takes {nbytes} bytes, and {arrival.nbytes} were announced")
        return Opened(trajectory, nbytes)

    def _check(self, trajectories: Sequence[Trajectory]) -> dict[int, Exception]:
        """By their place: what is wrong with those that are not taken, or what `validate` failed with when it was given them
        alone."""
        if self._validate is None or not trajectories:
            return {}
        try:
            return {at: Refuse(reason) for at, reason in self._validate(trajectories).items()}
        except Exception as error:
            if len(trajectories) == 1:
                return {0: error}
        return {at: error for at, t in enumerate(trajectories) for error in self._check([t]).values()}

    def _admits(self, trajectory: Trajectory) -> bool:
        return self._admit is None or self._admit(trajectory)

    def _hand_over(self, trajectory: Trajectory, nbytes: int) -> None:
        """Raises what `on_trajectory` raises, and then nothing is held."""
        group_index, trajectory_id = trajectory.group_index, trajectory.trajectory_id
        self._capacity.hold(trajectory_id, nbytes)
        # Before the call, so that it may forget the group that this trajectory completes.
        self._ledger.add(group_index, trajectory_id)
        try:
            self._on_trajectory(trajectory, nbytes)
        except Exception:
            self._ledger.discard(group_index, trajectory_id)
            self._capacity.release(trajectory_id)
            raise


class Ledger:
    """Ids of accepted trajectories, by group that is not over.

    `over`: the groups that are over. Whoever consumes groups shares his with the ledger; else it has one of its own, in which
    groups may end in any order.
    """

    def __init__(self, over: Consumed | None = None) -> None:
        self._over = Consumed(window=sys.maxsize) if over is None else over
        self._live: dict[int, set[str]] = {}

    def __contains__(self, key: tuple[int, str]) -> bool:
        """`(group_index, trajectory_id)` was accepted, or its group is over."""
        group_index, trajectory_id = key
        return self.is_forgotten(group_index) or trajectory_id in self._live.get(group_index, ())

    def is_forgotten(self, group_index: int) -> bool:
        return group_index in self._over

    @property
    def oldest(self) -> int:
        """The first group that is not over."""
        return self._over.head

    def add(self, group_index: int, trajectory_id: str) -> None:
        if not self.is_forgotten(group_index):
            self._live.setdefault(group_index, set()).add(trajectory_id)

    def discard(self, group_index: int, trajectory_id: str) -> None:
        """Take back an `add`. Harmless if there was none."""
        ids = self._live.get(group_index, set())
        ids.discard(trajectory_id)
        if not ids:
            self._live.pop(group_index, None)

    def forget(self, group_index: int) -> set[str]:
        """The group is over: whatever still comes for it is a duplicate. Returns the ids it had. Idempotent."""
        if not self.is_forgotten(group_index):
            self._over.add(group_index)
        return self._live.pop(group_index, set())

    def forget_live(self) -> None:
        """Only what is over stays known: of the rest, nothing has been kept, or what was kept is added again."""
        self._live.clear()


OPEN = 2**62
"""`Capacity.until` while everything is taken: no group is behind it."""


class Capacity:
    """Bytes of trajectories that arrived and are not released.

    `oldest` is the first group that is not consumed, and the `window` groups from there on are what the next step may wait
    for. Rule: a trajectory of the window is always taken. Any other is taken if it fits into `total`, or if nothing is held.
    From the first one that does not fit until it would, senders are asked for the window only (`until`).

    * It cannot deadlock: whatever else is held, all trajectories of the window are taken, so the step gets its groups,
      consumes them, and the window moves. A trajectory waits at most until its group is in the window.
    * It is bounded: beyond `total` there are only trajectories that were taken in the window, and they leave it only by being
      consumed: `held <= max(total, largest trajectory) + bytes of the groups oldest .. oldest + window - 1`. Whatever senders
      claim, these are at most `window` times the trajectories that a group may have times the largest (see `Receiver`).
    """

    def __init__(self, total: int, window: int = 1):
        self.total = total
        self.window = window
        self.oldest = 0
        self.held = 0
        self._held: dict[str, int] = {}
        self._short: int | None = None
        """Bytes of the first trajectory that did not fit; None while everything is taken."""

    def advance(self, oldest: int) -> None:
        """Groups before `oldest` are consumed."""
        self.oldest = max(self.oldest, oldest)

    def take(self, trajectory_id: str, group_index: int, nbytes: int, disk: float = math.inf) -> bool:
        """Hold one that arrives, if the rule allows it. `disk`: bytes that are free there, where it has to go, too, unless it
        is of the window."""
        urgent = self.oldest <= group_index < self.oldest + self.window
        if not urgent and not (self._fits(nbytes) and nbytes <= disk):
            if self._short is None:
                self._short = nbytes
            return False
        self.hold(trajectory_id, nbytes)
        return True

    def until(self, disk: float = math.inf) -> int:
        """Groups before this one are taken now, however large they are; `OPEN` if it may be all of them."""
        if self._short is not None and self._fits(self._short) and self._short <= disk:
            self._short = None
        return OPEN if self._short is None else self.oldest + self.window

    def lacks_only_disk(self, disk: float) -> bool:
        """What did not fit would, if `disk` had more free bytes."""
        return self._short is not None and self._fits(self._short) and self._short > disk

    def hold(self, trajectory_id: str, nbytes: int) -> None:
        """A trajectory holds `nbytes`, and no longer what it held before."""
        self.release(trajectory_id)
        self._held[trajectory_id] = nbytes
        self.held += nbytes

    def release(self, trajectory_id: str) -> None:
        """Free what a trajectory holds. Harmless if it holds nothing."""
        self.held -= self._held.pop(trajectory_id, 0)

    def _fits(self, nbytes: int) -> bool:
        return not self.held or self.held + nbytes <= self.total
