"""What is reserved on simulated hosts: so many processes and GPUs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from r3async.world import ClusterNode, Reservation, ResourceBundle
from r3async.world.simulated.loop import CURRENT_PROCESS
from r3async.world.simulated.processes import HostProcess

if TYPE_CHECKING:
    from r3async.world.simulated.world import SimulatedHost, Simulation

HOST_CPUS = 4096
"""Of a host: as many processes as a run may have."""


class SimulatedReservation:
    """What `Actors.reserve_bundles` returns. It is released when the process ends that asked for it."""

    passes_between_processes = True

    def __init__(self, owner: HostProcess, bundles: Sequence[ResourceBundle]):
        self.bundles, self.released_bundles = list(bundles), set[int]()
        made = owner.simulation.reservations
        self.number = len(made)
        made.append(self)
        owner.reservations.append(self)

    def __len__(self) -> int:
        return len(self.bundles)

    def __reduce__(self) -> tuple[Callable[[int], SimulatedReservation], tuple[int]]:
        return _unpickle_reservation, (self.number,)


def _unpickle_reservation(number: int) -> SimulatedReservation:
    process = CURRENT_PROCESS.get()
    assert isinstance(process, HostProcess)
    return process.simulation.reservations[number]


def release_bundles(reservation: Reservation, bundle: int | None = None) -> None:
    """See `Actors.release_bundles`."""
    assert isinstance(reservation, SimulatedReservation)
    if bundle is None:
        reservation.released_bundles |= set(range(len(reservation)))
    elif reservation.bundles[bundle].can_move:
        reservation.released_bundles.add(bundle)


def list_nodes(simulation: Simulation, local_host: SimulatedHost) -> list[ClusterNode]:
    """The hosts that are there, and what nobody has reserved of them."""
    made = simulation.reservations
    held = [bundle for each in made for index, bundle in enumerate(each.bundles) if index not in each.released_bundles]
    out = []
    for name, host in simulation.hosts.items():
        if not host.is_lost:
            here = [bundle for bundle in held if bundle.node_id == name]
            cpus, gpus = HOST_CPUS - sum(b.cpus for b in here), simulation.gpus - sum(b.gpus for b in here)
            out.append(ClusterNode(name, name, HOST_CPUS, simulation.gpus, cpus, gpus, is_local=host is local_host))
    return out


def find_bundle_host(
    simulation: Simulation, reserved_bundle: tuple[Reservation, int]
) -> tuple[SimulatedHost | None, bool]:
    """The host of a bundle, None if it is lost; and whether it is that one or none."""
    reservation, index = reserved_bundle
    assert isinstance(reservation, SimulatedReservation)
    bundle = reservation.bundles[index]
    host = simulation.hosts[bundle.node_id]
    return (None if host.is_lost else host), not bundle.can_move
