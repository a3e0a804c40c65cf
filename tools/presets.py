"""Describe presets from the comments at their heads: `r3async train --list`."""

from __future__ import annotations

import textwrap
from pathlib import Path

import msgspec

from r3async.config import preset_directory

FIRST_PRESET = "quickstart"
HEADER_LABELS = ("When to choose it:", "Staleness bound:", "Tested on:")


class PresetHeader(msgspec.Struct, frozen=True):
    """The comment at the head of a preset. Each part is one paragraph without a final newline."""

    purpose: str
    when_to_use: str
    staleness_bound: str
    tested_on: str


def read_preset_header(path: Path) -> PresetHeader:
    """Read the head of a preset. Raises `ValueError` naming the missing part; every
    preset has all four."""
    lines = []
    for line in path.read_text().splitlines():
        if not line.startswith("#"):
            break
        lines.append(line.removeprefix("#").strip())
    text = " ".join(" ".join(lines).split())
    parts = []
    for label in reversed(HEADER_LABELS):
        text, found, part = text.rpartition(label)
        if not found:
            raise ValueError(f"{path.name}: its head does not say {label!r}")
        parts.append(part.strip())
    return PresetHeader(text.strip(), *reversed(parts))


def list_preset_paths() -> list[Path]:
    """Return the paths of all presets, the quickstart first."""
    return sorted(preset_directory().glob("*.toml"), key=lambda p: (p.stem != FIRST_PRESET, p.stem))


def describe_presets() -> str:
    """Describe all presets, one paragraph each."""
    out = []
    for path in list_preset_paths():
        header = read_preset_header(path)
        body = (
            f"{header.purpose}\nWhen: {header.when_to_use}\nStaleness bound: "
            f"{header.staleness_bound} "
        )
        body += f"Tested on: {header.tested_on}"
        out.append(f"{path.stem}\n{textwrap.indent(_wrap_lines(body), '    ')}")
    out.append(f"Their files are in {preset_directory().resolve()}")
    return "\n".join(out)


def _wrap_lines(text: str) -> str:
    return "\n".join(textwrap.fill(line, 112) for line in text.splitlines())
