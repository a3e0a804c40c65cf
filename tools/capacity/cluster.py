"""A simulated cluster: its parts, the time that each operation takes, and the resulting prediction."""

from __future__ import annotations

import heapq
import itertools
import random
from collections.abc import Callable
from statistics import fmean

import msgspec

from r3async.config import ScheduleConfig
from r3async.data.versions import ConsumedGroups
from r3async.schedule.admission import AdmissionController, GroupLease, max_groups_for_step


class Distribution(msgspec.Struct, frozen=True):
    """A distribution of a positive quantity.

    It is log-normal with this `median` and `sigma` (0: always the median), cut at `most`. If there are `values`, one
    of them is drawn instead.
    """

    median: float = 0.0
    sigma: float = 0.0
    most: float = float("inf")
    values: tuple[float, ...] = ()

    def draw(self, rng: random.Random) -> float:
        if self.values:
            return self.values[int(rng.random() * len(self.values))]
        drawn = self.median * rng.lognormvariate(0.0, self.sigma) if self.sigma else self.median
        return min(drawn, self.most)


class EngineSpeed(msgspec.Struct, frozen=True):
    """The speed of an engine; a token of one request takes `step_seconds + running * request_seconds`.

    Attributes:
        prefill_seconds: Seconds per prompt token, processed one at a time.
    """

    step_seconds: float
    request_seconds: float = 0.0
    prefill_seconds: float = 0.0

    def token(self, running: float) -> float:
        return self.step_seconds + running * self.request_seconds


class LearnerSpeed(msgspec.Struct, frozen=True):
    """The speed of the learner; a step takes `fixed + tokens * token_seconds`, counting the tokens fed forward.

    The other durations are those of publishing weights, in seconds.

    Attributes:
        snapshot: Blocks the learner.
        write: Blocks nothing.
        transfer: Blocks nothing.
        pause: Blocks every engine.
        waits: The learner continues only when the engines have its weights, as in systems that keep no copy.
    """

    fixed: float
    token_seconds: float = 0.0
    snapshot: float = 0.0
    write: float = 0.0
    transfer: float = 0.0
    pause: float = 0.0
    waits: bool = False


class Sharing(msgspec.Struct, frozen=True):
    """The slowdown of engines and learner that share the same cores.

    Attributes:
        engine: Factor on the time of a token while the learner trains.
        learner: Factor on the time of a step while all engines have requests; proportionally less while only some
            have.
    """

    engine: float = 1.0
    learner: float = 1.0


class Model(msgspec.Struct, frozen=True):
    """A run to simulate. Durations are in seconds.

    Attributes:
        turns: Turns of an episode.
        answer: Sampled tokens of a turn.
        prompt: Tokens that a turn's prompt adds to what was fed before.
        tool: Seconds that the environment takes after an answer.
        lost: Seconds between two failures of one generator (0: none).
        restart: Seconds until a failed generator plays again.
        bytes_per_token: Bytes of a token on the wire.
    """

    generators: int
    places: int
    prompts_per_step: int
    group_size: int
    max_staleness: int
    engine: EngineSpeed
    learner: LearnerSpeed
    turns: Distribution
    answer: Distribution
    prompt: Distribution = Distribution()
    tool: Distribution = Distribution()
    sharing: Sharing = Sharing()
    steps_per_publication: int = 1
    window: int = 1
    tokens_per_step: int = 0
    lost: float = 0.0
    restart: float = 60.0
    bytes_per_token: float = 0.0


class Prediction(msgspec.Struct, frozen=True):
    """The predicted figures of the steps after the first `settle`.

    Idle times are shares, ages are in versions, and token and byte figures are rates per second.
    """

    seconds_per_step: float
    learner_idle: float
    engine_idle: float
    """Share of engine time without a request."""
    mean_running: float
    """Mean number of running requests per engine."""
    mean_age: float
    max_age: int
    generated_tokens: float
    trained_tokens: float
    network_bytes: float
    lost_tokens: float
    """Share of the generated tokens that were lost with a generator."""
    leases: float
    """Calls of `AdmissionController.lease_group` per group."""
    step_ends: list[float]
    """Virtual time at the end of each step, in seconds."""


