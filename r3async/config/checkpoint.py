"""The configuration section `checkpoint`."""

from __future__ import annotations

from r3async.config.section import PositiveInt, Section


class CheckpointConfig(Section):
    every_steps: int = 100
    """Steps between two checkpoints. 0: none by steps."""
    every_minutes: float = 30.0
    """Minutes after which the next step is followed by a checkpoint anyway. 0: none by time."""
    keep_last: PositiveInt = 3
    """Number of newest checkpoints to keep."""
    keep_every: int = 0
    """Checkpoints of steps that are multiples of this are kept for good."""
    keep_best: str = ""
    """Evaluation metric whose best checkpoint is kept for good: `reward_mean`, `pass@K`, or a
    set's, as `greedy/reward_mean`. Empty: none."""
    asynchronous: bool = True
    """Write checkpoints during the next steps, from a copy in host memory."""
    directory: str = ""
    """Directory of the checkpoints. Default: `checkpoints` in the run's directory."""
