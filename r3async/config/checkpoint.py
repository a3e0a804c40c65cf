"""Section `checkpoint`: when the run's state is written, and how much of it is kept."""

from __future__ import annotations

from r3async.config.section import Positive, PositiveInt, Section


class CheckpointConfig(Section):
    every_steps: int = 100
    """Steps between two checkpoints; 0: none by steps."""
    every_minutes: float = 30.0
    """Minutes after which a step is followed by one in any case; 0: none by time. With both 0 there is one only at a stop."""
    keep_last: PositiveInt = 3
    """The newest so many are kept, and always the newest that is intact."""
    keep_every: int = 0
    """If not 0, those of steps that it divides are kept for good."""
    asynchronous: bool = True
    """Write beside the steps that follow, from a copy in host memory: 12 bytes a parameter, over all ranks. One copy waits at
    most."""
    write_timeout: Positive = 1800.0
    """Seconds that writing one may take; the next one waits for it."""
    directory: str = ""
    """Where they are; default: `checkpoints` in the run's directory."""