class Episode:
    """An episode being played.

    Attributes:
        version: The oldest version that may sample it; after its start, the version that it started with.
    """

    __slots__ = ("engine", "group", "index", "left", "serial", "tokens", "version")

    def __init__(self, group: int, index: int, engine: Engine, turns: int, serial: int, version: int):
        self.group, self.index, self.engine, self.left, self.serial = group, index, engine, turns, serial
        self.tokens, self.version = 0, version


class Engine:
    """An engine of the simulated cluster.

    Attributes:
        progress: Tokens that a request running since the beginning would have generated, as of time `at`.
        held: Episodes that wait for weights.
    """

    __slots__ = (
        "alive",
        "at",
        "held",
        "idle",
        "name",
        "playing",
        "progress",
        "requests",
        "running_time",
        "turn",
        "version",
    )

    def __init__(self, name: str):
        self.name, self.version, self.alive = name, 0, True
        self.progress, self.at, self.turn = 0.0, 0.0, 0
        self.requests: list[tuple[float, int, Episode]] = []
        self.held: list[Episode] = []
        self.playing: dict[int, Episode] = {}
        self.idle = self.running_time = 0.0


class Step:
    """The step that the learner is making.

    Attributes:
        left: Seconds that it would still take, as of time `at`, if no engine had requests.
    """

    __slots__ = ("at", "groups", "left", "turn")

    def __init__(self, groups: list[int], seconds: float, now: float):
        self.groups, self.left, self.at, self.turn = groups, seconds, now, 0


# A discrete-event simulation of a cluster: the production scheduler over engines and a learner that only take time.
#
# The classes of a real run decide what is leased when and what is trained next: `AdmissionController` (slots, leases,
# the staleness bound) and `ConsumedGroups` (the window). Engines, tools, the learner and the delivery of weights are
# durations drawn from distributions. There is one virtual clock and no event loop, so that a thousand engines cost
# seconds.
#
# An engine is a processor that its requests share: a token of each of `b` running requests takes `step_seconds + b *
# request_seconds`. A turn is a request for a number of tokens, after which its environment takes its time. Where
# engines and learner share a host's cores, each is slower while the other works (`Sharing`).


