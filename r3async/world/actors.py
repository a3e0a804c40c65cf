"""Actors as every world has them: how they are placed, started, called and ended. `ray.py` has those of a cluster."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable


class ActorLost(RuntimeError):
    """The actor's process ended, or was replaced, before it answered."""


@runtime_checkable
class ActorRef(Protocol):
    """A handle on an actor in another process. It may be sent to other actors."""

    name: str

    async def call(self, method: str, *args: Any, timeout: float | None = None, **kwargs: Any) -> Any:
        """What the actor's method returns or raises (that very exception). Raises `ActorLost` if its process ends first,
        `TimeoutError` after `timeout` seconds. Whoever stops waiting does not stop the method."""
        ...


class NotFree(RuntimeError):
    """Others use what is to be reserved. Says what is free where."""


@dataclass(frozen=True)
class Node:
    """A host of a cluster. `cpus` count processes; `free_cpus` and `free_gpus` are reserved by nobody. `memory`: bytes.
    `accelerator`: Ray's name for its kind of GPU, if it is known. `home`: that of the process that asks. `store`: bytes for what
    is shared there (`Actors.put`)."""

    key: str
    name: str
    cpus: float
    gpus: float
    free_cpus: float
    free_gpus: float
    memory: float = 0.0
    accelerator: str = ""
    home: bool = False
    store: float = 0.0


@dataclass(frozen=True)
class Bundle:
    """What is reserved together on the host whose key is `node`: CPUs, and whole GPUs. It `moves` to another host if that one is
    lost."""

    cpus: float = 0.0
    gpus: float = 0.0
    node: str = ""
    moves: bool = False


class Reservation(Protocol):
    """Bundles that are reserved until `Actors.release`, or until the process that asked for them ends. May be sent to actors."""

    def __len__(self) -> int: ...


@dataclass(frozen=True)
class Placement:
    """What an actor gets. `threads`: of its computations; 0 if it computes nothing itself. `gpus`: may be a share of one.
    `restarts`: how often its process is started again by itself. `concurrency`: calls at once. `lanes`: further threads by
    name, for methods that are given them (`Actors.begin`). `beside`: on the node of whoever spawns it. `within`: of what is
    reserved, the bundle of that number."""

    threads: int = 1
    gpus: float = 0.0
    restarts: int = 0
    concurrency: int | None = None
    lanes: tuple[str, ...] = ()
    beside: bool = False
    within: tuple[Reservation, int] | None = None


class Actors(Protocol):
    """Starting, calling and ending actors."""

    def connect(self, address: str | None, actors: int) -> None:
        """Join the cluster at `address`, or that which the environment names, or start one on this host with capacity for so many
        actors. Blocking; idempotent. Raises `ConnectionError` that says why it is not connected."""
        ...

    def nodes(self) -> list[Node]:
        """The hosts of the cluster that are there, always in the same order."""
        ...

    def reserve(self, plan: Callable[[Sequence[Node]], Sequence[Bundle]], seconds: float) -> Reservation:
        """Reserve what `plan` chooses on the hosts that it is given, all of it or nothing. Blocking. While `plan` raises
        `NotFree`, or others were faster, it is asked again; after `seconds` that is raised. Raises whatever else `plan` raises
        at once."""
        ...

    def release(self, reservation: Reservation, bundle: int | None = None) -> None:
        """What runs there ends; of one `bundle` alone, if it is one that moves, and of all without. Idempotent."""
        ...

    def address(self, interface: str = "") -> str:
        """Of this host, under which the others of the cluster reach it; that of a network `interface`, if it is named. Raises
        `ConnectionError` if there is none of that name, with those that there are."""
        ...

    def spawn(self, kind: type, *args: Any, name: str, placement: Placement = ...) -> ActorRef:
        """Begin to start a process that makes `kind(world, *args)`, `world` being its own. Returns at once."""
        ...

    def current(self) -> ActorRef:
        """The actor that asks."""
        ...

    def kill(self, actor: ActorRef, *, restart: bool = False) -> None:
        """End its process at once; with `restart`, if it may be, it is started again."""
        ...

    def put(self, value: Any) -> Any:
        """Share a value with the processes of the cluster. Returns a reference, which can be sent. As an argument of a call it
        arrives as the value; within another value, as a reference for `get`."""
        ...

    def get(self, reference: Any, timeout: float | None = None) -> Any:
        """What was `put`, or the result of a call that was begun. Blocking. Raises what `ActorRef.call` raises."""
        ...

    def begin(self, actor: ActorRef, method: str, *args: Any, lane: str = "", **kwargs: Any) -> Any:
        """Begin a call, for a thread without an event loop. Returns a reference for `wait` and `get`. `lane`: see `Placement`."""
        ...

    def wait(self, calls: Sequence[Any], timeout: float | None = None) -> tuple[list[Any], list[Any]]:
        """Block until a call has ended. Returns those that have, and the others."""
        ...

    def disconnect(self) -> None:
        """Leave the cluster, ending it if `connect` started it. Idempotent."""
        ...
