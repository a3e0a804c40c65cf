"""Make the keys that encrypt connections and decide who may connect: `python -m r3async.tools keys`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from r3async.world.curve_keys import GENERATOR_KEY_NAME, LEARNER_KEY_NAME, create_key_files


def make_keys(directory: Path, names: list[str], print_line: Callable[[str], None]) -> None:
    """Create the missing keys in `directory`, and print how to use them. Never replaces a key."""
    made = create_key_files(directory, (LEARNER_KEY_NAME, *(names or [GENERATOR_KEY_NAME])))
    for path in made:
        print_line(f"{path}  {path.stat().st_mode & 0o777:04o}")
    if not made:
        print_line(f"{directory} has these keys already; nothing was changed")
    print_line(
        f"set transport.keys={directory.resolve()}; a host that has only generators needs "
        f"{GENERATOR_KEY_NAME}.secret and {LEARNER_KEY_NAME}.public, and the learner lets in the "
        "key of every *.public file"
    )
