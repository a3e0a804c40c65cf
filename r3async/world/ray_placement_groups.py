"""Ray's placement groups, which reserve resources of a cluster for a run's actors."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from r3async.world import InsufficientResourcesError, Reservation, ResourceBundle

RESERVE_TIMEOUT_SECONDS = 2.0
"""Seconds after which a reservation counts as failed. Ray reserves free resources in milliseconds;
what it cannot reserve in this time, others have taken."""


@dataclass(frozen=True)
class RayReservation:
    """A reservation of bundles on a Ray cluster.

    Attributes:
        placement_groups: Ray's placement groups.
        bundle_locations: For each bundle, the index of its group and its index in it.
    """

    placement_groups: tuple[Any, ...]
    bundle_locations: tuple[tuple[int, int], ...]

    def __len__(self) -> int:
        return len(self.bundle_locations)


def reserve_placement_groups(bundles: Sequence[ResourceBundle]) -> RayReservation:
    """Reserve the bundles. Those that stay share one group, with fixed hosts; each one that can
    move has its own group, whose host is only preferred.

    Raises `InsufficientResourcesError` if others have taken the resources meanwhile.
    """
    from ray.util.placement_group import placement_group, remove_placement_group

    staying = [bundle for bundle in bundles if not bundle.can_move]
    groups = []
    at = list[tuple[int, int]]()
    fixed = 0
    if staying:
        wanted = [{"ray.io/node-id": bundle.node_id} for bundle in staying]
        groups.append(
            placement_group(
                [_bundle_resources(b) for b in staying], "PACK", bundle_label_selector=wanted
            )
        )
    for bundle in bundles:
        if bundle.can_move:
            at.append((len(groups), 0))
            groups.append(
                placement_group(
                    [_bundle_resources(bundle)],
                    "STRICT_PACK",
                    _soft_target_node_id=bundle.node_id or None,
                )
            )
        else:
            at.append((0, fixed))
            fixed += 1
    deadline = time.monotonic() + RESERVE_TIMEOUT_SECONDS
    if all(group.wait(max(0.01, deadline - time.monotonic())) for group in groups):
        return RayReservation(tuple(groups), tuple(at))
    for group in groups:
        remove_placement_group(group)
    asked = sum(bundle.gpus for bundle in bundles), sum(bundle.cpus for bundle in bundles)
    raise InsufficientResourcesError(
        f"others were faster: Ray could not reserve {asked[0]:g} GPUs and "
        f"{asked[1]:g} CPUs as planned"
    )


def _bundle_resources(bundle: ResourceBundle) -> dict[str, float]:
    return {"CPU": bundle.cpus} | ({"GPU": bundle.gpus} if bundle.gpus else {})


def build_scheduling_strategy(reservation: Reservation, bundle: int) -> Any:
    """Return Ray's scheduling strategy for an actor in a reserved bundle."""
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    assert isinstance(reservation, RayReservation)
    group, index = reservation.bundle_locations[bundle]
    return PlacementGroupSchedulingStrategy(reservation.placement_groups[group], index)
