"""`r3async keys`: make the keys that connections are encrypted with, and that say who may connect."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from r3async.world.keys import GENERATOR, LEARNER, create_keys


def make_keys(directory: Path, names: list[str], say: Callable[[str], None]) -> None:
    """Create what is missing in `directory`, and say what to do with it. Never replaces a key."""
    made = create_keys(directory, (LEARNER, *(names or [GENERATOR])))
    for path in made:
        say(f"{path}  {path.stat().st_mode & 0o777:04o}")
    if not made:
        say(f"{directory} has these keys already; nothing was changed")
    say(
        f"set transport.keys={directory.resolve()}; a host that only plays needs {GENERATOR}.secret and {LEARNER}.public, "
        f"and the learner lets in the key of every *.public file"
    )
