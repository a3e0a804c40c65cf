"""The conductor's deliveries: it installs new weights in its generators, and has them probed."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Coroutine, Sequence
from functools import partial
from typing import Any, TypeVar

from r3async.actors.generator_probe import ProbeFailed, probe_generator
from r3async.rollout.engine import EngineLostError, InstallReport
from r3async.schedule.health import HealthState
from r3async.weights.manifest import BASE_VERSION
from r3async.weights.probe import FAILED_MODEL_DIRECTORY, resolve_probe_tolerance
from r3async.world import ActorLostError, ActorRef, World
from r3async.world.disk_retries import DiskRetrier, is_disk_error
from r3async.world.real import REAL_WORLD

from .fleet import Fleet, FleetGenerator, LearnerAddress, end_generator
from .process import RPC_SECONDS, ProcessLost, RunFailed, call_with_limit
from .version_publisher import Published

T = TypeVar("T")

DELIVERY_POLL_SECONDS = 0.5
"""Maximum seconds between two looks, during a delivery, at which generators still answer."""
MAX_REFUSALS = 2
"""Number of refusals of a version by each generator, each time in another process, after which no
generator can install it."""
INSTALL_DISK_HINT = (
    "free bytes there, or file descriptors of this process: the others go on, and nothing is lost"
)


class InstallFailed(ActorLostError):
    """A generator did not install weights, or did not answer the probe, because of `cause`. Its
    process is ended, as if it were lost."""

    def __init__(self, generator: FleetGenerator, cause: Exception):
        super().__init__(f"{generator.generator_id}: {str(cause) or repr(cause)}")
        self.cause = cause

    @property
    def is_refusal(self) -> bool:
        """True if the generator answered that it cannot. Otherwise no answer came in time, a disk
        did not take the weights, or the engine was lost before."""
        return not isinstance(self.cause, (OSError, EngineLostError))


class VersionDelivery:
    """The conductor's installer of versions in generators. Lives on its event loop, from the
    first version on.

    An installation that fails counts as the loss of its generator, which is restarted. It ends the
    run only if restarts would have no end: no generator can install the version, or none is left.
    The run ends at once if an engine has installed something else than what was published.

    Args:
        learner_address: Address of the learner, to which generators connect.
        probe_tokens: Tokens of the probe's text, if there is a probe.
        newest_published: Newest version of the `learner`, the only one that is still delivered.
    """

    def __init__(
        self,
        fleet: Fleet,
        learner: ActorRef,
        learner_address: LearnerAddress,
        probe_tokens: Sequence[int] | None,
        newest_published: Published,
        world: World = REAL_WORLD,
    ):
        self.fleet = fleet
        self._config = fleet.config
        self._events = fleet.events
        self.learner = learner
        self.learner_address = learner_address
        self._probe_tokens = probe_tokens
        self.newest_published = newest_published
        self._world = world
        self._clock = world.clock.monotonic
        self._base = newest_published.base
        """Offer of the weights that adapters are added to; None if versions have all weights."""
        self._shared_offer: tuple[Published, Any] | None = None
        self._scored_version = newest_published.version
        """Last version with which the learner was asked to score the probe's text."""
        self._checked_version = -1
        self._ended_deliveries: dict[str, None] = {}
        """Names of the generators whose delivery has ended since all generators were last checked
        for version `_checked_version`."""
        self._kept_back: set[str] = set()
        """Names of the generators that kept their version when all were last checked."""
        self._readers: Counter[int] = Counter()
        """Number of engines that read a version now, by version."""
        self._refusals: tuple[int, Counter[str]] = -1, Counter()
        """Version that was refused last, and the number of refusals by generator."""

    @property
    def versions_in_use(self) -> list[int]:
        """The versions that engines are reading now, and the base that a restarted one needs."""
        base = [] if self._base is None else [BASE_VERSION]
        return base + [version for version, readers in self._readers.items() if readers]

    def needs_probe_scores(self, version: int) -> bool:
        """Return True if a generator is due to be probed with `version`, which the learner makes
        next, and cannot be probed with a version that is on its way. Such a version is remembered
        as the one to score."""
        on_its_way = self.newest_published.version < self._scored_version < version
        due = [g for g in self.fleet if not g.is_finished and self._is_probe_due(g, version)]
        if any(g.probed_version < 0 or (g.install_task is None and not on_its_way) for g in due):
            self._scored_version = version
        return self._scored_version == version

    def _is_probe_due(self, generator: FleetGenerator, version: int) -> bool:
        if self._probe_tokens is None:
            return False
        return (
            generator.probed_version < 0
            or version - generator.probed_version >= self._config.weights.probe_every
        )

    async def install_first_version(self) -> None:
        """Connect all generators, and deliver the first version in the same way as every later one.
        Raises what an installation raised. Generators that are lost meanwhile are left to
        `GeneratorSupervisor`."""
        await asyncio.gather(*(self._connect_and_install(g) for g in self.fleet))

    async def _connect_and_install(self, generator: FleetGenerator) -> None:
        try:
            await self.connect_generator(generator)
            await self._install_newest(generator)
        except ProcessLost:
            raise
        except ActorLostError as error:
            self.fleet.mark_lost(generator)
            self.fleet.report_lost(generator, error, [])

    async def connect_generator(self, generator: FleetGenerator) -> None:
        """Connect a generator to the learner, and to the transport of its weights, for which its
        host has to make a folder."""
        await self._retry_disk_trouble(
            generator, self.fleet.connect_generator, generator, self.learner_address
        )

    @property
    def needs_delivery(self) -> bool:
        """True if a delivery has something to do: a generator lacks the newest version and is
        installing none, or its installation has ended."""
        version = self.newest_published.version
        changed = [
            self.fleet[name]
            for name in self._ended_deliveries.keys() | self._kept_back
            if name in self.fleet.generators
        ]
        looked = changed if self._checked_version >= version else self.fleet
        return any(
            g.install_task.done()
            if g.install_task is not None
            else g.is_live and g.version < version and not g.keeps_version
            for g in looked
        )

    async def deliver_newest(self) -> dict[str, float] | None:
        """Install the newest published version in every live generator that lacks it.

        Returns when all that are not suspect have it. A generator that is suspect, or becomes so
        meanwhile, is given it as well, but nothing waits for it. One that keeps its version gets it
        later. Returns metrics of the slowest; None if no generator has it: one that is restarted,
        recovers or keeps its version no longer installs it. Raises `RunFailed` if a generator does
        not have what was published, or none can install it.
        """
        version = self.newest_published.version
        before = self._clock()
        reports: list[InstallReport] = []
        while awaited := self._start_deliveries(version, reports):
            await asyncio.wait(
                awaited, timeout=DELIVERY_POLL_SECONDS, return_when=asyncio.FIRST_EXCEPTION
            )
        if not any(g.version >= version for g in self.fleet):
            return None
        return {
            "timing/weight_update_seconds": self._clock() - before,
            "timing/weight_transfer_seconds": max(
                (r.fetch_seconds + r.verify_seconds for r in reports), default=0.0
            ),
            "timing/weight_load_seconds": max((r.load_seconds for r in reports), default=0.0),
            "timing/engine_pause_seconds": max((r.pause_seconds for r in reports), default=0.0),
            "weights/bytes": self.newest_published.publication.manifest.nbytes,
        }

    def _start_deliveries(
        self, version: int, reports: list[InstallReport]
    ) -> list[asyncio.Task[InstallReport]]:
        """Have each live generator that lacks `version` install the newest version, one delivery at
        a time, and collect the deliveries that have ended. Returns the deliveries to wait for."""
        awaited = []
        self._checked_version = version
        self._ended_deliveries = {}
        self._kept_back = set()
        for generator in self.fleet:
            if generator.install_task is not None and generator.install_task.done():
                self._collect_delivery(generator, generator.install_task, reports)
            if not generator.is_live or generator.version >= version:
                continue
            if generator.keeps_version:
                self._kept_back.add(generator.generator_id)
                continue
            if generator.install_task is None:
                generator.install_task = asyncio.create_task(self._install_newest(generator))
                generator.install_task.add_done_callback(
                    partial(self._note_delivery_end, generator.generator_id)
                )
            if generator.state is HealthState.HEALTHY:
                awaited.append(generator.install_task)
        return awaited

    def _note_delivery_end(self, generator_id: str, task: asyncio.Task[InstallReport]) -> None:
        self._ended_deliveries[generator_id] = None
        if not task.cancelled():
            task.exception()  # mark it as retrieved; `_collect_delivery` handles it
        self.fleet.announce_change()  # `deliver_newest` has something to do again

    @staticmethod
    def _collect_delivery(
        generator: FleetGenerator, task: asyncio.Task[InstallReport], reports: list[InstallReport]
    ) -> None:
        generator.install_task = None
        if task.cancelled():
            return
        error = task.exception()
        if error is None:
            reports.append(task.result())
        elif isinstance(error, ProcessLost) or not isinstance(error, ActorLostError):
            raise error
        elif generator.is_live:  # otherwise its supervisor knew before, and may be restarting it
            generator.health.mark_lost()

    async def _install_newest(self, generator: FleetGenerator) -> InstallReport:
        """Install the newest version, which the generator has to confirm, and probe
        it if that is due.

        A generator that plays continues with it, whatever is published meanwhile. A generator that
        does not play yet starts only with the version that is the newest when the installation is
        done: the others may have that by then.
        """
        published = self.newest_published
        process = generator.process
        version = published.version
        self._readers[version] += 1
        try:
            if self._base is not None and generator.version < 0:
                await self._retry_disk_trouble(
                    generator, self._call_generator, generator, "install_version", self._base
                )
            offer = self._put_offer(published)
            report: InstallReport = await self._retry_disk_trouble(
                generator, self._call_generator, generator, "install_version", offer
            )
            if report.version != version:
                raise RunFailed(
                    f"{generator.generator_id} was given version {version} of the weights, but it "
                    f"has version {report.version}: it missed an update"
                )
            generator.paused_seconds += report.pause_seconds + report.drain_seconds
            if self._is_probe_due(generator, version):
                await self._probe_generator(generator, published)
        except InstallFailed as error:
            if process == generator.process and generator.state not in (
                HealthState.LOST,
                HealthState.STARTING,
            ):
                await self._end_failed_generator(generator, version, error)
            raise
        finally:
            self._readers[version] -= 1
        if generator.state in (HealthState.LOST, HealthState.STARTING):
            raise ActorLostError(
                f"{generator.generator_id} was lost when it had installed version {version}"
            )
        if generator.first_weights_at is None:
            generator.first_weights_at = self._clock()
        generator.health.mark_installed(
            version, version if generator.is_live else self.newest_published.version
        )
        return report

    async def _retry_disk_trouble(
        self, generator: FleetGenerator, call: Callable[..., Coroutine[Any, Any, T]], *args: Any
    ) -> T:
        """Return the result of `call`, which is repeated while a disk of the generator's host does
        not take weights.

        A restarted generator tries until the disk does. A generator for which others wait tries for
        as long as an installation may take.
        """
        waited_for = generator.is_live or not generator.restarts
        began, limit = self._clock(), self._install_seconds(generator)
        wait = DiskRetrier(
            self._world,
            self._events.warning,
            "weights_stalled",
            "weights_go_on",
            generator=generator.generator_id,
        )

        async def attempt() -> T:
            try:
                return await call(*args)
            except (OSError, InstallFailed) as error:
                cause = error.cause if isinstance(error, InstallFailed) else error
                if is_disk_error(cause) and waited_for and self._clock() - began > limit:
                    raise InstallFailed(generator, cause) from error
                if not is_disk_error(cause):
                    raise
                generator.is_waiting_for_disk = True
                raise cause from error

        try:
            return await wait.run_with_retries(INSTALL_DISK_HINT, attempt)
        finally:
            generator.is_waiting_for_disk = False

    async def _end_failed_generator(
        self, generator: FleetGenerator, version: int, error: InstallFailed
    ) -> None:
        """End the generator's process; its supervisor does the rest, as for any loss. Raises
        `RunFailed` if no generator can install the version."""
        name = generator.generator_id
        self._events.warning(
            "install_failed",
            generator=name,
            pid=generator.pid,
            version=version,
            error=str(error)[:500],
        )
        if error.is_refusal:
            if self._refusals[0] != version:
                self._refusals = version, Counter()
            self._refusals[1][name] += 1
            if all(
                self._refusals[1][g.generator_id] >= MAX_REFUSALS
                for g in self.fleet
                if not g.is_finished
            ):
                raise RunFailed(
                    f"{error} (no generator can install version {version} of the weights)"
                ) from error
        await end_generator(self._world, generator, str(error))

    async def _probe_generator(self, generator: FleetGenerator, published: Published) -> None:
        """Probe a generator with what it has installed. If the learner did not score this version
        and has trained on, the probe is left to a later version."""
        scores = published.scores
        version = published.version
        if scores is None and generator.probed_version < 0:
            try:  # without a limit: `StallMonitor` judges whether the learner answers at all
                scores = await self.learner.call("score_probe", version)
            except ActorLostError as error:  # a loss of the learner, not of the generator
                raise ProcessLost(f"the learner did not score the probe's text: {error}") from error
        if scores is not None:
            engine = partial(self._call_generator, generator)
            name = generator.generator_id
            try:
                tolerance = resolve_probe_tolerance(self._config, generator.is_on_gpu)
                await probe_generator(
                    engine,
                    name,
                    version,
                    self._probe_tokens or [],
                    scores,
                    tolerance,
                    self._config,
                    self._events,
                )
            except ProbeFailed:
                await self._save_failed_version(published)
                raise
            generator.probed_version = version

    async def _save_failed_version(self, published: Published) -> None:
        """Save a version with which a probe failed, for `r3async diagnose`: it is not published any
        more when the run has ended."""
        if self._config.generator.engine == "scripted":
            return
        version = published.version
        manifest = published.publication.manifest
        try:
            await call_with_limit(
                self.learner,
                "save_failed_version",
                manifest,
                failure="it was not written",
                seconds=self._config.supervise.limits.version_write(manifest.nbytes),
            )
        except Exception as error:  # the probe's own message is the one to read
            self._events.warning("version_not_kept", version=version, error=str(error))
        else:
            self._events.info("version_kept", version=version, directory=FAILED_MODEL_DIRECTORY)

    def _put_offer(self, published: Published) -> Any:
        """Return a reference to the publication, made once for all generators: the names and
        checksums of 18,867 tensors take 20 ms to pickle."""
        if self._shared_offer is None or self._shared_offer[0] is not published:
            self._shared_offer = published, self._world.actors.put(published.publication)
        return self._shared_offer[1]

    async def _call_generator(self, generator: FleetGenerator, method: str, *args: Any) -> Any:
        """Call a generator about its weights and return its answer. Raises `ActorLostError` if
        it is lost, and its subclass `InstallFailed`, with the generator's name and the reason,
        for anything else."""
        generator.answer_seconds = self._install_seconds(generator)
        # The generator's own limit comes first, because its message is better.
        limit = generator.answer_seconds + RPC_SECONDS
        call = asyncio.ensure_future(generator.handle.call(method, *args))
        generator.open_calls += 1
        try:
            answer = await self._await_answer(generator, call, limit)
            generator.answered_calls += 1
            self.fleet.note_answer(generator)
            return answer
        except ActorLostError:
            raise
        except Exception as error:
            if isinstance(error, TimeoutError) and not str(error):
                error = TimeoutError(
                    f"no answer to `{method}` within {limit:g} s (supervise.patience)"
                )
            raise InstallFailed(generator, error) from error
        finally:
            generator.open_calls -= 1
            call.cancel()

    def _install_seconds(self, generator: FleetGenerator) -> float:
        """Return the seconds that a generator has to install the newest version, or to answer
        anything about it."""
        nbytes = self.newest_published.publication.manifest.nbytes
        if self._base is not None and generator.version < 0:
            nbytes += self._base.manifest.nbytes
        return self._config.supervise.limits.install(nbytes, first=generator.version < 0)

    @staticmethod
    async def _await_answer(
        generator: FleetGenerator, call: asyncio.Future[Any], limit: float
    ) -> Any:
        """Wait for the answer of `call`. Raises `TimeoutError` after `limit` seconds, but not while
        the generator is suspect: `StallMonitor` judges how long it may be silent."""
        while not call.done():
            await asyncio.wait([call], timeout=limit)
            if not call.done() and generator.state is not HealthState.SUSPECT:
                raise TimeoutError
        return call.result()

    async def install_until_current(self, generator: FleetGenerator) -> None:
        """Install the current weights in a generator that has loaded its engine
        and is connected."""
        # A version that is published meanwhile frees slots when the others have it: this generator
        # may not play with an older one.
        while generator.state is HealthState.STALE:
            await self._install_newest(generator)
