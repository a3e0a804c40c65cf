"""The configuration section `serving`: the endpoint for agents."""

from __future__ import annotations

import ipaddress

import msgspec

from r3async.config.secrets import Secret
from r3async.config.section import Port, PositiveInt, Section, SignedFloat

LOOPBACK_HOST = "127.0.0.1"


def is_loopback_host(host: str) -> bool:
    """Return whether only this machine can reach `host`. A name other than `localhost` counts as
    reachable by others.

    Accepts IPv6 with and without brackets, and IPv4-mapped addresses (`::ffff:127.0.0.1`).
    """
    if host == "localhost":
        return True
    try:
        address = ipaddress.ip_address(strip_brackets(host))
    except ValueError:
        return False
    # Python before 3.13 does not look into a mapped address.
    return (getattr(address, "ipv4_mapped", None) or address).is_loopback


def strip_brackets(host: str) -> str:
    """Return `host` without the brackets of an IPv6 address, as sockets take it."""
    return host.removeprefix("[").removesuffix("]")


def bracket_ipv6(host: str) -> str:
    """Return `host` with the brackets that a URL puts around an IPv6 address."""
    return f"[{strip_brackets(host)}]" if ":" in host else host


def replace_host(endpoint: str, host: str) -> str:
    """Return the endpoint `tcp://HOST:PORT` with another host."""
    return f"tcp://{host}:{endpoint.rpartition(':')[2]}"


class ServingConfig(Section):
    """The generators' endpoint for agents. An environment `agent:…` or `agent-command` always has
    its endpoint, for its own episodes; `enabled` opens it to agents that others start."""

    enabled: bool = False
    """Let anyone who has the token begin sessions (`runs/NAME/serving-*.json`)."""
    host: str = "127.0.0.1"
    """Interface of the endpoint. Loopback unless set; any other needs a `token`."""
    port: Port = 0
    """Port of the endpoint. 0: a free one. A fixed one allows one generator a host."""
    token: Secret = msgspec.field(default_factory=Secret)
    """Token for opening sessions. Empty: a random one for each generator. `$NAME`: a variable of
    the generator. It is written to no file, so give it again when you resume, unless it is a
    `$NAME`."""
    tool_parser: str = "auto"
    """Parser of tool calls. `auto`: by the form of the chat template. `builtin`: r3async's, for
    the form of Hermes and Qwen. Otherwise vLLM's of that name, such as `llama3_json`."""
    max_connections: PositiveInt = 512
    """Maximum number of connections to one endpoint. A further one replaces the oldest that has
    shown no key."""
    max_sessions: PositiveInt = 64
    """Maximum number of open sessions for agents that others start."""
    unrewarded: SignedFloat | None = None
    """Reward of an episode whose agent gave none. Unset: it is an error."""

    def check_values(self) -> None:
        if isinstance(self.token, str):
            self.token = Secret(self.token)
        if not is_loopback_host(self.host) and not self.token:
            raise ValueError(
                f"`host` = {self.host!r} is open to other machines: set `token` to a secret, or "
                "leave `host` at 127.0.0.1"
            )
