"""The seam: everything by which the system touches the outside, as protocols that are handed in.

A process has one `World`: its clock, its threads, the files of its host, message sockets, the actors that it calls, and what it
knows of processes. There are two implementations: the real one (`r3async.world.real.REAL_WORLD`: Ray, ZeroMQ, the disk), and the
simulated one (`r3async.world.simulated`: one process, one event loop in virtual time, one seed). Conductor, fleet, watch, saver,
learner, generator, sender, receiver, spool, checkpoint directory and the run's supervision are the same classes in both.

Tasks, events, `asyncio.sleep`, `asyncio.timeout` and `asyncio.wait` need no protocol: they belong to the running event loop,
which the world provides. Everything else goes through here. A lint rule forbids the direct calls.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any, ParamSpec, Protocol, TypeVar

from r3async.world.actors import ActorLostError as ActorLostError
from r3async.world.actors import ActorOptions as ActorOptions
from r3async.world.actors import ActorRef as ActorRef
from r3async.world.actors import Actors as Actors
from r3async.world.actors import ClusterNode as ClusterNode
from r3async.world.actors import InsufficientResourcesError as InsufficientResourcesError
from r3async.world.actors import Reservation as Reservation
from r3async.world.actors import ResourceBundle as ResourceBundle

if TYPE_CHECKING:
    from r3async.world.appending import RecordFlusher
    from r3async.world.disk import FileStat

P = ParamSpec("P")
R = TypeVar("R")

Buffer = bytes | bytearray | memoryview


# -- time --------------------------------------------------------------------------------------------------------------


class Clock(Protocol):
    """Two clocks, in seconds. Durations and deadlines are measured with `monotonic`; records carry `time`, which may step."""

    def monotonic(self) -> float:
        """Seconds that only go forward, from an unknown beginning."""
        ...

    def time(self) -> float:
        """Seconds since 1970."""
        ...


# -- threads -----------------------------------------------------------------------------------------------------------


class WorkerThread(Protocol):
    """One background thread: what it is given runs in order, one call at a time."""

    async def run(self, function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """What `function` returns or raises. Cancelled before its turn, it is not called."""
        ...

    async def close(self) -> None:
        """Wait for the call that runs; those that wait are not made. Idempotent."""
        ...


class Threads(Protocol):
    """Blocking work, kept off the event loop."""

    async def run(self, function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """In some thread."""
        ...

    def new_worker(self, name: str) -> WorkerThread:
        """A thread of its own, always the same one."""
        ...

    def repeat_until_done(self, name: str, seconds: float, function: Callable[[], bool]) -> None:
        """Call `function` every `seconds` beside everything else, first after `seconds`, until it returns True. Returns at
        once. Needs no event loop: any thread may call it."""
        ...

    def new_lock(self) -> AbstractContextManager[Any]:
        """A new lock, which one thread holds at a time: for short work that does not wait for another thread."""
        ...


# -- files -------------------------------------------------------------------------------------------------------------


class File(Protocol):
    """An open file. Every method may raise `OSError`."""

    def size(self) -> int: ...

    def read(self, start: int = 0, length: int | None = None) -> bytes:
        """Bytes from `start` on; fewer than `length` only at the end."""
        ...

    def map_bytes(self, start: int = 0, length: int | None = None) -> memoryview:
        """The same, read-only and without a copy where possible. Stays readable when the file is closed or removed."""
        ...

    def append(self, buffers: Sequence[Buffer]) -> int:
        """Write the pieces at the end. Returns how many bytes that are; after an error, some of them may be there."""
        ...

    def truncate(self, size: int) -> None: ...

    def fsync(self) -> None:
        """Its content, and its length, survive a power failure when this returns. Its name does after `fsync_directory`."""
        ...

    def lock(self, *, shared: bool = False, timeout: float = 0.0) -> None:
        """`flock`. Raises `BlockingIOError` if another open file holds it, and does for `timeout` seconds. The end of the process
        releases it."""
        ...

    def unlock(self) -> None: ...

    def close(self) -> None:
        """Idempotent."""
        ...

    def __enter__(self) -> File: ...

    def __exit__(self, *exc: object) -> None: ...


class Files(Protocol):
    """The file systems of this host. Every method may raise `OSError`. What is not synced may be lost with the machine."""

    def open(self, path: Path, *, create: bool = False, exclusive: bool = False, mode: int = 0o644) -> File:
        """For reading and appending; `create` makes the file if it lacks, `exclusive` refuses one that exists. Without
        either, for reading only."""
        ...

    def stat(self, path: Path) -> FileStat | None:
        """None if nothing has that name."""
        ...

    def list_names(self, directory: Path) -> list[str]:
        """Names in it, sorted; none if it is not there."""
        ...

    def create_directory(self, directory: Path, mode: int = 0o777) -> None:
        """One new directory. Raises `FileExistsError`."""
        ...

    def make_private_directory(self, directory: Path) -> None:
        """Make `directory` for this user alone (0700), or see that it is his, and that nobody else writes there. Raises
        `PermissionError`."""
        ...

    def rename(self, path: Path, new_path: Path) -> None:
        """Atomic. A file that has the name `new_path` is replaced; a directory must not."""
        ...

    def remove(self, path: Path) -> None:
        """A file, or an empty directory. Nothing happens if nothing has that name."""
        ...

    def remove_tree(self, path: Path) -> None:
        """Whatever has that name, and everything in it. Nothing happens if nothing has it."""
        ...

    def fsync_directory(self, directory: Path) -> None:
        """Names made, renamed or removed in it survive a power failure when this returns."""
        ...

    def free_bytes(self, path: Path) -> int:
        """Bytes that this user may still write on the disk of `path`."""
        ...

    def total_bytes(self, path: Path) -> int:
        """Bytes that the whole disk of `path` can hold."""
        ...


# -- message sockets ---------------------------------------------------------------------------------------------------

MAX_FRAME = 128 * 2**10
"""Bytes. A peer that sends a larger one is disconnected: a stranger can have this much taken, and no more."""
TURN_SECONDS = 0.0005
"""How long one socket, or one kind of work, may keep the event loop before others have their turn."""


class ReceivedFrame(Protocol):
    """A part of a message that has come. It has a length, and is a buffer itself."""

    @property
    def buffer(self) -> memoryview: ...

    @property
    def bytes(self) -> bytes: ...


MessageHandler = Callable[[list[Any]], None]
"""Called on the event loop with the `ReceivedFrame`s of a message; a router's first one names the peer."""


