"""What every section of the configuration is made of."""

from __future__ import annotations

import msgspec


class ConfigError(ValueError):
    """A configuration that can not be used; the message names the key and the fix."""


class Section(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """Base of all sections."""


def positive(section: Section, *names: str) -> None:
    for name in names:
        if getattr(section, name) <= 0:
            raise ValueError(f"`{name}` must be greater than 0, got {getattr(section, name)}")
