"""The seam: every way in which the system touches the outside, as protocols whose
implementations are passed in.

A process has one `World`: its clock, its threads, the files of its host, message sockets, the
actors that it calls, and information about processes. There are two implementations: the real one
(`r3async.world.real.REAL_WORLD`: Ray, ZeroMQ, the disk), and the simulated one (`dev.simulation`:
one process, one event loop in virtual time, one seed). Conductor, fleet, watch, saver, learner,
generator, sender, receiver, spool, checkpoint directory and the run's supervision are the same
classes in both.

Tasks, events, `asyncio.sleep`, `asyncio.timeout` and `asyncio.wait` need no protocol: they belong
to the running event loop, which the world provides. Everything else goes through here. A lint rule
forbids the direct calls.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ParamSpec, Protocol, TypeVar, runtime_checkable

if TYPE_CHECKING:
    from r3async.world.appending import RecordFlusher


class EventReporter(Protocol):
    """A function that reports an event by its name, with its facts."""

    def __call__(self, event: str, /, **facts: Any) -> object: ...


def ignore_event(event: str, /, **facts: Any) -> None:
    """Discard an event; the default `EventReporter`."""


# Actors, as in every world: placement, start, calls and end. `ray_cluster.py` implements
# them for a cluster.


class ActorLostError(RuntimeError):
    """The actor's process ended, or was replaced, before it answered."""


@runtime_checkable
class ActorRef(Protocol):
    """A handle on an actor in another process. It may be sent to other actors."""

    name: str

    async def call(
        self, method: str, *args: Any, timeout: float | None = None, **kwargs: Any
    ) -> Any:
        """Return what the actor's method returns, or raise the very exception that it raises.
        Raises `ActorLostError` if its process ends first, and `TimeoutError` after `timeout`
        seconds. A caller that stops waiting does not stop the method."""
        ...


class InsufficientResourcesError(RuntimeError):
    """The resources of a reservation are in use. The message lists what is free on each host."""


@dataclass(frozen=True)
class ClusterNode:
    """A host of a cluster.

    Attributes:
        node_id: The host's key.
        name: The host's name.
        cpus: Number of CPUs, which counts processes.
        gpus: Number of GPUs.
        free_cpus: CPUs that are not reserved.
        free_gpus: GPUs that are not reserved.
        memory_bytes: Memory in bytes.
        accelerator_type: Ray's name for its kind of GPU; "" if it is not known.
        is_local: True if the calling process runs on it.
        object_store_bytes: Bytes for shared values (`Actors.put`).
    """

    node_id: str
    name: str
    cpus: float
    gpus: float
    free_cpus: float
    free_gpus: float
    memory_bytes: float = 0.0
    accelerator_type: str = ""
    is_local: bool = False
    object_store_bytes: float = 0.0


@dataclass(frozen=True)
class ResourceBundle:
    """Resources that are reserved together on one host.

    Attributes:
        cpus: Number of CPUs.
        gpus: Number of whole GPUs.
        node_id: Key of the host.
        can_move: True if the bundle may move to another host when that one is lost.
    """

    cpus: float = 0.0
    gpus: float = 0.0
    node_id: str = ""
    can_move: bool = False


class Reservation(Protocol):
    """Bundles that are reserved until `Actors.release_bundles`, or until the process that reserved
    them ends. A reservation may be sent to actors."""

    def __len__(self) -> int: ...


@dataclass(frozen=True)
class ActorOptions:
    """Resources and options of an actor.

    Attributes:
        threads: Threads of its computations; 0 if it computes nothing itself.
        gpus: Number of GPUs; may be a share of one.
        max_restarts: Times that its process is restarted automatically; -1 for ever. A
            restart whose constructor raises is followed by another one; at the first start
            that ends the actor.
        max_concurrency: Maximum number of calls at once.
        concurrency_groups: Names of further threads, for methods that are assigned to them
            (`Actors.begin_call`).
        same_node: True to place it on the node of the process that spawns it.
        reserved_bundle: A reservation, and the number of the bundle in it that the actor uses.
    """

    threads: int = 1
    gpus: float = 0.0
    max_restarts: int = 0
    max_concurrency: int | None = None
    concurrency_groups: tuple[str, ...] = ()
    same_node: bool = False
    reserved_bundle: tuple[Reservation, int] | None = None


