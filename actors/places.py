"""Gives the processes of a run their places on a cluster: `layout.py` says which, and the world reserves them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from r3async.actors.layout import Demand, Layout, Seat, lay_out_free
from r3async.actors.process import RunFailed
from r3async.config import Config
from r3async.world import Bundle, Node, NotFree, Placement, Reservation, World

WRITE, CHECKPOINT = "write", "checkpoint"
"""The threads of a rank's own for `write` and `write_state`. Another one makes every other call."""


def rank_placement(config: Config) -> Placement:
    """Of a rank that is an actor, beside whoever starts it."""
    return Placement(config.learner.threads, concurrency=1, lanes=(WRITE, CHECKPOINT), beside=True)


@dataclass(frozen=True)
class Places:
    """`learner`, and `ranks` if they are actors of their own; `engines` of generators. `layout`: what was planned."""

    layout: Layout
    reservation: Reservation
    learner: Placement
    ranks: list[Placement]
    engines: list[Placement]


def take_places(world: World, config: Config, engines: bool = True) -> Places:
    """Reserve them, within `cluster.wait_seconds`. Blocking. `engines`: none for supervised training. Raises `Unplaceable` at
    once if the cluster cannot hold the run, and `RunFailed` if others use it."""
    demand = Demand.of(config, engines)
    made: list[Layout] = []

    def plan(nodes: Sequence[Node]) -> list[Bundle]:
        made.append(lay_out_free(demand, nodes))
        return made[-1].bundles

    seconds = config.cluster.wait_seconds
    try:
        reservation = world.actors.reserve(plan, seconds)
    except NotFree as error:
        raise RunFailed(f"{error} (waited {seconds:g} s, cluster.wait_seconds)") from error
    layout = made[-1]

    def at(placement: Placement, seat: Seat) -> Placement:
        return replace(placement, gpus=seat.gpus, beside=False, within=(reservation, seat.bundle))

    generator = config.generator
    playing = Placement(generator.threads, restarts=generator.max_restarts)
    return Places(
        layout,
        reservation,
        at(Placement(config.learner.threads), layout.learner),
        [at(rank_placement(config), seat) for seat in layout.ranks],
        [at(playing, seat) for seat in layout.engines],
    )
