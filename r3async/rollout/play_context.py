"""What all episodes of one engine are played with."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from r3async.rollout.blocking_detector import BlockingDetector
from r3async.rollout.engine import Engine
from r3async.rollout.renderer import ChatRenderer
from r3async.world import EventReporter, ignore_event
from r3async.world.real import REAL_WORLD


@dataclass(frozen=True)
class PlayContext:
    """The engine that answers, and what else the players of its episodes share.

    Attributes:
        generator_id: The generator that trajectories name as their origin.
        report_event: Gets failed calls and attempts, and environments that block.
        clock: Returns unix seconds.
        blocking_detector: Detects environments that block, over all episodes.
    """

    engine: Engine
    renderer: ChatRenderer
    generator_id: str = ""
    report_event: EventReporter = ignore_event
    clock: Callable[[], float] = REAL_WORLD.clock.time
    blocking_detector: BlockingDetector = field(init=False)

    def __post_init__(self) -> None:
        detector = BlockingDetector(self.report_event, self.clock)
        object.__setattr__(self, "blocking_detector", detector)
