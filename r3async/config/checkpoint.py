"""The configuration section `checkpoint`."""

from __future__ import annotations

from r3async.config.section import PositiveFloat, PositiveInt, Section
from r3async.config.weights import BASE_CHECKPOINT_SECONDS, resolve_timeout


class CheckpointConfig(Section):
    every_steps: int = 100
    """Steps between two checkpoints. 0: none by steps."""
    every_minutes: float = 30.0
    """Minutes after which a step is followed by a checkpoint in any case. 0: none by time. With
    both 0 there is one only at a stop."""
    keep_last: PositiveInt = 3
    """Number of newest checkpoints that are kept; the newest intact one is always kept."""
    keep_every: int = 0
    """Interval in steps: checkpoints of steps that are multiples of it are kept
    for good. 0: none."""
    keep_best: str = ""
    """Evaluation metric by which the best checkpoint is kept for good: `reward_mean`,
    `pass@K`, or that of a set, as `greedy/reward_mean`. Each evaluated step then has a
    checkpoint. Empty: none."""
    asynchronous: bool = True
    """Write checkpoints beside the next steps, from a copy in host memory (12 bytes a parameter
    over all ranks)."""
    write_timeout: PositiveFloat | None = None
    """Seconds that writing a checkpoint may take. Default: 1800, plus 1 for each 200 MB of it (12
    bytes a parameter). `--dry-run` shows it."""
    directory: str = ""
    """Directory of the checkpoints. Default: `checkpoints` in the run's directory."""

    def resolve_write_timeout(self, nbytes: int) -> float:
        """Return the seconds that `write_timeout` allows for a checkpoint of `nbytes`."""
        return resolve_timeout(self.write_timeout, BASE_CHECKPOINT_SECONDS, nbytes)
