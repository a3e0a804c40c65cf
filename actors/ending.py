"""The end of a run, as the conductor has it: the model is saved, and the actors end in order."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from r3async.actors.process import RPC_SECONDS, call_with_limit
from r3async.config import Config
from r3async.world import ActorRef


async def save_final_model(
    config: Config, learner: ActorRef, run_dir: Path, checkpoint_bytes: int, set_phase: Callable[[str], object]
) -> int:
    """Have it save the model, and wait for the last checkpoint. Returns how many updates made the weights. `set_phase(phase)`."""
    set_phase("saving the model")
    model, failure = str(run_dir / "model"), "the model was not saved"
    updates = await call_with_limit(config, "learner.start_timeout", learner, "save_model", model, failure=failure)
    set_phase("writing a checkpoint")
    setting, failure = "checkpoint.write_timeout", "the last checkpoint was not written"
    seconds = config.checkpoint.resolve_write_timeout(checkpoint_bytes) + RPC_SECONDS
    await call_with_limit(config, setting, learner, "finish_checkpoint", failure=failure, seconds=seconds)
    return updates


async def stop_actors(actors: Sequence[ActorRef], seconds: float, events: Any) -> None:
    """Ask them to end in order. `events`: a structlog logger, which is told if that takes longer than `seconds`."""
    ended = asyncio.gather(*(actor.call("stop") for actor in actors), return_exceptions=True)
    try:
        await asyncio.wait_for(ended, seconds)
    except TimeoutError:
        events.warning("actors_did_not_stop", seconds=seconds)
