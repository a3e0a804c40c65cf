"""How many generators a run is to have, as its driver keeps it: which a file of the run's directory tells it (`r3async scale`).

The driver starts generators and ends them, for what it started ends with it. Places for more are reserved one by one, as hosts
have them free; those that were added last leave first.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec

from r3async.actors.layout import Demand, lay_out_engine
from r3async.config import Config
from r3async.untrusted import Malformed, decode_json
from r3async.world import ActorLost, ActorRef, Files, NotFree, Placement, Reservation, World
from r3async.world.files import read_file, replace_file
from r3async.world.real import REAL

WISH = "scale.json"
"""In the run's directory: what was asked for last, for as long as its command runs."""
LOOK_SECONDS = 1.0
"""Between two looks at it, and at what is free."""
FREE_SECONDS = 0.01
"""What is not free at once is asked for again with the next look."""


class Wish(msgspec.Struct, frozen=True):
    """`asked` tells one wish from another."""

    generators: int
    asked: str

    def __post_init__(self) -> None:
        if self.generators < 1:
            raise ValueError("a run has one generator or more")


def read_wish(run_dir: Path, *, files: Files = REAL.files) -> Wish | None:
    """None if there is none, or none that can be read."""
    try:
        return decode_json(read_file(run_dir / WISH, files=files), Wish)
    except (OSError, Malformed):
        return None


def write_wish(run_dir: Path, wish: Wish, *, files: Files = REAL.files) -> None:
    """Raises `OSError`."""
    replace_file(run_dir / WISH, msgspec.json.encode(wish), files=files)


def as_wished(config: Config, run_dir: Path, *, files: Files = REAL.files) -> Config:
    """With as many generators as were asked for while the run's command runs."""
    wish = read_wish(run_dir, files=files)
    if wish is None:
        return config
    return msgspec.structs.replace(config, generator=msgspec.structs.replace(config.generator, count=wish.generators))


class Crew:
    """The generators of a start of the run. `spawn(name, placement)` begins one. `places`: of the first ones, in `reservation`.
    `home`: hosts of the learner, by `Node.key`, which further engines prefer. `events`: a structlog logger."""

    def __init__(
        self,
        world: World,
        config: Config,
        run_dir: Path,
        events: Any,
        spawn: Callable[[str, Placement], ActorRef],
        places: list[Placement],
        home: list[str],
    ):
        self._world, self._config, self._run_dir, self._events = world, config, run_dir, events
        self._spawn, self._home = spawn, home
        self.members: dict[str, ActorRef] = {}
        self._places: dict[str, Placement] = {}
        self._named = 0
        self._settled = read_wish(run_dir, files=world.files)
        """The wish that was fulfilled last, or refused: these places are as many as it says."""
        self._waits = ""
        """Why it is not, as it was last said."""
        for place in places:
            self._begin(place)

    def _begin(self, place: Placement) -> str:
        name = f"generator-{self._named}"
        self._named += 1  # a name is never used again: leases and records have it
        self.members[name], self._places[name] = self._spawn(name, place), place
        return name

    def _end(self, name: str) -> None:
        self._world.actors.kill(self.members.pop(name))
        if (within := self._places.pop(name).within) is not None:
            self._world.actors.release(*within)

    def release(self) -> None:
        """The places of all, when their processes were ended."""
        for place in self._places.values():
            if place.within is not None:
                self._world.actors.release(*place.within)

    async def run(self, conductor: ActorRef) -> None:
        """Do what is asked for, until cancelled, or until the conductor is lost."""
        while True:
            wish = read_wish(self._run_dir, files=self._world.files)
            if wish is not None and wish != self._settled:
                try:
                    await self._change(conductor, wish)
                except ActorLost:
                    return  # its run ends, or restarts, with as many as were asked for
            await asyncio.sleep(LOOK_SECONDS)

    async def _change(self, conductor: ActorRef, wish: Wish) -> None:
        for name in await conductor.call("excluded"):
            if name in self.members:  # its place is free for another
                self._end(name)
        before, wanted = len(self.members), wish.generators
        if self._waits == "":
            self._events.info("scaling", generators=wanted, of=before, asked=wish.asked)
        if wanted < before:
            await asyncio.gather(*(self._leave(conductor, name) for name in list(self.members)[wanted:]))
        refused = ""
        if wanted > before:
            names, waits = await self._begin_more(wanted - before)
            refused = "; ".join(filter(None, await asyncio.gather(*(self._join(conductor, name) for name in names))))
            if waits and not refused:
                if waits != self._waits:
                    self._waits = waits
                    self._events.warning("scale_waits", generators=len(self.members), asked=wish.asked, reason=waits)
                return
        self._settled, self._waits = wish, ""
        facts = {"generators": len(self.members), "of": before, "asked": wish.asked}
        if refused:
            self._events.error("scale_refused", **facts, reason=refused)
        else:
            self._events.info("scaled", **facts)

    async def _begin_more(self, count: int) -> tuple[list[str], str]:
        """As many as there are places for: their names, and why they are not more."""
        names = list[str]()
        for _ in range(count):
            try:
                place = await self._world.threads.run(self._take_place)
            except NotFree as error:
                return names, str(error)
            names.append(self._begin(place))
        return names, ""

    def _take_place(self) -> Placement:
        """Blocking. Raises `NotFree`."""
        demand, made = Demand.of(self._config), []

        def plan(nodes: Any) -> Any:
            made.append(lay_out_engine(demand, nodes, self._home))
            return made[-1:]

        reservation: Reservation = self._world.actors.reserve(plan, FREE_SECONDS)
        generator = self._config.generator
        place = Placement(generator.threads, restarts=generator.max_restarts, gpus=made[-1].gpus)
        return replace(place, within=(reservation, 0))

    async def _join(self, conductor: ActorRef, name: str) -> str:
        reason = await conductor.call("join", name, self.members[name])
        if reason:
            self._end(name)
        return f"{name}: {reason}" if reason else ""

    async def _leave(self, conductor: ActorRef, name: str) -> None:
        await conductor.call("leave", name)
        self._end(name)
