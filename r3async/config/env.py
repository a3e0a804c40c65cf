"""The configuration section `env`: one environment, or the entries of `[[env]]`."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, NamedTuple

import msgspec

from r3async.config.episode import EpisodeConfig
from r3async.config.secrets import Secret, reveal_secrets
from r3async.config.section import ConfigError, PositiveFloat, PositiveInt, Section
from r3async.config.shorthand import MIX_ENV


class EnvConfig(Section):
    """The environment. For several, each with a weight, use `[[env]]`, see below."""

    name: str = "reverse-text"
    """Name of the environment (docs/environments.md). Built-in, `module:Class`, `file.py:Class`,
    `dataset` (set by `data=FILE`), or an adapter's: `reasoning-gym:TASK`, `gymnasium:ID`,
    `textarena:ID`, `verifiers:ID`, `openenv:URL`, `harbor:FOLDER`."""
    args: dict[str, Any] = msgspec.field(default_factory=dict)
    """Arguments of the environment's constructor."""
    workers: PositiveInt = 2
    """Processes per generator that run blocking environments (plain `def reset` and `def step`)."""
    step_timeout: PositiveFloat = 30.0
    """Seconds that one call of a blocking environment may take before its process is
    replaced."""
    start_timeout: PositiveFloat = 120.0
    """Seconds that such a process may take to start."""
    variables: list[str] = msgspec.field(default_factory=list)
    """Environment variables of the generator that these processes and the programs of
    `agent-command` get, besides the usual ones (PATH, HOME, LANG, TMPDIR, PYTHON…)."""

    def check_values(self) -> None:
        self.args = _hide_secrets(self.name, self.args)
        if self.name == MIX_ENV:
            self.args = {label: _hide_entry_secrets(entry) for label, entry in self.args.items()}

    def reveal_args(self, setting: str = "env.args") -> dict[str, Any]:
        """Return `args` with their secrets revealed. Raises `ConfigError`."""
        return reveal_secrets(self.args, setting)


def _hide_secrets(name: str, args: dict[str, Any]) -> dict[str, Any]:
    """Return `args` with the values of `args.environment` wrapped as secrets, and so those words
    that may be secrets in a command, or in the servers of `mcp:TASK`."""
    environment = args.get("environment")
    if isinstance(environment, Mapping):
        args = {
            **args,
            "environment": {name: _wrap_secret(value) for name, value in environment.items()},
        }
    if name.startswith("mcp:"):
        servers = args.get("servers")
        if isinstance(servers, Mapping):
            args = {
                **args,
                "servers": {
                    label: _hide_server_secrets(server) for label, server in servers.items()
                },
            }
    if name == "agent-command":
        words = args.get("command")
        if isinstance(words, list):
            args = {**args, "command": _command_with_secrets(words)}
    return args


_VARIABLE_REFERENCE = re.compile(
    r"(?:(?:Bearer|Basic|Token|ApiKey) )?\$(?:\w+|\{\w+\})", re.IGNORECASE
)
_FLAG_PATTERN = re.compile(r"-\w|--[\w-]+")
_NAMES_A_SECRET = re.compile(
    r"--?[\w-]*(?:key|token|secret|password|credential)s?(=.*)?", re.IGNORECASE | re.DOTALL
)


def _command_with_secrets(words: list[Any]) -> list[Any]:
    """Return a command with those words wrapped as secrets that a flag such as `--api-key` is
    given, behind it or in the same word. The other words show which agent it is."""
    flags = [_NAMES_A_SECRET.fullmatch(word) if isinstance(word, str) else None for word in words]
    behind = [False, *(flag is not None and flag[1] is None for flag in flags)]
    return [
        _wrap_secret(w) if after or (f and f[1]) else w
        for w, f, after in zip(words, flags, behind, strict=False)
    ]


def _hide_server_secrets(server: Any) -> Any:
    """Return an MCP server's settings with secrets wrapped: headers that name no variable, the
    words of a command except its program and flags, and a URL with a user or a query."""
    if not isinstance(server, Mapping):
        return server
    hidden = dict(server)
    headers = server.get("headers")
    if isinstance(headers, Mapping):
        hidden["headers"] = {
            name: value
            if isinstance(value, str) and _VARIABLE_REFERENCE.fullmatch(value)
            else _wrap_secret(value)
            for name, value in headers.items()
        }
    words = server.get("command")
    if isinstance(words, list):
        rest = [
            word if isinstance(word, str) and _FLAG_PATTERN.fullmatch(word) else _wrap_secret(word)
            for word in words[1:]
        ]
        hidden["command"] = [*words[:1], *rest]
    url = server.get("url")
    if isinstance(url, str) and not {"?", "@"}.isdisjoint(url):
        hidden["url"] = _wrap_secret(url)
    return hidden


def _wrap_secret(value: Any) -> Any:
    return Secret(value) if isinstance(value, str) else value


def _hide_entry_secrets(entry: Any) -> Any:
    if isinstance(entry, Mapping):
        args = entry.get("args")
        if isinstance(args, dict):
            return {**entry, "args": _hide_secrets(str(entry.get("name", "")), args)}
    return entry


# Several environments in one run: the entries of `[[env]]`.


class EnvEntryConfig(EnvConfig):
    """One of several environments: `[[env]]`, once for each, with the keys of `[env]`, or
    `data` and `reward`, and those below. In `config.toml` and on the command line they are
    `env.args.LABEL` of the environment `mix`: `env.args.guess.weight=2`. An unset key has the
    value of `[episode]`, which is also its maximum."""

    weight: PositiveFloat = 1.0
    """Share of the groups, relative to the sum of all weights."""
    max_turns: PositiveInt | None = None
    max_new_tokens: PositiveInt | None = None
    max_prompt_tokens: PositiveInt | None = None
    max_total_tokens: PositiveInt | None = None
    timeout: PositiveFloat | None = None


EPISODE_LIMITS = ("max_turns", "max_new_tokens", "max_prompt_tokens", "max_total_tokens", "timeout")


class RunEnv(NamedTuple):
    """An environment of a run.

    Attributes:
        label: Its name in metrics; "" if it is the only one.
        env: Its section `[env]`.
        weight: Its share of the groups, relative to the sum of all weights.
        episode: The section `[episode]`, with this environment's own limits.
    """

    label: str
    env: EnvConfig
    weight: float
    episode: EpisodeConfig


def resolve_env(label: str, entry: EnvEntryConfig, episode: EpisodeConfig) -> RunEnv:
    """Return the environment of a mix's entry, with its own episode limits. Raises `ConfigError`
    that names the entry."""
    limits: dict[str, Any] = {
        name: value for name in EPISODE_LIMITS if (value := getattr(entry, name)) is not None
    }
    for name, value in limits.items():
        most = getattr(episode, name)
        if value > most:
            raise ConfigError(
                f"`env.args.{label}.{name}` = {value} is more than `episode.{name}` = {most}, "
                "which is the most that any environment of the run may have: raise that"
            )
    env = EnvConfig(**{name: getattr(entry, name) for name in EnvConfig.__struct_fields__})
    try:
        return RunEnv(label, env, entry.weight, msgspec.structs.replace(episode, **limits))
    except ValueError as error:
        raise ConfigError(f"[env.args.{label}] {error}") from error
