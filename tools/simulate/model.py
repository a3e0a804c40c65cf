"""What a predicted cluster is made of, how long everything takes there, and what comes of it."""

from __future__ import annotations

import random

import msgspec


class Distribution(msgspec.Struct, frozen=True):
    """Of a positive quantity: log-normal with this `median` and `sigma` (0: always the median), cut at `most`; or, if there are
    `values`, one of them."""

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
    """Seconds a token of one request: `step_seconds + running * request_seconds`. `prefill_seconds`: a token of a prompt, of
    which the engine does one at a time."""

    step_seconds: float
    request_seconds: float = 0.0
    prefill_seconds: float = 0.0

    def token(self, running: float) -> float:
        return self.step_seconds + running * self.request_seconds


class LearnerSpeed(msgspec.Struct, frozen=True):
    """Seconds a step: `fixed + tokens * token_seconds`, tokens being those fed forward; and what publishing takes. `snapshot`
    holds up the learner, `write` and `transfer` nobody, `pause` every engine. `waits`: the learner trains on only when the
    engines have its weights, as systems without a copy do."""

    fixed: float
    token_seconds: float = 0.0
    snapshot: float = 0.0
    write: float = 0.0
    transfer: float = 0.0
    pause: float = 0.0
    waits: bool = False


class Sharing(msgspec.Struct, frozen=True):
    """Engines and learner on the same cores. `engine`: so many times longer a token takes while the learner trains. `learner`: so
    many times longer a step takes while all engines have requests, and in proportion while some have."""

    engine: float = 1.0
    learner: float = 1.0


class Model(msgspec.Struct, frozen=True):
    """A run. Tokens are counted, seconds measured. `turns`: of an episode; `answer`, `prompt`: tokens of a turn that are sampled,
    and that its prompt has more than was fed before; `tool`: seconds of the environment after an answer. `lost`: seconds between
    two failures of one generator (0: none), `restart`: seconds until it plays again. `bytes_per_token`: on the wire."""

    generators: int
    places: int
    groups_per_step: int
    samples_per_group: int
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
    """Of the steps after the first `settle`. Shares of time; ages in versions; rates a second."""

    seconds_per_step: float
    learner_idle: float
    engine_idle: float
    """Share of engine time without a request."""
    mean_running: float
    """Requests in an engine."""
    mean_age: float
    max_age: int
    generated_tokens: float
    trained_tokens: float
    network_bytes: float
    lost_tokens: float
    """Share of what was generated that was lost with a generator."""
    leases: float
    """Calls of `AdmissionController.lease_group` a group."""
    step_ends: list[float]
    """Virtual seconds."""


class Episode:
    """One that is played. `version`: the oldest that may sample it; once it has begun, that which began it."""

    __slots__ = ("engine", "group", "index", "left", "serial", "tokens", "version")

    def __init__(self, group: int, index: int, engine: Engine, turns: int, serial: int, version: int):
        self.group, self.index, self.engine, self.left, self.serial = group, index, engine, turns, serial
        self.tokens, self.version = 0, version


class Engine:
    """One of the cluster. `progress`: tokens that each request which ran all the time has made, as of `at`. `held`: episodes
    that wait for weights."""

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
    """The one that the learner makes. `left`: seconds that it would still take, as of `at`, if no engine had requests."""

    __slots__ = ("at", "groups", "left", "turn")

    def __init__(self, groups: list[int], seconds: float, now: float):
        self.groups, self.left, self.at, self.turn = groups, seconds, now, 0
