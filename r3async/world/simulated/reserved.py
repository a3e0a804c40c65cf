"""What is reserved on simulated hosts: so many processes and GPUs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from r3async.world import Bundle, Node, Reservation
from r3async.world.simulated.loop import PROCESS
from r3async.world.simulated.processes import HostProcess

if TYPE_CHECKING:
    from r3async.world.simulated.world import Host, Simulation

CPUS = 4096
"""Of a host: as many processes as a run may have."""


class SimulatedReservation:
    """What `Actors.reserve` returns. It is released when the process ends that asked for it."""

    passes_between_processes = True

    def __init__(self, owner: HostProcess, bundles: Sequence[Bundle]):
        self.bundles, self.released = list(bundles), set[int]()
        made = owner.simulation.reservations
        self.number = len(made)
        made.append(self)
        owner.reserved.append(self)

    def __len__(self) -> int:
        return len(self.bundles)

    def __reduce__(self) -> tuple[Callable[[int], SimulatedReservation], tuple[int]]:
        return _reservation, (self.number,)


def _reservation(number: int) -> SimulatedReservation:
    process = PROCESS.get()
    assert isinstance(process, HostProcess)
    return process.simulation.reservations[number]


def release(reservation: Reservation, bundle: int | None = None) -> None:
    """See `Actors.release`."""
    assert isinstance(reservation, SimulatedReservation)
    if bundle is None:
        reservation.released |= set(range(len(reservation)))
    elif reservation.bundles[bundle].moves:
        reservation.released.add(bundle)


def nodes(simulation: Simulation, home: Host) -> list[Node]:
    """The hosts that are there, and what nobody has reserved of them."""
    made = simulation.reservations
    held = [bundle for each in made for index, bundle in enumerate(each.bundles) if index not in each.released]
    out = []
    for name, host in simulation.hosts.items():
        if not host.lost:
            here = [bundle for bundle in held if bundle.node == name]
            cpus, gpus = CPUS - sum(b.cpus for b in here), simulation.gpus - sum(b.gpus for b in here)
            out.append(Node(name, name, CPUS, simulation.gpus, cpus, gpus, home=host is home))
    return out


def host_within(simulation: Simulation, within: tuple[Reservation, int]) -> tuple[Host | None, bool]:
    """The host of a bundle, None if it is lost; and whether it is that one or none."""
    reservation, index = within
    assert isinstance(reservation, SimulatedReservation)
    bundle = reservation.bundles[index]
    host = simulation.hosts[bundle.node]
    return (None if host.lost else host), not bundle.moves
