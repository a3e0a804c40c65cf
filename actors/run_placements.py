"""The places of a run's processes on a cluster, which `placement_plan.py` chooses."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from r3async.actors.placement_plan import (
    BundleShare,
    ProcessLayout,
    ResourceDemand,
    check_transfers,
    plan_free_layout,
)
from r3async.config import Config
from r3async.world import (
    ActorOptions,
    ClusterNode,
    InsufficientResourcesError,
    Reservation,
    ResourceBundle,
    World,
)

from .process import RunFailed

WRITE_LANE = "write"
CHECKPOINT_LANE = "checkpoint"
"""Names of a rank's own threads for `write_version` and `write_checkpoint`. Another thread makes
every other call."""


def rank_placement(config: Config) -> ActorOptions:
    """Return the options of a rank that is an actor, on the node of the process that starts it."""
    return ActorOptions(
        config.learner.threads,
        max_concurrency=1,
        concurrency_groups=(WRITE_LANE, CHECKPOINT_LANE),
        same_node=True,
    )


@dataclass(frozen=True)
class RunPlacements:
    """The reserved places of a run.

    Attributes:
        layout: Layout that was planned.
        reservation: Reservation of its bundles.
        learner: Options of the learner actor.
        ranks: Options of the ranks, if they are actors of their own.
        engines: Options of the generators.
    """

    layout: ProcessLayout
    reservation: Reservation
    learner: ActorOptions
    ranks: list[ActorOptions]
    engines: list[ActorOptions]


def reserve_placements(world: World, config: Config, with_engines: bool = True) -> RunPlacements:
    """Reserve the places of a run, within `cluster.wait_seconds`. Blocking. `with_engines` is False
    for supervised training.

    Raises `PlacementError` at once if the cluster cannot hold the run, `ConfigError` if its parts
    would not reach each other there, and `RunFailed` if others use it.
    """
    demand = ResourceDemand.from_config(config, with_engines)
    made: list[ProcessLayout] = []

    def plan(nodes: Sequence[ClusterNode]) -> list[ResourceBundle]:
        made.append(plan_free_layout(demand, nodes))
        if with_engines:
            check_transfers(config, made[-1])
        return made[-1].bundles

    seconds = config.cluster.wait_seconds
    try:
        reservation = world.actors.reserve_bundles(plan, seconds)
    except InsufficientResourcesError as error:
        raise RunFailed(f"{error} (waited {seconds:g} s, cluster.wait_seconds)") from error
    layout = made[-1]

    def at(placement: ActorOptions, seat: BundleShare) -> ActorOptions:
        return replace(
            placement, gpus=seat.gpus, same_node=False, reserved_bundle=(reservation, seat.bundle)
        )

    generator = config.generator
    playing = ActorOptions(generator.threads, max_restarts=generator.max_restarts)
    return RunPlacements(
        layout,
        reservation,
        at(ActorOptions(config.learner.threads), layout.learner),
        [at(rank_placement(config), seat) for seat in layout.ranks],
        [at(playing, seat) for seat in layout.engines],
    )
