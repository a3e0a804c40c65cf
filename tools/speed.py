"""Estimate how many tokens the learner's GPUs train in a second, and what limits them.

A step's seconds are those of computing, of the exchanges between ranks and of the update, one after
the other: nothing overlaps. Every rank gets its share of the tokens, and of the routed ones.

**Computing.** A matrix of n parameters takes 2 n operations a token forward and 4 n backward, and 2
n again where activations are recomputed. Layers of experts reach `EXPERT_LAYER_RATE`, which follows
from one H200 (docs/benchmarks.md#one-gpu): 32,000 to 36,900 tokens/s for four layers of
Qwen3-30B-A3B with full recompute and the output layer, of which that layer takes 5 of 29 us at
`MATRIX_RATE`. `MATRIX_RATE`, for the output layer and dense layers, is half of the 790 TFLOP/s of
that GPU's matrix products, assumed.

**Exchanges.** Bytes are those of `traffic`. Tensor-parallel ranks gather and scatter the
activations of each layer, in every pass. Rates are two thirds of NVLink's 450 GB/s within a host,
and four fifths of 50 GB/s between hosts, assumed. Pipeline stages wait for the slowest, which is
the last, as it has the output layer; and for (pp - 1) of (micro-batches + pp - 1) turns.
"""

from __future__ import annotations

import msgspec

from r3async.config import Config
from r3async.data.model_shape import ModelShape
from r3async.data.write_sizes import DTYPE_BYTES

from .traffic import count_copy_bytes, count_expert_bytes, count_micro_batches, count_updated

EXPERT_LAYER_RATE = 75e12
"""Operations a second of a GPU in layers with experts, without those of attention between tokens:
24 us a token in four layers of 57 M used parameters, with full recompute. Measured on one H200."""
MATRIX_RATE = 395e12
HOST_RATE = 300e9
NETWORK_RATE = 40e9
HOST_MEMORY_RATE = 50e9
"""Bytes a second of one GPU to others of its host, to other hosts, and to the host's memory."""
PUBLISHED_SPEEDS = {"Qwen3-30B-A3B": "NeMo AutoModel publishes 12,040 for pre-training on 8 H100"}
"""Published tokens a second and GPU, by model: github.com/NVIDIA-NeMo/Automodel,
docs/performance-summary."""


class TrainingSpeed(msgspec.Struct, frozen=True):
    """The estimated speed of the learner.

    Attributes:
        tokens_per_second: Tokens that one of its GPUs trains in a second.
        seconds: Seconds of a step, by what takes them.
    """

    tokens_per_second: float
    seconds: dict[str, float]

    def describe_parts(self) -> str:
        """Describe what takes the time, the most first."""
        total = sum(self.seconds.values())
        parts = sorted(self.seconds.items(), key=lambda part: -part[1])
        return ", ".join(
            f"{name} {share:.0%}" for name, value in parts if (share := value / total) >= 0.005
        )


def estimate_speed(shape: ModelShape, config: Config, tokens: int) -> TrainingSpeed:
    """Estimate the speed of steps of `tokens`, all of which are trained."""
    learner = config.learner
    p = config.learner.parallel
    passes = tokens * config.schedule.epochs_per_step
    width = DTYPE_BYTES[learner.dtype]
    on_host = config.cluster.gpus_per_node
    in_layers, in_output = _count_token_seconds(shape, config)
    computing = passes / p.world_size * (in_layers + in_output)
    slowest = passes / (p.dp * p.cp * p.tp) * (in_layers / p.pp + in_output)
    between_tp = (
        passes / (p.dp * p.cp) * _count_tensor_parallel_bytes(shape, config) * width / HOST_RATE
    )
    experts = count_expert_bytes(shape, config, tokens) / (
        HOST_RATE if p.ep <= on_host else NETWORK_RATE
    )
    stage = p.dp * p.cp * p.tp
    copies = count_copy_bytes(shape, config, tokens) / (
        HOST_RATE if stage <= on_host else NETWORK_RATE
    )
    waiting = (
        slowest
        - computing
        + (slowest + between_tp + experts) * (p.pp - 1) / count_micro_batches(config, tokens)
    )
    seconds = {
        "computing": computing,
        "activations between tensor-parallel ranks": between_tp,
        "tokens to experts": experts,
        "waiting of pipeline stages": waiting,
        "gradients and weights between copies": copies,
    }
    if learner.offload_moments:
        moved = 16 * count_updated(shape, config) * config.schedule.updates_per_step
        seconds["moments from host memory"] = moved / HOST_MEMORY_RATE
    return TrainingSpeed(tokens / p.world_size / sum(seconds.values()), seconds)


def _count_token_seconds(shape: ModelShape, config: Config) -> tuple[float, float]:
    """Return the seconds that one GPU would compute on a token: in all layers, and in
    the output layer."""
    again = 2 if config.learner.recompute == "full" else 0
    output = shape.vocab_size * shape.hidden_size
    layers = shape.active_parameters - output * (1 if shape.tied_embeddings else 2)
    mixture = len(shape.moe_layers) * shape.top_k * 3 * shape.hidden_size * shape.expert_width
    operations = (6 + again) * layers
    if config.learner.recompute == "selective":
        operations += 2 * mixture
    rate = EXPERT_LAYER_RATE if shape.moe_layers else MATRIX_RATE
    return operations / rate, 6 * output / MATRIX_RATE


def _count_tensor_parallel_bytes(shape: ModelShape, config: Config) -> float:
    """Return the values that a rank sends for one token of a micro-batch, in all
    layers of its stage."""
    p = config.learner.parallel
    if p.tp == 1:
        return 0.0
    dense = shape.num_layers - len(shape.moe_layers)
    # Gathered before, scattered after: attention, and dense feed-forward.
    products = 2 * shape.num_layers + 2 * dense
    # Backward, what was gathered is gathered once more.
    passes = 2.5 + (config.learner.recompute == "full")
    return products / p.pp * passes * shape.hidden_size * (p.tp - 1) / p.tp
