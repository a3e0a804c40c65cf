"""The seam: everything by which the system touches the outside, as protocols that are handed in.

A process has one `World`: its clock, its threads, the files of its host, message sockets, the actors that it calls, and what it
knows of processes. There are two implementations: the real one (`r3async.world.real.REAL_WORLD`: Ray, ZeroMQ, the disk), and the
simulated one (`dev.simulation`: one process, one event loop in virtual time, one seed). Conductor, fleet, watch, saver,
learner, generator, sender, receiver, spool, checkpoint directory and the run's supervision are the same classes in both.

Tasks, events, `asyncio.sleep`, `asyncio.timeout` and `asyncio.wait` need no protocol: they belong to the running event loop,
which the world provides. Everything else goes through here. A lint rule forbids the direct calls.
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
    from r3async.world.disk import FileStat


# Actors as every world has them: how they are placed, started, called and ended. `cluster.py` has those of a cluster.


class ActorLostError(RuntimeError):
    """The actor's process ended, or was replaced, before it answered."""


@runtime_checkable
class ActorRef(Protocol):
    """A handle on an actor in another process. It may be sent to other actors."""

    name: str

    async def call(self, method: str, *args: Any, timeout: float | None = None, **kwargs: Any) -> Any:
        """What the actor's method returns or raises (that very exception). Raises `ActorLostError` if its process ends first,
        `TimeoutError` after `timeout` seconds. Whoever stops waiting does not stop the method."""
        ...


class InsufficientResourcesError(RuntimeError):
    """Others use what is to be reserved. Says what is free where."""


@dataclass(frozen=True)
class ClusterNode:
    """A host of a cluster. `cpus` count processes; `free_cpus` and `free_gpus` are reserved by nobody. `memory_bytes`: bytes.
    `accelerator_type`: Ray's name for its kind of GPU, if it is known. `is_local`: that of the process that asks.
    `object_store_bytes`: bytes for what is shared there (`Actors.put`)."""

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
    """What is reserved together on the host whose key is `node_id`: CPUs, and whole GPUs. It `can_move` to another host if
    that one is lost."""

    cpus: float = 0.0
    gpus: float = 0.0
    node_id: str = ""
    can_move: bool = False


class Reservation(Protocol):
    """Bundles that are reserved until `Actors.release_bundles`, or until the process that asked for them ends. May be sent to
    actors."""

    def __len__(self) -> int: ...


@dataclass(frozen=True)
class ActorOptions:
    """What an actor gets. `threads`: of its computations; 0 if it computes nothing itself. `gpus`: may be a share of one.
    `max_restarts`: how often its process is started again by itself. `max_concurrency`: calls at once. `concurrency_groups`:
    further threads by name, for methods that are given them (`Actors.begin_call`). `same_node`: on the node of whoever spawns it.
    `reserved_bundle`: of what is reserved, the bundle of that number."""

    threads: int = 1
    gpus: float = 0.0
    max_restarts: int = 0
    max_concurrency: int | None = None
    concurrency_groups: tuple[str, ...] = ()
    same_node: bool = False
    reserved_bundle: tuple[Reservation, int] | None = None


class Actors(Protocol):
    """Starting, calling and ending actors."""

    def join_cluster(self, address: str | None, actor_count: int) -> None:
        """Join the cluster at `address`, or that which the environment names, or start one on this host with capacity for so many
        actors. Blocking; idempotent. Raises `ConnectionError` that says why it is not connected."""
        ...

    def list_nodes(self) -> list[ClusterNode]:
        """The hosts of the cluster that are there, always in the same order."""
        ...

    def reserve_bundles(
        self, plan: Callable[[Sequence[ClusterNode]], Sequence[ResourceBundle]], timeout: float
    ) -> Reservation:
        """Reserve what `plan` chooses on the hosts that it is given, all of it or nothing. Blocking. While `plan` raises
        `InsufficientResourcesError`, or others were faster, it is asked again; after `timeout` that is raised. Raises
        whatever else `plan` raises at once."""
        ...

    def release_bundles(self, reservation: Reservation, bundle: int | None = None) -> None:
        """What runs there ends; of one `bundle` alone, if it is one that moves, and of all without. Idempotent."""
        ...

    def host_address(self, interface: str = "") -> str:
        """Of this host, under which the others of the cluster reach it; that of a network `interface`, if it is named. Raises
        `ConnectionError` if there is none of that name, with those that there are."""
        ...

    def spawn_actor(self, actor_class: type, *args: Any, name: str, actor_options: ActorOptions = ...) -> ActorRef:
        """Begin to start a process that makes `actor_class(world, *args)`, `world` being its own. Returns at once."""
        ...

    def current_actor(self) -> ActorRef:
        """The actor that asks."""
        ...

    def kill_actor(self, actor: ActorRef, *, restart: bool = False) -> None:
        """End its process at once; with `restart`, if it may be, it is started again."""
        ...

    def put(self, value: Any) -> Any:
        """Share a value with the processes of the cluster. Returns a reference, which can be sent. As an argument of a call it
        arrives as the value; within another value, as a reference for `get`."""
        ...

    def get(self, reference: Any, timeout: float | None = None) -> Any:
        """What was `put`, or the result of a call that was begun. Blocking. Raises what `ActorRef.call` raises."""
        ...

    def begin_call(self, actor: ActorRef, method: str, *args: Any, concurrency_group: str = "", **kwargs: Any) -> Any:
        """Begin a call, for a thread without an event loop. Returns a reference for `wait_for_call` and `get`.
        `concurrency_group`: see `ActorOptions`."""
        ...

    def wait_for_call(self, calls: Sequence[Any], timeout: float | None = None) -> tuple[list[Any], list[Any]]:
        """Block until a call has ended. Returns those that have, and the others."""
        ...

    def leave_cluster(self) -> None:
        """Leave the cluster, ending it if `join_cluster` started it. Idempotent."""
        ...


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
