"""Sections `serving` (the OpenAI-compatible endpoint of a generator) and `evaluation`."""

from __future__ import annotations

import msgspec

from r3async.config.hosts import is_loopback
from r3async.config.secret import Secret
from r3async.config.section import Port, Positive, PositiveInt, Section, Seed, Signed
from r3async.config.sections import EnvConfig


class ServingConfig(Section):
    """An environment `agent:…` or `agent-command` has its endpoint in any case, for its own episodes; `enabled` opens the door
    to agents that others start."""

    enabled: bool = False
    """Whether who has the token may begin sessions. Address and token of each generator are in `runs/NAME/serving-*.json`."""
    host: str = "127.0.0.1"
    """Interface of the endpoint. Loopback unless named; any other needs a `token`."""
    port: Port = 0
    """0: a free one. A number fits one generator a host only."""
    token: Secret = msgspec.field(default_factory=Secret)
    """A text: what beginning a session takes. Empty: a random one a generator. `$NAME`: that of an environment variable of the
    generator. It is written to no file, so a run that is resumed has to be given it again, unless it is a `$NAME`."""
    model_name: str = "policy"
    """What `/v1/models` calls the model. Requests may name any."""
    max_body_bytes: PositiveInt = 4 * 2**20
    """Of one request; a longer one is refused before it is read."""
    max_messages: PositiveInt = 1024
    """In one request, and as many tools; more are refused before the chat template sees them."""
    max_connections: PositiveInt = 512
    """To one generator's endpoint at once; further ones are closed."""
    read_timeout: Positive = 30.0
    """Seconds that a connection may take for the head of a request, and for its body."""
    max_sessions: PositiveInt = 64
    """Sessions that may be open at once for agents that others start."""
    unrewarded: Signed | None = None
    """Reward of an episode whose agent gave none. Unset: such an episode is an error, and is tried again."""

    def __post_init__(self) -> None:
        if isinstance(self.token, str):
            self.token = Secret(self.token)
        if not is_loopback(self.host) and not self.token:
            raise ValueError(
                f"`host` = {self.host!r} is open to other machines: set `token` to a secret, or leave `host` at 127.0.0.1"
            )


class EvaluationConfig(Section):
    """Episodes that are played beside the training, and are never trained."""

    every: int = 0
    """Steps between two evaluations; one more follows the last step. 0: none."""
    at_start: bool = False
    """Also before the first step."""
    episodes: PositiveInt = 32
    env: EnvConfig = msgspec.field(default_factory=lambda: EnvConfig(name=""))
    """Which environment. An empty name: the one that is trained, with its arguments."""
    seed: Seed = 0
    """Of the tasks. Every evaluation poses the same ones, and training poses none of them."""
    timeout: Positive = 1800.0
    """Seconds after which an evaluation is given up."""

    def __post_init__(self) -> None:
        if not self.env.name and self.env.args:
            raise ValueError("`env.args` without `env.name`: name the environment that they are for")
