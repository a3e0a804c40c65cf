"""Actors as every world has them: how they are placed, started, called and ended. `ray.py` has those of a cluster."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable


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
