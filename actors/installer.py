"""The conductor's deliveries: weights for its generators, compared with the learner's, and restarts of those that are lost."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from functools import partial
from typing import Any, TypeVar

from r3async.actors.delivery import Published, no_delivery
from r3async.actors.fleet import Fleet, Generator, Way
from r3async.actors.probing import ProbeFailed, probe
from r3async.actors.process import RPC_SECONDS, ProcessLost, RunFailed, ask, end_process
from r3async.config import Config
from r3async.rollout.engines import InstallReport
from r3async.schedule.health import HealthState, RestartsExhausted
from r3async.weights.probe import KEPT
from r3async.world import ActorLost, ActorRef, World
from r3async.world.disk_waits import DiskWait, is_disk_trouble
from r3async.world.real import REAL

T = TypeVar("T")

LOOK_SECONDS = 0.5
"""Between two looks, at most, at who still answers during a delivery."""
REFUSALS = 2
"""So often each generator has to refuse a version, in a process of its own each time, until nobody can install it."""
DISK_HINT = "free bytes there, or file descriptors of this process: the others play on, and nothing is lost"


class NotInstalled(ActorLost):
    """A generator did not install weights, or did not answer the probe, by that `cause`: its process is ended, as if it were
    lost."""

    def __init__(self, generator: Generator, cause: Exception):
        super().__init__(f"{generator.generator_id}: {str(cause) or repr(cause)}")
        self.cause = cause

    @property
    def refused(self) -> bool:
        """It answered that it cannot. Else no answer came in time, or a disk did not take them."""
        return not isinstance(self.cause, OSError)


class Exhausted(RunFailed):
    """A generator was lost more often than it may be restarted."""


class Installer:
    """Lives on the conductor's event loop, from the first version on. `published`: the `learner`'s newest version, the only one
    that is still delivered. `tokens`: the probe's text, if there is a probe. `events`: a structlog logger. `wake()` is called
    when `deliver` has something to do again.

    An installation that fails is the loss of its generator, which is restarted, and ends the run only where that has no end: no
    generator can install the version, or none is left. What an engine installed and is not what was published ends it at once."""

    def __init__(
        self,
        config: Config,
        events: Any,
        fleet: Fleet,
        learner: ActorRef,
        way: Way,
        tokens: Sequence[int] | None,
        published: Published,
        world: World = REAL,
        wake: Callable[[], object] = lambda: None,
    ):
        self._config, self._events, self.fleet, self._learner, self.way = config, events, fleet, learner, way
        self._tokens, self.published = tokens, published
        self._world, self._clock, self._wake = world, world.clock.monotonic, wake
        self._shared: tuple[Published, Any] | None = None
        self._scored = published.version
        """The last version that the learner was asked to score the probe's text with."""
        self._looked = -1
        self._ended: dict[str, None] = {}
        """Of all generators it was last seen which lack version `_looked`; since then, these ended a delivery."""
        self._reading: Counter[int] = Counter()
        """By version: how many engines read it now."""
        self._refused: tuple[int, Counter[str]] = -1, Counter()
        """The version that was refused last, and how often by each generator."""

    @property
    def reading(self) -> list[int]:
        """Versions that engines are reading now."""
        return [version for version, readers in self._reading.items() if readers]

    def wants_scores(self, version: int) -> bool:
        """Whether a generator is due to be probed with `version`, which the learner makes next, and not with one on its way."""
        on_its_way = self.published.version < self._scored < version
        due = [g for g in self.fleet if not g.finished and self._due(g, version)]
        if any(g.probed < 0 or (g.installing is None and not on_its_way) for g in due):
            self._scored = version
        return self._scored == version

    def _due(self, generator: Generator, version: int) -> bool:
        if self._tokens is None:
            return False
        return generator.probed < 0 or version - generator.probed >= self._config.weights.probe_every

    async def begin(self) -> None:
        """Connect all, and deliver the first version the way every later one goes. Raises what an installation raised; those that
        are lost meanwhile are left to `supervise`."""
        await asyncio.gather(*(self._begin(g) for g in self.fleet))

    async def _begin(self, generator: Generator) -> None:
        try:
            await self.connect(generator)
            await self._install(generator)
        except ProcessLost:
            raise
        except ActorLost as error:
            self.fleet.lose(generator)
            self.fleet.report_lost(generator, error, [])

    async def connect(self, generator: Generator) -> None:
        """To the learner, and to the transport of its weights, for which its host has to make a folder."""
        await self._with_its_disk(generator, self.fleet.connect_one, generator, self.way)

    @property
    def behind(self) -> bool:
        """A delivery has something to do: a generator needs the newest version and is not being given any, or has ended to be."""
        version = self.published.version
        ended = [self.fleet[name] for name in self._ended if name in self.fleet.generators]
        looked = ended if self._looked >= version else self.fleet
        return any(g.installing.done() if g.installing is not None else g.live and g.version < version for g in looked)

    async def deliver(self) -> dict[str, float] | None:
        """Install the newest published version in every live generator that lacks it.

        Returns when all that are not suspect have it. One that is, or becomes so meanwhile, is given it as well, and is not
        waited for. Returns figures of the slowest; None if nobody has it: a generator that is restarted, or recovers,
        installs it. Raises `RunFailed` if a generator does not have what was published, or nobody can install it.
        """
        version, before = self.published.version, self._clock()
        reports: list[InstallReport] = []
        while awaited := self._give(version, reports):
            await asyncio.wait(awaited, timeout=LOOK_SECONDS, return_when=asyncio.FIRST_EXCEPTION)
        if not any(g.version >= version for g in self.fleet):
            return None
        return {
            **no_delivery(),
            "weights/update_seconds": self._clock() - before,
            "weights/transfer_seconds": max((r.fetch_seconds + r.verify_seconds for r in reports), default=0.0),
            "weights/load_seconds": max((r.load_seconds for r in reports), default=0.0),
            "weights/pause_seconds": max((r.pause_seconds for r in reports), default=0.0),
            "weights/paused_share": self.fleet.paused_share,
            "weights/bytes": self.published.publication.manifest.nbytes,
        }

    def _give(self, version: int, reports: list[InstallReport]) -> list[asyncio.Task[InstallReport]]:
        """Have each live generator that lacks `version` install the newest, one delivery at a time, and gather what has ended.
        Returns the deliveries to wait for."""
        awaited = []
        self._looked, self._ended = version, {}
        for generator in self.fleet:
            if generator.installing is not None and generator.installing.done():
                self._gather(generator, generator.installing, reports)
            if not generator.live or generator.version >= version:
                continue
            if generator.installing is None:
                generator.installing = asyncio.create_task(self._install(generator))
                generator.installing.add_done_callback(partial(self._given, generator.generator_id))
            if generator.state is HealthState.HEALTHY:
                awaited.append(generator.installing)
        return awaited

    def _given(self, generator_id: str, task: asyncio.Task[InstallReport]) -> None:
        self._ended[generator_id] = None
        if not task.cancelled():
            task.exception()  # it is looked at: here, or by `_gather`
        self._wake()

    @staticmethod
    def _gather(generator: Generator, task: asyncio.Task[InstallReport], reports: list[InstallReport]) -> None:
        generator.installing = None
        if task.cancelled():
            return
        error = task.exception()
        if error is None:
            reports.append(task.result())
        elif isinstance(error, ProcessLost) or not isinstance(error, ActorLost):
            raise error
        elif generator.live:  # or its supervisor knew before, and may be restarting it
            generator.health.lost()

    async def _install(self, generator: Generator) -> InstallReport:
        """Install the newest version, which the generator has to confirm, and probe it if that is due.

        One that plays continues with it, whatever is published meanwhile. One that does not play yet starts only with what is the
        newest when it is done: the others may have that by then.
        """
        published, process = self.published, generator.process
        version = published.version
        self._reading[version] += 1
        try:
            given = generator, "install", self._share(published)
            report: InstallReport = await self._with_its_disk(generator, self._ask, *given)
            if report.version != version:
                raise RunFailed(
                    f"{generator.generator_id} was given version {version} of the weights, but it has version "
                    f"{report.version}: it missed an update"
                )
            generator.paused_for_weights += report.pause_seconds + report.drain_seconds
            if self._due(generator, version):
                await self._probe(generator, published)
        except NotInstalled as error:
            if process == generator.process and generator.state not in (HealthState.LOST, HealthState.STARTING):
                await self._give_up(generator, version, error)
            raise
        finally:
            self._reading[version] -= 1
        if generator.state in (HealthState.LOST, HealthState.STARTING):
            raise ActorLost(f"{generator.generator_id} was lost when it had installed version {version}")
        if generator.since is None:
            generator.since = self._clock()
        generator.health.installed(version, version if generator.live else self.published.version)
        return report

    async def _with_its_disk(self, generator: Generator, call: Callable[..., Coroutine[Any, Any, T]], *args: Any) -> T:
        """What a call to it returns. A disk of its host that does not take weights is tried again: by one that was restarted
        until it does, by one that others wait for as long as an installation may take."""
        waited_for = generator.live or not generator.restarts
        began, limit = self._clock(), self._seconds(generator)
        told, name = self._events.warning, generator.generator_id
        wait = DiskWait(self._world, told, "weights_stalled", "weights_go_on", generator=name)

        async def attempt() -> T:
            try:
                return await call(*args)
            except (OSError, NotInstalled) as error:
                cause = error.cause if isinstance(error, NotInstalled) else error
                if is_disk_trouble(cause) and waited_for and self._clock() - began > limit:
                    raise NotInstalled(generator, cause) from error
                if not is_disk_trouble(cause):
                    raise
                generator.waits_for_disk = True
                raise cause from error

        try:
            return await wait.insist(DISK_HINT, attempt)
        finally:
            generator.waits_for_disk = False

    async def _give_up(self, generator: Generator, version: int, error: NotInstalled) -> None:
        """End its process; its supervisor does the rest, as for any loss. Raises `RunFailed` if nobody can install the
        version."""
        name = generator.generator_id
        self._events.warning(
            "install_failed", generator=name, pid=generator.pid, version=version, error=str(error)[:500]
        )
        if error.refused:
            if self._refused[0] != version:
                self._refused = version, Counter()
            self._refused[1][name] += 1
            if all(self._refused[1][g.generator_id] >= REFUSALS for g in self.fleet if not g.finished):
                raise RunFailed(f"{error} (no generator can install version {version} of the weights)") from error
        generator.ended_for = str(error)  # of its process, only that it is gone can be seen
        await end_process(self._world, generator.handle, *generator.process)

    async def _probe(self, generator: Generator, published: Published) -> None:
        """With what it has installed; or with a later version, if the learner did not score this one and has trained on."""
        scores, version = published.scores, published.version
        if scores is None and generator.probed < 0:
            try:  # without a limit: whether the learner answers at all is for `Watch` to judge
                scores = await self._learner.call("score", version)
            except ActorLost as error:  # this is not the generator's loss
                raise ProcessLost(f"the learner did not score the probe's text: {error}") from error
        if scores is not None:
            engine, name = partial(self._ask, generator), generator.generator_id
            try:
                await probe(engine, name, version, self._tokens or [], scores, self._config, self._events)
            except ProbeFailed:
                await self._keep(published)
                raise
            generator.probed = version

    async def _keep(self, published: Published) -> None:
        """For `r3async diagnose`: the version is not published any more when the run has ended."""
        if self._config.generator.engine == "scripted":
            return
        version, manifest = published.version, published.publication.manifest
        given = self._config, "weights.write_timeout", self._learner, "keep", manifest
        try:
            await ask(*given, failure="it was not written", seconds=self._config.weights.write_seconds(manifest.nbytes))
        except Exception as error:  # the probe's own message is the one to read
            self._events.warning("version_not_kept", version=version, error=str(error))
        else:
            self._events.info("version_kept", version=version, directory=KEPT)

    def _share(self, published: Published) -> Any:
        """A reference to the publication, made once for all generators: the names and checksums of 18,867 tensors take 20 ms to
        pickle."""
        if self._shared is None or self._shared[0] is not published:
            self._shared = published, self._world.actors.put(published.publication)
        return self._shared[1]

    async def _ask(self, generator: Generator, method: str, *args: Any) -> Any:
        """A generator's answer about its weights. Raises `ActorLost`; as `NotInstalled`, with its name and the reason, for
        anything but its loss."""
        generator.answers_in = self._seconds(generator)
        limit = generator.answers_in + RPC_SECONDS  # its own limit comes first, and its message is better
        call = asyncio.ensure_future(generator.handle.call(method, *args))
        generator.asked += 1
        try:
            answer = await self._answer(generator, call, limit)
            generator.answered += 1
            self.fleet.answered(generator)
            return answer
        except ActorLost:
            raise
        except Exception as error:
            if isinstance(error, TimeoutError) and not str(error):
                error = TimeoutError(f"no answer to `{method}` within {limit:g} s (weights.install_timeout)")
            raise NotInstalled(generator, error) from error
        finally:
            generator.asked -= 1
            call.cancel()

    def _seconds(self, generator: Generator) -> float:
        """That it has to install the newest version, or to answer anything about it."""
        nbytes = self.published.publication.manifest.nbytes
        return self._config.weights.install_seconds(nbytes, first=generator.version < 0)

    @staticmethod
    async def _answer(generator: Generator, call: asyncio.Future[Any], limit: float) -> Any:
        """Raises `TimeoutError`, but not while the generator is suspect: how long it may be silent is for `Watch` to judge."""
        while not call.done():
            await asyncio.wait([call], timeout=limit)
            if not call.done() and generator.state is not HealthState.SUSPECT:
                raise TimeoutError
        return call.result()

    # -- supervision ---------------------------------------------------------------------------------------------

    async def supervise(
        self,
        generator: Generator,
        conductor: ActorRef,
        *,
        stopping: Callable[[], bool],
        lost: Callable[[Generator], Awaitable[list[int]]],
    ) -> None:
        """Keep one generator playing until it has nothing more to play, or is lost while it leaves.

        A loss returns its leases; the restarted process installs current weights first. `lost` returns the leases, and says which
        groups are leased again. Raises `Exhausted` after `generator.max_restarts`, and what the generator itself raised.
        """
        while True:
            try:
                if generator.state is HealthState.LOST:
                    await self._revive(generator)
                await generator.handle.call("run", conductor)
                generator.finished = True
                return
            except ProcessLost:
                raise
            except ActorLost as error:
                if stopping():
                    return
                self.fleet.lose(generator)  # before anything is awaited: it is given no lease any more
                self.fleet.report_lost(generator, error, await lost(generator))
                if generator.leaving:
                    return

    async def settle(self, generator: Generator) -> None:
        """It has loaded its engine, and is connected: install the current weights."""
        # A version that is published meanwhile frees slots when the others have it: this one may not play with an older one.
        while generator.state is HealthState.STALE:
            await self._install(generator)

    async def _revive(self, generator: Generator) -> None:
        """Wait for the process to be restarted, load the engine, install the current weights.

        It is restarted at once. The back-off is ours: what it loads may be what kills it. Where only the connection was lost, its
        process lives: it has its engine, and ends what it plays, for others play that now.
        """
        health, began, wait, process = generator.health, self._clock(), generator.health.restart_in, generator.process
        try:
            health.restarting()
        except RestartsExhausted as error:
            raise Exhausted(
                f"{generator.generator_id} was lost {generator.restarts + 1} times (generator.max_restarts = "
                f"{self._config.generator.max_restarts}), the last time by: {generator.trouble or 'its end'}; see "
                f"logs/{generator.generator_id}.log"
            ) from error
        await asyncio.sleep(wait)
        await self._load_again(generator)
        if generator.process == process:
            self.fleet.found(generator)
        await self.settle(generator)
        self._wake()
        if generator.process == process:
            seconds = round(self._clock() - began, 1)
            self._events.warning(
                "generator_recovered", generator=generator.generator_id, pid=generator.pid, seconds=seconds
            )
            return
        self._events.warning(
            "generator_restarted",
            generator=generator.generator_id,
            pid=generator.pid,
            restarts=generator.restarts,
            version=generator.version,
            waited=round(wait, 2),
            seconds=round(self._clock() - began, 2),
        )

    async def _load_again(self, generator: Generator) -> None:
        """Its process is restarted: have it load its engine, and connect. What prevents that is its loss, once more."""
        try:
            await self._wait_until_alive(generator, self._clock() + self._config.generator.start_timeout)
            await self.fleet.load_one(generator)
            await self.connect(generator)
        except ActorLost:
            raise
        except Exception as error:
            await end_process(self._world, generator.handle, *generator.process)
            raise ActorLost(f"{generator.generator_id} was restarted and did not load: {error}") from error

    async def _wait_until_alive(self, generator: Generator, deadline: float) -> None:
        """Calls to an actor that is being restarted fail at once; wait until one is answered."""
        while True:
            try:
                await generator.handle.call("whereabouts", timeout=RPC_SECONDS)
                return
            except Exception as error:
                if self._clock() > deadline:
                    if isinstance(error, ActorLost):
                        raise
                    raise RunFailed(
                        f"{generator.generator_id} was restarted and did not answer in time (generator.start_timeout)"
                    ) from error
                await asyncio.sleep(0.5)