class MessageSocket(Protocol):
    """A socket that the running event loop serves."""

    endpoint: str
    """Of a router that is bound: where dealers reach it. Of a dealer: where it connects to."""
    denial_reason: str
    """Of a dealer: why the router does not let it in, once that is certain; else "". """

    def send(self, frames: Sequence[Buffer]) -> int:
        """Without waiting. Returns 0, or the errno of what prevented it: `EHOSTUNREACH` if a router does not know the peer that
        its first frame names."""
        ...

    def receive_pending(self, seconds: float = ...) -> None:
        """Handle what has come, for `seconds` seconds or a little more."""
        ...

    def close(self) -> None:
        """Idempotent; what is on its way may be lost."""
        ...


class Sockets(Protocol):
    """The sockets of a sender or receiver. Between two sockets, messages arrive whole and in order, or not at all."""

    def bind_router(
        self, address: str, on_message: MessageHandler, *, keys: Any, refused_peers: Counter[str]
    ) -> MessageSocket:
        """Bound at `address`, on a free port if it names none. `refused_peers` counts peers without a known key, by reason
        (`REFUSED_NO_KEY` …). Raises `OSError` with what prevented it."""
        ...

    def connect_dealer(self, endpoint: str, identity: bytes, on_message: MessageHandler, *, keys: Any) -> MessageSocket:
        """Connects, and connects again whenever the connection is lost. Raises `OSError` for an endpoint that is none."""
        ...

    async def close(self) -> None:
        """All sockets are closed, and their addresses free, when this returns. Idempotent."""
        ...


# -- processes ---------------------------------------------------------------------------------------------------------


class MetricsServer(Protocol):
    """Where a process serves its figures: what `read_metrics()` returns whenever they are asked for, in a thread."""

    read_metrics: Callable[[], Mapping[str, Any]]


class Processes(Protocol):
    """This process, and those of actors."""

    @property
    def pid(self) -> int: ...

    @property
    def host(self) -> str: ...

    def redirect_output(self, log_path: Path) -> None:
        """Send what this process, and its children, print to `log_path`; a signal has it write its stacks there."""
        ...

    def serve_metrics(self, open_endpoint: Callable[[], MetricsServer | None]) -> None:
        """Serve this process's memory and CPU time from now on, where `open_endpoint` opens an endpoint. A simulated process
        serves nothing."""
        ...

    def add_metrics_source(self, read_metrics: Callable[[], Mapping[str, Any]]) -> None:
        """Where this process serves its figures, also those that `read_metrics()` returns."""
        ...

    def measure_event_loop(self, on_lag: Callable[[float, float], None]) -> Callable[[], None]:
        """Until what is returned is called, account for the running event loop's time by stage (`stages.py`), and `on_lag` many
        times a second how many seconds late a sleeping task wakes up, and how many of these, at most, the loop's thread computed;
        in the others it waited for a core, or in a call that blocks. A simulated loop is never late."""
        ...

    def stage_seconds(self) -> tuple[dict[str, float], dict[str, float]]:
        """By stage: this process's processor time, and the loop's wall time since `measure_event_loop`. None of a simulated
        one."""
        ...

    def cpu_seconds(self, other_pids: Sequence[int] = ()) -> float:
        """Processor time of this process so far, and of `other_pids` here, by pid. A simulated one computes nothing."""
        ...

    def dump_stacks(self, path: Path, reason: str) -> Path:
        """Append what every thread and task of this process is doing to `path`."""
        ...

    def request_stack_dump(self, pid: int, host: str) -> bool:
        """Have an actor's process write what its threads do to its log. False if it is on another host, or not there."""
        ...

    def is_alive(self, pid: int, host: str) -> bool:
        """Whether an actor's process is there. False if it is on another host."""
        ...

    def kill_process(self, pid: int, host: str) -> bool:
        """End an actor's process at once, also a stopped one. False if it is on another host, or not there."""
        ...


# -- all of it ---------------------------------------------------------------------------------------------------------


class World(Protocol):
    """Everything outside one process."""

    @property
    def clock(self) -> Clock: ...

    @property
    def threads(self) -> Threads: ...

    @property
    def files(self) -> Files: ...

    @property
    def actors(self) -> Actors: ...

    @property
    def processes(self) -> Processes: ...

    @property
    def record_flusher(self) -> RecordFlusher:
        """Of the records of this process that the disk does not take yet."""
        ...

    def open_sockets(self) -> Sockets:
        """New sockets, which are closed together."""
        ...

    def unique_id(self) -> str:
        """32 hexadecimal digits that nobody had before."""
        ...