class Actors(Protocol):
    """Starting, calling and ending of actors."""

    def join_cluster(self, address: str | None, actor_count: int) -> None:
        """Join the cluster at `address`, or the one that the environment names, or start one on
        this host with capacity for `actor_count` actors. Blocking; idempotent. Raises
        `ConnectionError` with the reason if it cannot connect."""
        ...

    def list_nodes(self) -> list[ClusterNode]:
        """Return the live hosts of the cluster, always in the same order."""
        ...

    def reserve_bundles(
        self, plan: Callable[[Sequence[ClusterNode]], Sequence[ResourceBundle]], timeout: float
    ) -> Reservation:
        """Reserve the bundles that `plan` chooses on the hosts it is given, all of them
        or none. Blocking.

        While `plan` raises `InsufficientResourcesError`, or others reserve first, it is
        called again; after `timeout` seconds that error is raised. Any other error of `plan`
        is raised at once.
        """
        ...

    def release_bundles(self, reservation: Reservation, bundle: int | None = None) -> None:
        """End what runs in the reservation: in a single `bundle`, if that one can move, or in all
        without `bundle`. Idempotent."""
        ...

    def host_address(self, interface: str = "") -> str:
        """Return the address under which the other hosts of the cluster reach this one, or the
        address of a network `interface`, if it is named. Raises `ConnectionError`, with the
        existing interfaces, if there is none of that name."""
        ...

    def spawn_actor(
        self, actor_class: type, *args: Any, name: str, actor_options: ActorOptions = ...
    ) -> ActorRef:
        """Begin to start a process that creates `actor_class(world, *args)`, where `world` is the
        process's own. Returns at once."""
        ...

    def current_actor(self) -> ActorRef:
        """Return the actor that calls this."""
        ...

    def kill_actor(self, actor: ActorRef, *, restart: bool = False) -> None:
        """End the actor's process at once; with `restart`, it is started again if its
        options allow it."""
        ...

    def put(self, value: Any) -> Any:
        """Share a value with the processes of the cluster, and return a reference, which can be
        sent. As an argument of a call it arrives as the value; within another value, as a
        reference for `get`."""
        ...

    def get(self, reference: Any, timeout: float | None = None) -> Any:
        """Return a value that was `put`, or the result of a call that was begun. Blocking. Raises
        what `ActorRef.call` raises."""
        ...

    def begin_call(
        self, actor: ActorRef, method: str, *args: Any, concurrency_group: str = "", **kwargs: Any
    ) -> Any:
        """Begin a call, for a thread without an event loop. Returns a reference for `wait_for_call`
        and `get`. `concurrency_group` is one of `ActorOptions.concurrency_groups`."""
        ...

    def wait_for_call(
        self, calls: Sequence[Any], timeout: float | None = None
    ) -> tuple[list[Any], list[Any]]:
        """Block until a call has ended. Returns the calls that have ended, and the others."""
        ...

    def leave_cluster(self) -> None:
        """Leave the cluster, and end it if `join_cluster` started it. Idempotent."""
        ...


P = ParamSpec("P")
R = TypeVar("R")

Buffer = bytes | bytearray | memoryview


# -- time ------------------------------------------------------------------------------------------


class Clock(Protocol):
    """Two clocks, in seconds. Durations and deadlines are measured with `monotonic`; records carry
    `time`, which may jump."""

    def monotonic(self) -> float:
        """Return seconds that only increase, from an unknown origin."""
        ...

    def time(self) -> float:
        """Return the seconds since 1970."""
        ...


# -- threads ---------------------------------------------------------------------------------------


