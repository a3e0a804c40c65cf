"""The number of generators, as a file of the run's directory says it (`r3async scale`).

The driver starts and ends generators, because what it started ends with it. Places for more
generators are reserved one by one, as hosts have them free. Generators that were added last leave
first.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec

from r3async.config import Config
from r3async.untrusted import MalformedError, decode_json
from r3async.world import (
    ActorLostError,
    ActorOptions,
    ActorRef,
    Files,
    InsufficientResourcesError,
    Reservation,
    World,
)
from r3async.world.files import read_file, replace_file
from r3async.world.real import REAL_WORLD

from .placement_plan import ResourceDemand, plan_engine

SCALE_REQUEST_FILE = "scale.json"
"""Name of the file in the run's directory with the last scale request. It counts for as long as the
run's command runs."""
SCALE_POLL_SECONDS = 1.0
"""Seconds between two looks at the scale request and at the free places."""
PLACEMENT_WAIT_SECONDS = 0.01
"""Seconds to wait for a place. A place that is not free at once is requested again
with the next look."""


class ScaleRequest(msgspec.Struct, frozen=True):
    """A request for a number of generators. `asked` tells one request from another."""

    generators: int
    asked: str

    def __post_init__(self) -> None:
        if self.generators < 1:
            raise ValueError("a run has one generator or more")


def read_scale_request(run_dir: Path, *, files: Files = REAL_WORLD.files) -> ScaleRequest | None:
    """Read the scale request of a run. Returns None if there is none, or it cannot be read."""
    try:
        return decode_json(read_file(run_dir / SCALE_REQUEST_FILE, files=files), ScaleRequest)
    except (OSError, MalformedError):
        return None


def write_scale_request(
    run_dir: Path, request: ScaleRequest, *, files: Files = REAL_WORLD.files
) -> None:
    """Write the scale request of a run. Raises `OSError`."""
    replace_file(run_dir / SCALE_REQUEST_FILE, msgspec.json.encode(request), files=files)


def with_requested_scale(
    config: Config, run_dir: Path, *, files: Files = REAL_WORLD.files
) -> Config:
    """Return the configuration with as many generators as were requested while the
    run's command runs."""
    wish = read_scale_request(run_dir, files=files)
    if wish is None:
        return config
    return msgspec.structs.replace(
        config, generator=msgspec.structs.replace(config.generator, count=wish.generators)
    )


class FleetScaler:
    """The generators of a start of the run, as the driver starts and ends them.

    Args:
        events: A structlog logger.
        spawn: `spawn(name, placement)` starts one generator.
        placements: Reserved placements of the first generators.
        home_hosts: Hosts of the learner, by `ClusterNode.node_id`, which further engines prefer.
    """

    def __init__(
        self,
        world: World,
        config: Config,
        run_dir: Path,
        events: Any,
        spawn: Callable[[str, ActorOptions], ActorRef],
        placements: list[ActorOptions],
        home_hosts: list[str],
    ):
        self._world = world
        self._config = config
        self._run_dir = run_dir
        self._events = events
        self._spawn = spawn
        self._home_hosts = home_hosts
        self.generators: dict[str, ActorRef] = {}
        self._placements: dict[str, ActorOptions] = {}
        self._next_number = 0
        self._handled_request = read_scale_request(run_dir, files=world.files)
        """Scale request that was fulfilled or refused last: there are as many places as it says."""
        self._wait_reason = ""
        """Reason why the newest request waits, as last reported; empty if none waits."""
        for place in placements:
            self._spawn_generator(place)

    def _spawn_generator(self, place: ActorOptions) -> str:
        name = f"generator-{self._next_number}"
        self._next_number += 1  # a name is never used again: leases and records contain it
        self.generators[name] = self._spawn(name, place)
        self._placements[name] = place
        return name

    def _end_generator(self, name: str) -> None:
        self._world.actors.kill_actor(self.generators.pop(name))
        within = self._placements.pop(name).reserved_bundle
        if within is not None:
            self._world.actors.release_bundles(*within)

    def release_placements(self) -> None:
        """Release the places of all generators. Call this when their processes have ended."""
        for place in self._placements.values():
            if place.reserved_bundle is not None:
                self._world.actors.release_bundles(*place.reserved_bundle)

    async def run(self, conductor: ActorRef) -> None:
        """Fulfil scale requests until cancelled, or until the conductor is lost."""
        while True:
            wish = read_scale_request(self._run_dir, files=self._world.files)
            if wish is not None and wish != self._handled_request:
                try:
                    await self._apply_request(conductor, wish)
                except ActorLostError:
                    return  # its run ends, or restarts with as many generators as were requested
            await asyncio.sleep(SCALE_POLL_SECONDS)

    async def _apply_request(self, conductor: ActorRef, wish: ScaleRequest) -> None:
        for name in await conductor.call("list_excluded"):
            if name in self.generators:  # its place is free for another
                self._end_generator(name)
        before = len(self.generators)
        wanted = wish.generators
        if self._wait_reason == "":
            self._events.info("scaling", generators=wanted, of=before, asked=wish.asked)
        if wanted < before:
            await asyncio.gather(
                *(
                    self._remove_generator(conductor, name)
                    for name in list(self.generators)[wanted:]
                )
            )
        refused = ""
        if wanted > before:
            names, waits = await self._spawn_more(wanted - before)
            refused = "; ".join(
                filter(
                    None,
                    await asyncio.gather(*(self._add_generator(conductor, name) for name in names)),
                )
            )
            if waits and not refused:
                if waits != self._wait_reason:
                    self._wait_reason = waits
                    self._events.warning(
                        "scale_waits",
                        generators=len(self.generators),
                        asked=wish.asked,
                        reason=waits,
                    )
                return
        self._handled_request = wish
        self._wait_reason = ""
        facts = {"generators": len(self.generators), "of": before, "asked": wish.asked}
        if refused:
            self._events.error("scale_refused", **facts, reason=refused)
        else:
            self._events.info("scaled", **facts)

    async def _spawn_more(self, count: int) -> tuple[list[str], str]:
        """Start up to `count` generators, as many as there are places for. Returns their names, and
        why there are not more."""
        names = list[str]()
        for _ in range(count):
            try:
                place = await self._world.threads.run(self._reserve_placement)
            except InsufficientResourcesError as error:
                return names, str(error)
            names.append(self._spawn_generator(place))
        return names, ""

    def _reserve_placement(self) -> ActorOptions:
        """Reserve a place for one more generator. Blocking. Raises `InsufficientResourcesError`."""
        demand = ResourceDemand.from_config(self._config)
        made = []

        def plan(nodes: Any) -> Any:
            made.append(plan_engine(demand, nodes, self._home_hosts))
            return made[-1:]

        reservation: Reservation = self._world.actors.reserve_bundles(plan, PLACEMENT_WAIT_SECONDS)
        generator = self._config.generator
        place = ActorOptions(
            generator.threads, max_restarts=generator.max_restarts, gpus=made[-1].gpus
        )
        return replace(place, reserved_bundle=(reservation, 0))

    async def _add_generator(self, conductor: ActorRef, name: str) -> str:
        reason = await conductor.call("add_generator", name, self.generators[name])
        if reason:
            self._end_generator(name)
        return f"{name}: {reason}" if reason else ""

    async def _remove_generator(self, conductor: ActorRef, name: str) -> None:
        await conductor.call("remove_generator", name)
        self._end_generator(name)
