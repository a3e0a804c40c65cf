"""Secrets of a configuration, which are never printed or written."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import Any

from r3async.config.section import ConfigError

REDACTED = "***"
_REFERENCE = re.compile(r"\$[A-Za-z_][A-Za-z0-9_]*")


class Secret:
    """A text that is not written anywhere: it prints as `***`, and only `reveal` returns it.

    `$NAME` stands for the environment variable NAME of the process that reveals it. The reference
    itself is no secret, so it is shown, and a resumed run finds it again. Immutable.
    """

    __slots__ = ("_text",)

    def __init__(self, text: str = ""):
        self._text = text

    def __repr__(self) -> str:
        return repr(self.redacted)

    def __str__(self) -> str:
        return self.redacted

    def __bool__(self) -> bool:
        return bool(self._text)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Secret) and self._text == other._text

    def __hash__(self) -> int:
        return hash(self._text)

    @property
    def variable_name(self) -> str:
        """The name of the environment variable that holds the secret; empty if it is
        given literally."""
        return self._text[1:] if _REFERENCE.fullmatch(self._text) else ""

    @property
    def is_lost(self) -> bool:
        """True if the secret was read from a file to which it had not been written."""
        return self._text == REDACTED

    @property
    def redacted(self) -> str:
        """The form that may be written and printed."""
        return self._text if self.variable_name or not self._text else REDACTED

    @property
    def raw_text(self) -> str:
        """The text, or the reference to it, for a process that will reveal it."""
        return self._text

    def reveal(self, setting: str) -> str:
        """Return the text. Raises `ConfigError` that names `setting` if the variable is not set, or
        the text was not kept."""
        refuse_lost_secret(self, setting)
        if not self.variable_name:
            return self._text
        try:
            return os.environ[self.variable_name]
        except KeyError:
            raise ConfigError(
                f"`{setting}` = {self._text!r}: there is no such environment variable"
            ) from None


def refuse_lost_secret(secret: Secret, setting: str) -> None:
    """Raise `ConfigError` for a secret that was left out of the file which this
    configuration comes from."""
    if secret.is_lost:
        raise ConfigError(
            f"`{setting}` is {REDACTED!r}: secrets are not written to files. Set it again, best as "
            f"`{setting}=$NAME`, which names an environment variable"
        )


def reveal_secrets(value: Any, setting: str) -> Any:
    """Return plain data with the secrets in it revealed as by `Secret.reveal`."""
    if isinstance(value, Secret):
        return value.reveal(setting)
    if isinstance(value, Mapping):
        return {key: reveal_secrets(inner, f"{setting}.{key}") for key, inner in value.items()}
    if isinstance(value, list):
        return [reveal_secrets(inner, f"{setting}[{at}]") for at, inner in enumerate(value)]
    return value


def collect_secrets(data: Any, path: str = "") -> dict[str, Secret]:
    """Return every secret of a section, or of plain data, by its dotted key."""
    if isinstance(data, Secret):
        return {path: data}
    if isinstance(data, list):
        return {
            at: secret
            for n, inner in enumerate(data)
            for at, secret in collect_secrets(inner, f"{path}[{n}]").items()
        }
    fields = data if isinstance(data, Mapping) else getattr(data, "__struct_fields__", ())
    found: dict[str, Secret] = {}
    for name in fields:
        inner = data[name] if isinstance(data, Mapping) else getattr(data, name)
        found |= collect_secrets(inner, f"{path}.{name}" if path else str(name))
    return found