class Cluster:
    """One simulated run; see `predict`.

    Args:
        groups: Total number of groups to lease, if the run has an end.
    """

    def __init__(self, model: Model, seed: int = 0, groups: int | None = None):
        self.model, self.now = model, 0.0
        self._rng = random.Random(seed)
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._serial = itertools.count()
        schedule = ScheduleConfig(
            max_staleness=model.max_staleness,
            prompts_per_step=model.prompts_per_step,
            group_size=model.group_size,
            steps_per_publication=model.steps_per_publication,
            window=model.window,
        )
        self.admission = AdmissionController(schedule, choose_task=lambda group: group, total_groups=groups)
        self._slots = self.admission.slots
        self._consumed = ConsumedGroups(model.window)
        self._engines = {f"generator-{i}": Engine(f"generator-{i}") for i in range(model.generators)}
        self._arrived: dict[int, dict[int, Episode]] = {}
        self._complete: dict[int, bool] = {}
        """Groups that have arrived completely and wait to be trained."""
        self._free = dict.fromkeys(self._engines, True)
        """Engines that may have a place for another episode."""
        self._busy, self._idle_from, self._writing = False, 0.0, False
        self._training: Step | None = None
        self._working = 0
        """Number of engines that have requests."""
        self._copied = 0
        """Version whose weights wait to be written; 0 if none does."""
        self._installed_version = 0
        self.version = 0
        self._since = [0, 0]
        self.ages: list[tuple[float, int]] = []
        self.ends: list[float] = []
        self.waits: list[float] = []
        self.trained: list[int] = []
        self.generated = self.lost = self.asked = 0

    # -- the clock -----------------------------------------------------------------------------------------------

    def _after(self, seconds: float, what: Callable[[], None]) -> None:
        heapq.heappush(self._events, (self.now + seconds, next(self._serial), what))

    def run(self, steps: int, settle: int = 0) -> Prediction:
        """Simulate until `steps` steps are made, and return the prediction for those after the first `settle`."""
        for engine in self._engines.values():
            self._may_fail(engine)
        self._lease_all()
        start: tuple[float, float, float] | None = None
        while len(self.ends) < steps:
            if not self._events:
                raise RuntimeError(f"nothing happens any more after {len(self.ends)} steps")
            self.now, _, what = heapq.heappop(self._events)
            what()
            if start is None and len(self.ends) >= settle:
                start = self._totals()
        return self._prediction(settle, start or (0.0, 0.0, 0.0))

    # -- engines -------------------------------------------------------------------------------------------------

    def _advance(self, engine: Engine) -> None:
        passed = self.now - engine.at
        if passed <= 0:  # it is paused until `at`
            return
        if engine.requests:
            engine.progress += passed / self._token(engine)
            engine.running_time += passed * len(engine.requests)
        else:
            engine.idle += passed
        engine.at = self.now

    def _token(self, engine: Engine) -> float:
        """Return the seconds that each of the engine's requests takes for one token."""
        alone = self.model.engine.token(len(engine.requests))
        return alone if self._training is None else alone * self.model.sharing.engine

    def _expect(self, engine: Engine) -> None:
        """Schedule the end of the engine's next request; a change in between invalidates it."""
        engine.turn += 1
        if engine.requests:
            turn, left = engine.turn, engine.requests[0][0] - engine.progress
            seconds = max(0.0, left) * self._token(engine)
            self._after(max(0.0, engine.at - self.now) + seconds, lambda: self._answered(engine, turn))

    def _ask(self, episode: Episode) -> None:
        engine, rng = episode.engine, self._rng
        if engine.playing.get(episode.serial) is not episode:  # its process was lost
            return
        self._advance(engine)
        speed = self.model.engine
        tokens = max(1.0, self.model.answer.draw(rng))
        prefill = self.model.prompt.draw(rng) * speed.prefill_seconds / speed.token(len(engine.requests) + 1)
        episode.tokens += int(tokens)
        if not engine.requests:
            self._works(1)
        heapq.heappush(engine.requests, (engine.progress + tokens + prefill, episode.serial, episode))
        self._expect(engine)

    def _answered(self, engine: Engine, turn: int) -> None:
        if turn != engine.turn:
            return
        self._advance(engine)
        ended = []
        while engine.requests and engine.requests[0][0] <= engine.progress + 1e-9:
            ended.append(heapq.heappop(engine.requests)[2])
        if not engine.requests:
            self._works(-1)
        self._expect(engine)
        for episode in ended:
            self._after(self.model.tool.draw(self._rng), lambda e=episode: self._turn_over(e))  # type: ignore[misc]

    def _turn_over(self, episode: Episode) -> None:
        engine = episode.engine
        if engine.playing.get(episode.serial) is not episode:
            return
        episode.left -= 1
        if episode.left > 0:
            return self._ask(episode)
        del engine.playing[episode.serial]
        self._free[engine.name] = True
        self.generated += episode.tokens
        arrived = self._arrived.setdefault(episode.group, {})
        arrived[episode.index] = episode
        if len(arrived) == self.model.group_size:
            self._complete[episode.group] = True
            self._train()
        self._after(0.0, lambda: self._lease(engine))
        return None

    def _may_fail(self, engine: Engine) -> None:
        if self.model.lost:
            self._after(self._rng.expovariate(1 / self.model.lost), lambda: self._fail(engine))

    def _fail(self, engine: Engine) -> None:
        self._advance(engine)
        self.lost += sum(episode.tokens for episode in engine.playing.values())
        engine.playing.clear()
        if engine.requests:
            self._works(-1)
        engine.requests.clear()
        engine.held.clear()
        engine.turn += 1
        engine.alive = False
        self.admission.requeue_leases(engine.name, self._missing)
        self._after(self.model.restart, lambda: self._revive(engine))
        self._lease_all()

    def _revive(self, engine: Engine) -> None:
        engine.alive, engine.version = True, self._installed_version
        self._free[engine.name] = True
        self._lease(engine)
        self._may_fail(engine)

    def _missing(self, group: int) -> list[int]:
        if group in self._consumed:
            return []
        have = self._arrived.get(group, {})
        return [i for i in range(self.model.group_size) if i not in have]

    # -- leases --------------------------------------------------------------------------------------------------

    def _lease_all(self) -> None:
        if not self.admission.can_lease():
            return
        for name in list(self._free):
            self._lease(self._engines[name])

    def _lease(self, engine: Engine) -> None:
        if not engine.alive:
            return
        model = self.model
        while (free := model.places - len(engine.playing)) > 0 and self.admission.can_lease():
            self.asked += 1
            idle = sum(not self._engines[n].playing for n in self._free) if not engine.playing else 1
            lease = self.admission.lease_group(
                engine.name, free_episodes=free, max_episodes=model.places, idle_owners=max(1, idle)
            )
            if lease is None:
                return
            self._play(engine, lease)
        if free <= 0:
            self._free.pop(engine.name, None)

    def _play(self, engine: Engine, lease: GroupLease) -> None:
        for index in lease.episode_indices:
            turns = max(1, round(self.model.turns.draw(self._rng)))
            episode = Episode(lease.group_index, index, engine, turns, next(self._serial), lease.version)
            engine.playing[episode.serial] = episode
            self._begin(episode)

    def _begin(self, episode: Episode) -> None:
        engine = episode.engine
        if engine.version < episode.version:
            engine.held.append(episode)
        else:
            episode.version = engine.version
            self._ask(episode)

    # -- the learner ---------------------------------------------------------------------------------------------

    def _train(self) -> None:
        model = self.model
        if self._busy or len(self._complete) < model.prompts_per_step:
            return
        at_most = model.prompts_per_step
        if model.tokens_per_step:
            left = model.steps_per_publication - self._since[0]
            at_most = max_groups_for_step(
                slots=self._slots, prompts_per_step=at_most, steps_left=left, consumed_since=self._since[1]
            )
        chosen: list[int] = []
        tokens = 0
        for group in itertools.islice(self._consumed.trainable_groups(self._complete.__contains__), at_most):
            chosen.append(group)
            tokens += sum(e.tokens for e in self._arrived[group].values())
            if len(chosen) == at_most or (len(chosen) >= model.prompts_per_step and tokens >= model.tokens_per_step):
                break
        else:
            return
        self._busy = True
        self.waits.append(self.now - self._idle_from)
        self._consumed = self._consumed.after_consuming(chosen)
        members = [e for group in chosen if self._complete.pop(group) for e in self._arrived.pop(group).values()]
        ages = [self.version - e.version for e in members]
        self.ages.append((fmean(ages), max(ages)))
        self.trained.append(tokens)
        seconds = model.learner.fixed + tokens * model.learner.token_seconds
        self._set_training(Step(chosen, seconds, self.now))

    def _set_training(self, step: Step | None) -> None:
        shared = self.model.sharing.engine != 1
        if shared:
            for engine in self._engines.values():
                self._advance(engine)
        self._training = step
        if shared:
            for engine in self._engines.values():
                self._expect(engine)
        if step is not None:
            self._expect_step(step)

    def _slowness(self) -> float:
        """Return the factor by which the learner is slower now than alone."""
        return 1 + (self.model.sharing.learner - 1) * self._working / len(self._engines)

    def _works(self, more: int) -> None:
        """Record that an engine has its first request (1) or has answered its last (-1)."""
        step, shared = self._training, self.model.sharing.learner != 1
        if step is not None and shared:
            step.left -= (self.now - step.at) / self._slowness()
            step.at = self.now
        self._working += more
        if step is not None and shared:
            self._expect_step(step)

    def _expect_step(self, step: Step) -> None:
        """Schedule the end of the step; an engine that begins or stops working in between invalidates it."""
        step.turn += 1
        turn = step.turn
        self._after(max(0.0, step.left) * self._slowness(), lambda: self._stepped(step, turn))

    def _stepped(self, step: Step, turn: int) -> None:
        if turn != step.turn:
            return
        groups = step.groups
        self._set_training(None)
        self._since = [self._since[0] + 1, self._since[1] + len(groups)]
        self.admission.step_trained(self.version + 1, groups)
        if self._since[0] < self.model.steps_per_publication:
            self._step_ends()
            return
        self.version += 1
        self._since = [0, 0]
        self.admission.version_published(self.version)
        self._lease_all()
        self._copy()

    def _copy(self) -> None:
        """Copy the weights. At most one copy waits, because the version before has to be written first."""
        if self._writing:
            self._copied = self.version
            return  # the learner stays busy until the copy is made
        self._writing, self._copied, version = True, 0, self.version
        self._after(self.model.learner.snapshot, lambda: self._write(version))

    def _write(self, version: int) -> None:
        self._after(self.model.learner.write, lambda: self._written(version))
        if not self.model.learner.waits:
            self._step_ends()

    def _step_ends(self) -> None:
        self.ends.append(self.now)
        self._busy, self._idle_from = False, self.now
        self._train()

    def _written(self, version: int) -> None:
        """Deliver a written version; weights are written and delivered one version after the other."""
        self._after(self.model.learner.transfer, lambda: self._install(version))

    def _install(self, version: int) -> None:
        pause = self.model.learner.pause
        for engine in self._engines.values():
            if engine.alive:
                self._advance(engine)
                engine.at = max(engine.at, self.now + pause)
                self._expect(engine)
        self._after(pause, lambda: self._installed(version))

    def _installed(self, version: int) -> None:
        self._installed_version, self._writing = version, False
        for engine in self._engines.values():
            engine.version = version
            held, engine.held = engine.held, []
            for episode in held:
                self._begin(episode)
        if self.model.learner.waits:
            self._step_ends()
        if self._copied:
            self._copy()

    # -- the prediction ------------------------------------------------------------------------------------------

    def _totals(self) -> tuple[float, float, float]:
        for engine in self._engines.values():
            self._advance(engine)
        engines = self._engines.values()
        return self.generated, sum(e.idle for e in engines), sum(e.running_time for e in engines)

    def _prediction(self, settle: int, start: tuple[float, float, float]) -> Prediction:
        began = self.ends[settle - 1] if settle else 0.0
        elapsed, steps = self.ends[-1] - began, len(self.ends) - settle
        generated, idle, running = (now - before for now, before in zip(self._totals(), start, strict=True))
        engine_time = elapsed * len(self._engines)
        ages = self.ages[settle : len(self.ends)]
        trained = sum(self.trained[settle : len(self.ends)])
        return Prediction(
            seconds_per_step=elapsed / steps,
            learner_idle=sum(self.waits[settle : len(self.ends)]) / elapsed,
            engine_idle=idle / engine_time,
            mean_running=running / engine_time,
            mean_age=fmean(mean for mean, _ in ages),
            max_age=max(most for _, most in ages),
            generated_tokens=generated / elapsed,
            trained_tokens=trained / elapsed,
            network_bytes=trained / elapsed * self.model.bytes_per_token,
            lost_tokens=self.lost / max(self.generated + self.lost, 1),
            leases=self.asked / max(self.admission.groups_leased, 1),
            step_ends=self.ends,
        )


def predict(model: Model, *, steps: int = 32, settle: int = 8, seed: int = 0, ends: bool = False) -> Prediction:
    """Predict the first `steps` steps of a run of `model`.

    The figures are those of the steps after the first `settle`, in which the pipeline fills. With `ends`, the run
    has only these steps: nothing beyond their need is generated, so engines are idle towards the end.
    """
    groups = steps * model.prompts_per_step if ends and not model.tokens_per_step else None
    return Cluster(model, seed, groups).run(steps, settle)
