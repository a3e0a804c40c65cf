"""What a cluster costs before anybody has run it: durations from the model's size and the hardware's rates.

An engine reads its weights once a decoded token, whatever its batch, and computes with the active ones for each request. A
learner computes six operations a parameter and token, eight where it computes activations again. Shares of the peak rates are
those that such systems usually reach (`Hardware`). Measured durations (`calibrate`) replace all of it.
"""

from __future__ import annotations

import msgspec

from r3async.config import Config
from r3async.tools.memory import find_model_shape
from r3async.tools.plan import count_wire_bytes
from r3async.tools.simulate.model import Distribution, EngineSpeed, LearnerSpeed, Model

BYTES = 2
"""Of a parameter in bf16."""


class Hardware(msgspec.Struct, frozen=True):
    """Of one GPU: operations and bytes a second at peak, bytes a second on its network, and the shares of these that training
    (`trains`), prefill (`computes`) and decoding (`reads`) reach."""

    name: str
    operations: float
    memory: float
    network: float
    trains: float = 0.3
    computes: float = 0.5
    reads: float = 0.6


H100 = Hardware("H100", 989e12, 3.35e12, 50e9)
HARDWARE = {
    "h100": H100,
    "h200": Hardware("H200", 989e12, 4.8e12, 50e9),
    "a100": Hardware("A100", 312e12, 2.0e12, 25e9),
    "h20": Hardware("H20", 148e12, 4.0e12, 50e9),
    "cpu": Hardware("two CPU cores", 150e9, 20e9, 1e9),
}
STEP_SECONDS = 0.5
"""Of a training step that no token makes longer: optimizer, collectives, packing."""
TOKEN_SECONDS = 0.004
"""Of an engine's step that no weight makes longer."""


def estimate(config: Config, *, generators: int, ranks: int, hardware: Hardware = H100) -> Model:
    """The model of `config` on so many generators and learner ranks, a GPU each. Answers are log-normal with a median of a
    quarter of `episode.max_new_tokens`; environments answer at once."""
    shape, _ = find_model_shape(config)
    schedule, episode = config.schedule, config.episode
    version = BYTES * shape.num_parameters
    operations = 8 if config.learner.recompute == "full" else 6
    multiply = 2 * shape.active_parameters / hardware.operations
    return Model(
        generators=generators,
        places=config.generator.concurrency,
        groups_per_step=schedule.groups_per_step,
        samples_per_group=schedule.samples_per_group,
        max_staleness=schedule.max_staleness,
        steps_per_publication=schedule.steps_per_publication,
        window=schedule.window,
        tokens_per_step=schedule.tokens_per_step,
        engine=EngineSpeed(
            step_seconds=TOKEN_SECONDS + version / (hardware.memory * hardware.reads),
            request_seconds=multiply / hardware.computes,
            prefill_seconds=multiply / hardware.computes,
        ),
        learner=LearnerSpeed(
            fixed=STEP_SECONDS,
            token_seconds=operations * shape.active_parameters / (hardware.operations * hardware.trains * ranks),
            snapshot=version / ranks / hardware.network,
            write=version / hardware.network,
            transfer=version / hardware.network,
            pause=version / hardware.memory,
        ),
        turns=Distribution(float(episode.max_turns)),
        answer=Distribution(episode.max_new_tokens / 4, 0.8, float(episode.max_new_tokens)),
        prompt=Distribution(min(episode.max_prompt_tokens, 512) / 4),
        bytes_per_token=count_wire_bytes(shape.routing_shape if config.routing.replay == "rollout" else None),
    )
