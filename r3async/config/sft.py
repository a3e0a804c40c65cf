"""Settings of `r3async sft` besides the model, the data and the learner."""

from __future__ import annotations

from r3async.config.section import PositiveInt, Section


class SftConfig(Section):
    """Supervised training (`r3async sft`) on answers of `data`, or of the environment's oracle."""

    rows_per_step: PositiveInt = 32
    """Conversations that a step trains."""
    epochs: float = 0.0
    """Times that each row is trained; `steps` follows from it. 0: `steps` counts."""
