"""Settings that nobody but the process that needs them may read."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import Any

from r3async.config.section import ConfigError

HIDDEN = "***"
_REFERENCE = re.compile(r"\$[A-Za-z_][A-Za-z0-9_]*")


class Secret:
    """A text that is written nowhere: it prints as `***`, and only `reveal` gives it away.

    `$NAME` stands for the environment variable NAME of the process that reveals it. That is no secret itself, so it is shown,
    and a resumed run finds it again. Immutable.
    """

    __slots__ = ("_text",)

    def __init__(self, text: str = ""):
        self._text = text

    def __repr__(self) -> str:
        return repr(self.shown)

    def __str__(self) -> str:
        return self.shown

    def __bool__(self) -> bool:
        return bool(self._text)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Secret) and self._text == other._text

    def __hash__(self) -> int:
        return hash(self._text)

    @property
    def reference(self) -> str:
        """The name of the environment variable that it is in; empty if it is given literally."""
        return self._text[1:] if _REFERENCE.fullmatch(self._text) else ""

    @property
    def lost(self) -> bool:
        """It was read from a file that it had not been written to."""
        return self._text == HIDDEN

    @property
    def shown(self) -> str:
        """What may be written and printed."""
        return self._text if self.reference or not self._text else HIDDEN

    @property
    def as_given(self) -> str:
        """The text, or the reference to it, for a process that will reveal it."""
        return self._text

    def reveal(self, setting: str) -> str:
        """The text. Raises `ConfigError` that names `setting` if the variable is not set, or the text was not kept."""
        check_kept(self, setting)
        if not self.reference:
            return self._text
        try:
            return os.environ[self.reference]
        except KeyError:
            raise ConfigError(f"`{setting}` = {self._text!r}: there is no such environment variable") from None


def check_kept(secret: Secret, setting: str) -> None:
    """Raise `ConfigError` for a secret that was left out of the file which this configuration comes from."""
    if secret.lost:
        raise ConfigError(
            f"`{setting}` is {HIDDEN!r}: secrets are not written to files. Set it again, best as `{setting}=$NAME`, which "
            "names an environment variable"
        )


def revealed(value: Any, setting: str) -> Any:
    """Plain data with the secrets in it revealed; see `Secret.reveal`."""
    if isinstance(value, Secret):
        return value.reveal(setting)
    if isinstance(value, Mapping):
        return {key: revealed(inner, f"{setting}.{key}") for key, inner in value.items()}
    return value


def secret_settings(data: Any, path: str = "") -> dict[str, Secret]:
    """Every secret of a section, or of plain data, by its dotted key."""
    if isinstance(data, Secret):
        return {path: data}
    fields = data if isinstance(data, Mapping) else getattr(data, "__struct_fields__", ())
    found: dict[str, Secret] = {}
    for name in fields:
        inner = data[name] if isinstance(data, Mapping) else getattr(data, name)
        found |= secret_settings(inner, f"{path}.{name}" if path else str(name))
    return found