class WorkerThread(Protocol):
    """One background thread, which runs its calls in order, one at a time."""

    async def run(self, function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """Return what `function` returns, or raise what it raises, in this thread. A call that is
        cancelled before its turn is not made."""
        ...

    async def close(self) -> None:
        """Wait for the running call; calls that are still waiting are not made. Idempotent."""
        ...


class Threads(Protocol):
    """Blocking work, kept off the event loop."""

    async def run(self, function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """Return what `function` returns, or raise what it raises, in any thread."""
        ...

    def new_worker(self, name: str) -> WorkerThread:
        """Return a new worker with its own thread, which never changes."""
        ...

    def repeat_until_done(self, name: str, seconds: float, function: Callable[[], bool]) -> None:
        """Call `function` every `seconds` in the background, first after `seconds`, until it
        returns True. Returns at once. Needs no event loop: any thread may call it."""
        ...

    def new_lock(self) -> AbstractContextManager[Any]:
        """Return a new lock, which one thread holds at a time: for short work that does not wait
        for another thread."""
        ...


# -- files -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class FileStat:
    """Status of a file or directory, as `Files.stat` returns it.

    Attributes:
        size: Size in bytes.
        modified: A number that orders files by when they were last written.
        is_directory: True for a directory.
        mode: Permissions.
    """

    size: int
    modified: int
    is_directory: bool
    mode: int


class File(Protocol):
    """An open file. Every method may raise `OSError`."""

    def size(self) -> int: ...

    def is_at(self, path: Path) -> bool:
        """Return whether `path` names this file. It does not any more once it is deleted,
        moved or replaced."""
        ...

    def read(self, start: int = 0, length: int | None = None) -> bytes:
        """Return the bytes from `start` on; fewer than `length` only at the end."""
        ...

    def map_bytes(self, start: int = 0, length: int | None = None) -> memoryview:
        """Return the bytes from `start` on as a read-only view, without a copy where possible. It
        stays readable when the file is closed or removed."""
        ...

    def append(self, buffers: Sequence[Buffer]) -> int:
        """Write the buffers at the end, and return the number of bytes written. After an error,
        some of them may have been written."""
        ...

    def truncate(self, size: int) -> None: ...

    def fsync(self) -> None:
        """Make the file's content and length survive a power failure. Its name needs
        `fsync_directory`."""
        ...

    def lock(self, *, shared: bool = False, timeout: float = 0.0) -> None:
        """Lock the file with `flock`. Raises `BlockingIOError` if another open file still holds the
        lock after `timeout` seconds. The end of the process releases it."""
        ...

    def unlock(self) -> None: ...

    def close(self) -> None:
        """Close the file. Idempotent."""
        ...

    def __enter__(self) -> File: ...

    def __exit__(self, *exc: object) -> None: ...


class Files(Protocol):
    """The file systems of this host. Every method may raise `OSError`. Data that are not synced may
    be lost with the machine."""

    def open(
        self, path: Path, *, create: bool = False, exclusive: bool = False, mode: int = 0o644
    ) -> File:
        """Open a file for reading, or with `create` or `exclusive` for reading and appending.

        Args:
            path: The file.
            create: Create the file if it does not exist.
            exclusive: Create the file, and refuse one that exists.
            mode: Permissions of a file that is created.
        """
        ...

    def stat(self, path: Path) -> FileStat | None:
        """Return the status of a file or directory, or None if the path does not exist."""
        ...

    def list_names(self, directory: Path) -> list[str]:
        """Return the names in a directory, sorted; none if it does not exist."""
        ...

    def create_directory(self, directory: Path, mode: int = 0o777) -> None:
        """Create one new directory. Raises `FileExistsError`."""
        ...

    def make_private_directory(self, directory: Path) -> None:
        """Create `directory` for this user alone (0700), or check that this user owns it and that
        nobody else can write there. Raises `PermissionError`."""
        ...

    def rename(self, path: Path, new_path: Path) -> None:
        """Rename a file or directory atomically. A file at `new_path` is replaced; a directory must
        not exist there."""
        ...

    def remove(self, path: Path) -> None:
        """Remove a file, or an empty directory. Does nothing if the path does not exist."""
        ...

    def remove_tree(self, path: Path) -> None:
        """Remove a file, or a directory with everything in it. Does nothing if the
        path does not exist."""
        ...

    def fsync_directory(self, directory: Path) -> None:
        """Make the names that were created, renamed or removed in a directory survive
        a power failure."""
        ...

    def free_bytes(self, path: Path) -> int:
        """Return the bytes that this user may still write on the disk of `path`."""
        ...

    def total_bytes(self, path: Path) -> int:
        """Return the bytes that the whole disk of `path` can hold."""
        ...


# -- message sockets -------------------------------------------------------------------------------

MAX_FRAME = 128 * 2**10
"""Maximum size of a frame in bytes. A peer that sends a larger one is disconnected, so this is the
most memory that a stranger can make a process use."""
TURN_SECONDS = 0.0005
"""Seconds that one socket, or one kind of work, may keep the event loop before others
have their turn."""


class ReceivedFrame(Protocol):
    """A part of a received message. It has a length, and is a buffer itself."""

    @property
    def buffer(self) -> memoryview: ...

    @property
    def bytes(self) -> bytes: ...


MessageHandler = Callable[[list[Any]], None]
"""Function that is called on the event loop with the `ReceivedFrame`s of a message. The first frame
that a router receives names the peer."""


class MessageSocket(Protocol):
    """A socket that the running event loop serves."""

    endpoint: str
    """Address at which dealers reach a bound router, or to which a dealer connects."""
    denial_reason: str
    """Reason why the router does not let this dealer in, once that is certain; else ""."""

    def send(self, frames: Sequence[Buffer]) -> int:
        """Send a message without waiting. Returns 0, or the errno of what prevented it:
        `EHOSTUNREACH` if a router does not know the peer that its first frame names."""
        ...

    def receive_pending(self, seconds: float = ...) -> None:
        """Handle received messages, for `seconds` seconds or a little more."""
        ...

    def close(self) -> None:
        """Close the socket. Idempotent; messages on their way may be lost."""
        ...


class Sockets(Protocol):
    """The sockets of a sender or receiver. Between two sockets, messages arrive whole and in
    order, or not at all."""

    def bind_router(
        self, address: str, on_message: MessageHandler, *, keys: Any, refused_peers: Counter[str]
    ) -> MessageSocket:
        """Return a router bound at `address`, on a free port if it names none. Raises `OSError`
        with what prevented it.

        Args:
            address: The address to bind to.
            on_message: Called with each message.
            keys: The router's keys, and those of the peers that may connect.
            refused_peers: Counts peers without a known key, by reason (`REFUSED_NO_KEY` …).
        """
        ...

    def connect_dealer(
        self, endpoint: str, identity: bytes, on_message: MessageHandler, *, keys: Any
    ) -> MessageSocket:
        """Return a dealer that connects, and connects again whenever the connection is lost. Raises
        `OSError` for an invalid endpoint."""
        ...

    async def close(self) -> None:
        """Close all sockets. Their addresses are free when this returns. Idempotent."""
        ...


# -- processes -------------------------------------------------------------------------------------


class MetricsServer(Protocol):
    """The endpoint at which a process serves its metrics: what `read_metrics()` returns at each
    request, in a thread."""

    read_metrics: Callable[[], Mapping[str, Any]]


class Processes(Protocol):
    """This process, and those of actors."""

    @property
    def pid(self) -> int: ...

    @property
    def host(self) -> str: ...

    def redirect_output(self, log_path: Path) -> None:
        """Send the output of this process, and of its children, to `log_path`; a signal makes it
        write its stacks there."""
        ...

    def serve_metrics(self, open_endpoint: Callable[[], MetricsServer | None]) -> None:
        """Serve this process's memory and CPU time from now on, if `open_endpoint` opens an
        endpoint. A simulated process serves nothing."""
        ...

    def add_metrics_source(self, read_metrics: Callable[[], Mapping[str, Any]]) -> None:
        """Serve the metrics that `read_metrics()` returns as well, where this
        process serves metrics."""
        ...

    def measure_event_loop(self, on_lag: Callable[[float, float], None]) -> Callable[[], None]:
        """Account for the running event loop's time by stage (`stages.py`) until the returned
        function is called.

        Many times a second `on_lag` is called with two numbers: how many seconds late a sleeping
        task woke up, and how many of these, at most, the loop's thread computed. During the others
        it waited for a core, or in a blocking call. A simulated loop is never late.
        """
        ...

    def stage_seconds(self) -> tuple[dict[str, float], dict[str, float]]:
        """Return seconds by stage: this process's processor time, and the loop's wall time since
        `measure_event_loop`. Both are empty for a simulated process."""
        ...

    def cpu_seconds(self, other_pids: Sequence[int] = ()) -> float:
        """Return the seconds of processor time of this process so far, and of the processes on this
        host with `other_pids`. A simulated process computes nothing."""
        ...

    def dump_stacks(self, path: Path, reason: str) -> Path:
        """Append what every thread and task of this process is doing to `path`."""
        ...

    def request_stack_dump(self, pid: int, host: str) -> bool:
        """Make an actor's process write the stacks of its threads to its log. Returns False if it
        is on another host, or does not exist."""
        ...

    def is_alive(self, pid: int, host: str) -> bool:
        """Return whether an actor's process exists. False if it is on another host."""
        ...

    def kill_process(self, pid: int, host: str) -> bool:
        """End an actor's process at once, even a stopped one. Returns False if it is on another
        host, or does not exist."""
        ...


# -- the world -------------------------------------------------------------------------------------


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
        """The flusher of this process's records that the disk has not taken yet."""
        ...

    def open_sockets(self) -> Sockets:
        """Return new sockets, which are closed together."""
        ...

    def unique_id(self) -> str:
        """Return 32 hexadecimal digits that were never used before."""
        ...
