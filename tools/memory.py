"""Find the shape of the configured model, and estimate the memory of a learner rank
and of an engine.

The shapes of some published models are included, so that a plan can be made without their weights.

**Weights and optimizer** (exact, but for buffers). `learner.optimizer.MasterAdamW` keeps, per
parameter of the rank: the weight in the compute dtype, an fp32 master copy if that is not fp32
already, an fp32 gradient, and two fp32 moments. So 2 + 4 + 4 + 8 = 18 bytes in bfloat16, 4 + 4 +
8 = 16 in float32: the count of ZeRO (arXiv 1910.02054, section 3.1: 16 with a 2-byte gradient),
with the gradient accumulated in fp32. Megatron ranks hold `ModelShape.rank_parameters` parameters;
with `shard_optimizer`, replicas of the same parameters shard masters and moments among them, and
with `shard_gradients` gradients. With `backend = "torch"` and dp > 1, FSDP2 divides 16 bytes per
parameter by dp (its shards are the fp32 masters), and holds the vocabulary and two full layers in
the compute dtype, with one layer's fp32 gradient. Of a layer's experts, a rank holds 1 / ep then.

The teacher of `algorithm.distillation` has weights only, sharded in the same way.

With `learner.lora` the weights stay. Everything else is for the adapters, 16 bytes per parameter,
and for one adapted parameter: its gradient (all experts of a layer are one parameter), and in fp32
the gradient of one matrix. The start model's values of the adapted parameters are in host memory,
in the compute dtype.

**Activations** follow Korthikanti et al. 2022 (arXiv 2205.05198, section 4), counted for this
decoder: no dropout, attention without a score matrix, grouped queries, gated feed-forward. Values
kept for the backward pass, by token and layer, in the compute dtype:

* attention: 2 h (residual, norm) + (a + 2 g) d (as projected) + 2 (a + g) d (queries and keys
  before their norms, and rotated) + a d (result); latent attention: 2 h, its low ranks before and
  after their norms, queries, keys and values as projected and as attended, and the result;
* feed-forward of width w: 2 h + 5 w (gate and up, silu, product); mixture of experts: 2 h + k (h +
  3 w) (a token is sent to k experts), with the experts of transformers k (h + 6 w), and 2 · experts
  values in fp32 for the router. While one mixture runs backward, k (h + 4 w) more, and 3 k h with
  `backend = "torch"` and ep > 1: rows as sent, as they arrive and as they return. Tests compare
  this with what a learner keeps;
* `recompute = "selective"`: 2 h of an MoE layer, and one layer's mixture while it is recomputed;
  `"full"`: h per layer, and one full layer.

Tensor parallelism includes sequence parallelism, and divides all of it. 1F1B keeps `pp - stage`
micro-batches of `layers / pp` layers at stage `stage`. A micro-batch has at most
`learner.max_tokens_per_micro_batch` tokens. Logits, of which `learner.token_logprobs` says how many
exist at once: on a CPU two fp32 tensors and a mask; in the backward pass, one of them in fp32 and
in the compute dtype. On a GPU one in fp32, its gradient in the compute dtype, and a mask. Besides,
in the backward pass, the gradient of the output matrix, summed in fp32.

**Temporary copies**: one bucket of gradients in fp32 while ranks sum it, and one of moments with
`offload_moments`; with adapters, a parameter of the start model and its merged values, one matrix
at a time in fp32.

**Context**: on a GPU `CONTEXT_BYTES` for CUDA, NCCL and cuBLAS, assumed: no GPU has measured it
yet. Not included: the allocator's fragmentation, and ranks that get more than their share of routed
tokens. With `weights.backend = "nccl"` the first rank's GPU has another context, and up to four
buckets, for each generator.

**Engine**: weights divided by `tensor_parallel_size`, slots for adapters
(`adapted.count_slot_parameters`), and 2 · layers · key-value heads · head size values of KV cache
per token; with latent attention layers · (rank of keys and values + rotated values). A layer that
keeps a state has one for each episode, and with `enable_prefix_caching` the one of the last whole
block besides. States and keys and values are in pages of one size, which holds a state.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from r3async.config import Config, ConfigError, LearnerConfig
from r3async.config.vllm_arguments import CACHE_DTYPE_BYTES
from r3async.data import models
from r3async.data.checkpoint_forms import (
    CheckpointFormError,
    QuantizedForm,
    read_quantized_form,
)
from r3async.data.model_shape import ModelShape, ModelShapeError, parse_model_shape
from r3async.data.models import (
    ARCHITECTURES,
    UNSUPPORTED_MODEL_TYPES,
    find_architecture,
    list_supported_types,
)
from r3async.data.write_sizes import DTYPE_BYTES
from r3async.schedule.run_ahead import count_served_versions
from r3async.untrusted import decode_python_json

from .adapted import count_adapters, count_slot_parameters

GIB = 2**30
GPU_PARAMETERS = 10**9
"""Number of parameters above which a model is planned for GPUs."""
CHUNK_ELEMENTS = 2**25
MAX_CHUNK_ELEMENTS = 2**30
GPU_BYTES_PER_LOGIT = 576
"""Copies of `LOGIT_CHUNK_ELEMENTS`, `MAX_LOGIT_CHUNK_ELEMENTS` and `GPU_BYTES_PER_LOGIT` of
`learner.token_logprobs`, whose import would import torch."""
BUCKET_ELEMENTS = 2**26
"""Copy of `COLLECTIVE_BUCKET_ELEMENTS` and the equal `OFFLOAD_BUCKET_ELEMENTS` of
`learner.optimizer`."""
CONTEXT_BYTES = 1.5 * GIB
GRAPHS_BYTES = 1.5 * GIB
"""CUDA graphs of an engine. Assumed: vLLM reported 1.34 GiB for Qwen3.5-35B-A3B over four
GPUs (vllm#50722)."""
ENGINE_BATCH_TOKENS = 2048
"""Tokens of an engine's step at most, unless `max_num_batched_tokens` sets another
number (vLLM 0.30)."""
ENGINE_BLOCK_TOKENS = 16
"""Tokens of a block of an engine's cache on a GPU, which is a multiple of this in a model that
keeps states (vLLM 0.30)."""
SENDER_BUCKETS = 4
"""Buckets that a process holds at most while it sends weights with NCCL (`weights.nccl`)."""


PUBLISHED_CONFIGS: dict[str, dict[str, Any]] = decode_python_json(
    Path(models.__file__).with_name("published_models.json").read_bytes()
)
"""Sizes of published models from their own `config.json`, huggingface.co/ORGANISATION/NAME; of
Qwen3.5-35B-A3B and GLM-4.5-Air as transformers writes it again, of Bamba-9B and Olmo-Hybrid-7B as
transformers documents it. Read in November 2026."""

INIT_VOCAB_SIZE = 264
"""Vocabulary of a model that `model.init` makes: 256 bytes and six special tokens, in a
multiple of eight."""


def check_model_type(config: Mapping[str, Any], name: str) -> None:
    """Raise `ConfigError` for a `config.json` of a model type that no backend trains, whatever
    else it contains."""
    kind = config.get("model_type")
    reason = UNSUPPORTED_MODEL_TYPES.get(str(kind))
    if reason:
        raise ConfigError(
            f"{name} cannot be trained ({kind}): {reason}. These can: {list_supported_types()}"
        )


def check_trainable(shape: ModelShape, learner: LearnerConfig) -> None:
    """Raise `ConfigError` if the ranks of `learner.parallel` cannot share this model, or their
    backend not train it."""
    if learner.backend == "megatron" and shape.model_type not in ARCHITECTURES:
        raise ConfigError(
            f'`learner.backend` = "megatron" trains {list_supported_types()} and no '
            f'{shape.model_type} ({shape.name}): set it to "torch"'
        )
    try:
        shape.check_parallelism(learner.parallel)
    except ModelShapeError as error:
        raise ConfigError(f"{shape.name}: {error}") from error


def check_router_settings(shape: ModelShape, config: Config) -> None:
    """Raise `ConfigError` for a load-balance loss without gradient, or an update of biases
    that do not exist."""
    known = find_architecture(shape.model_type)
    biased = shape.moe_layers and known is not None and known.router_score == "sigmoid"
    if config.learner.expert_bias_rate and known is not None and not biased:
        raise ConfigError(
            f"`learner.expert_bias_rate`: no bias decides which experts {shape.name} "
            f"({shape.model_type}) chooses: set it to 0"
        )
    if config.algorithm.router_aux.coef and biased:
        raise ConfigError(
            f"`algorithm.router_aux.coef`: a bias of each expert balances {shape.name} "
            f"({shape.model_type}), and a term of the loss has no gradient where that bias "
            "decides: set it to 0"
        )


def read_planned_shape(config: Mapping[str, Any], name: str) -> ModelShape:
    """Return the shape in a `config.json`. Raises `ConfigError` if its numbers are missing or no
    backend trains it."""
    check_model_type(config, name)
    try:
        return parse_model_shape(config, name)
    except ModelShapeError as error:
        raise ConfigError(f"{error}: its memory cannot be planned") from error


def find_model_shape(config: Config) -> tuple[ModelShape, str]:
    """Return the shape of a run's model and the source of its numbers. Raises `ConfigError` if
    they are unknown."""
    path = config.model.path
    if not path:
        made = config.model.init.shape.build_model_config(
            INIT_VOCAB_SIZE, config.model.init.rope_theta
        )
        return read_planned_shape(made, "model.init"), "model.init: made when the run starts"
    return _find_shape_at(path, "model.path")


def find_quantized_form(config: Config) -> QuantizedForm | None:
    """Return the form of the quantized weights of a run's model; None if it has none. Raises
    `ConfigError` for a form that cannot be read."""
    file = Path(config.model.path or "-") / "config.json"
    if not file.is_file():
        return None
    try:
        return read_quantized_form(decode_python_json(file.read_bytes()))
    except CheckpointFormError as error:
        raise ConfigError(f"`model.path` = {config.model.path!r}: {error}") from error


def _find_shape_at(path: str, setting: str) -> tuple[ModelShape, str]:
    """Return the shape of the model in `setting` and the numbers' source. Raises `ConfigError` if
    they are unknown."""
    file = Path(path) / "config.json"
    name = Path(path).name
    if file.is_file():
        return read_planned_shape(decode_python_json(file.read_bytes()), name), str(file)
    if name in PUBLISHED_CONFIGS:
        return read_planned_shape(
            PUBLISHED_CONFIGS[name], name
        ), f"the published shape of {name}; {path} is not on this machine"
    raise ConfigError(
        f"`{setting}` = {path!r}: no config.json there, and no published shape is known for "
        f"{name!r} (known: {', '.join(PUBLISHED_CONFIGS)}). A model of the hub is fetched when a "
        f"run starts, or by: hf download {path}"
    )


# -- memory ----------------------------------------------------------------------------------------


class RankMemory(msgspec.Struct, frozen=True):
    """The memory of the rank that needs most, in bytes."""

    parameters: int
    """Number of parameters that it holds."""
    weights: int
    optimizer: int
    """Master copies, gradients and moments."""
    activations: int
    logits: int
    temporary: int
    """Copies that exist only during an update."""
    context: int
    """Memory of the device before any tensor; assumed."""
    teacher: int = 0
    """Weights of `algorithm.distillation.teacher`."""
    senders: int = 0
    """Processes on the first rank's GPU that send weights, with `weights.backend = "nccl"`: their
    contexts, assumed, and their buckets."""

    @property
    def total_bytes(self) -> int:
        """The total at its peak: during forward and backward passes or during the update,
        whichever needs more."""
        passing = max(self.activations + self.logits, self.temporary)
        return self.context + self.weights + self.optimizer + passing + self.teacher + self.senders


class EngineMemory(msgspec.Struct, frozen=True):
    """The memory of one engine on one device (or, without GPUs, in one process), in bytes."""

    devices: int
    """Number of devices that share one engine."""
    weights: int
    step: int
    """Activations and logits of a step with as many tokens as one may have."""
    graphs: int
    """CUDA graphs, and the device's memory before any tensor; assumed. 0 on CPU."""
    kv_per_token: int
    states: int
    """States that an episode keeps, in pages of the KV cache."""
    kv_per_episode: int
    """Bytes of KV cache, with the states, of an episode that is as long as allowed."""
    kv_needed: int
    """Bytes of KV cache if every episode that a generator plays at once were as long as allowed."""
    adapters: int = 0
    """Slots for the adapters of versions (`learner.lora.deliver = "adapter"`)."""

    @property
    def bytes_beside_cache(self) -> int:
        return self.weights + self.step + self.graphs + self.adapters


def estimate_rank_memory(shape: ModelShape, config: Config) -> RankMemory:
    """Estimate the learner's rank that needs most. Raises `ConfigError` for a teacher whose
    numbers are unknown."""
    own = _estimate_without_teacher(shape, config)
    if config.weights.backend == "nccl":
        each = int(CONTEXT_BYTES) + SENDER_BUCKETS * config.weights.bucket_bytes
        own = msgspec.structs.replace(own, senders=config.generator.count * each)
    path = "" if config.algorithm.distillation.is_served else config.algorithm.distillation.teacher
    if not path:
        return own
    teacher, _ = _find_shape_at(path, "algorithm.distillation.teacher")
    check_trainable(teacher, config.learner)
    return msgspec.structs.replace(own, teacher=_estimate_without_teacher(teacher, config).weights)


def _estimate_without_teacher(shape: ModelShape, config: Config) -> RankMemory:
    learner = config.learner
    p = learner.parallel
    width = DTYPE_BYTES[learner.dtype]
    context = int(CONTEXT_BYTES) if shape.num_parameters > GPU_PARAMETERS else 0
    if learner.backend == "torch" and p.dp > 1:
        elsewhere = shape.expert_parameters - shape.expert_parameters // p.ep
        largest = max(
            shape.layer_parameters(i) - (elsewhere if i in shape.moe_layers else 0)
            for i in range(shape.num_layers)
        )
        held = -(-shape.num_parameters // p.dp)
        whole = (
            2 * largest + shape.embedding_parameters * (1 if shape.tied_embeddings else 2)
        ) * width
        each = 4 if learner.offload_moments else 12  # a gradient and moments
        optimizer = _estimate_adapters(shape, learner, 0, 4) if learner.lora.rank else each * held
        activations = _estimate_activations(shape, config, 0)
        logits = _estimate_logits(shape, config)
        temporary = _estimate_temporary(learner, held)
        return RankMemory(
            held, 4 * held + whole, optimizer + 4 * largest, activations, logits, temporary, context
        )
    by_stage = []
    for stage in range(p.pp):
        held = (
            shape.rank_parameters(learner, stage)
            if learner.backend == "megatron"
            else shape.num_parameters
        )
        logits = _estimate_logits(shape, config) if stage == p.pp - 1 else 0
        activations = _estimate_activations(shape, config, stage)
        if learner.lora.rank:
            made = count_adapters(shape, learner, stage)
            optimizer = _estimate_adapters(shape, learner, stage, width)
            temporary = max(
                _estimate_temporary(learner, made.adapter_parameters),
                3 * width * made.largest_gradient + 12 * made.largest_weight,
            )
        else:
            optimizer = _estimate_optimizer(shape, learner, stage, held)
            temporary = _estimate_temporary(learner, held)
        by_stage.append(
            RankMemory(held, width * held, optimizer, activations, logits, temporary, context)
        )
    return max(by_stage, key=lambda m: m.total_bytes)


def count_replicas(learner: LearnerConfig) -> tuple[int, int]:
    """Return the number of Megatron ranks that hold the same non-expert and the same
    expert parameters.

    These ranks can shard their updates.
    """
    p = learner.parallel
    return p.dp * p.cp, p.dp * p.cp * p.tp // p.ep


def _estimate_optimizer(
    shape: ModelShape, learner: LearnerConfig, stage: int, held_parameters: int
) -> int:
    """Estimate the gradients of all parameters of the rank or of its share, and masters and
    moments likewise."""
    p = learner.parallel
    state = (4 if learner.dtype != "float32" else 0) + (0 if learner.offload_moments else 8)
    updated = held_parameters
    if learner.shard_optimizer:
        here = range(stage * shape.num_layers // p.pp, (stage + 1) * shape.num_layers // p.pp)
        experts = sum(i in shape.moe_layers for i in here) * shape.expert_parameters // p.ep
        rest, of_experts = count_replicas(learner)
        updated = -(-(held_parameters - experts) // rest) + -(-experts // of_experts)
    return 4 * (updated if learner.shard_gradients else held_parameters) + state * updated


def _estimate_temporary(learner: LearnerConfig, trained: int) -> int:
    bucket = min(BUCKET_ELEMENTS, trained)
    summed = (
        4 * bucket * (1 + 1 / min(count_replicas(learner)))
        if learner.parallel.world_size > 1
        else 0
    )
    return int(max(summed, 8 * bucket if learner.offload_moments else 0))


def _estimate_adapters(shape: ModelShape, learner: LearnerConfig, stage: int, width: int) -> int:
    """Estimate the adapters' values, gradients and moments, and the memory to get their gradients
    from a weight's."""
    made = count_adapters(shape, learner, stage)
    moments = (
        0
        if learner.offload_moments
        else 8 // (min(count_replicas(learner)) if learner.shard_optimizer else 1)
    )
    return (
        (8 + moments) * made.adapter_parameters
        + width * made.largest_gradient
        + 4 * made.largest_weight
    )


def count_layer_activations(
    shape: ModelShape, index: int, *, own_kernels: bool = True
) -> tuple[float, float]:
    """Return the values kept of one layer per token, in units of the compute dtype (bfloat16).

    The first number is for attention and norms, the second for what
    `recompute = "selective"` recomputes.

    Args:
        own_kernels: Experts are ours (`learner.stacked_experts`), not those of transformers.
    """
    a = shape.num_heads
    g = shape.num_kv_heads
    d = shape.head_dim
    h = shape.hidden_size
    attention = 2 * h + (a + 2 * g) * d + 2 * (a + g) * d + a * d
    if shape.kv_rank:
        both = a * (2 * shape.qk_dim + shape.value_dim)
        attention = 2 * h + 2 * (shape.query_rank + shape.kv_rank) + 2 * both + a * shape.value_dim
    if index not in shape.attention_layers:
        attention = 0
    if index in shape.recurrent_layers:
        # What its projections return is kept, before and after the convolution, in float32.
        attention += 2 * h + 4 * shape.recurrent_mixer.parameters // h
    if index not in shape.moe_layers:
        return attention + 2 * h + 5 * shape.mlp_width * (index in shape.dense_layers), 0.0
    mixture = (
        shape.top_k * (h + (3 if own_kernels else 6) * shape.expert_width)
        + 4 * shape.num_experts
        + 5 * shape.shared_width
    )
    return attention + 2 * h, mixture


def _estimate_activations(shape: ModelShape, config: Config, stage: int) -> int:
    learner = config.learner
    p = learner.parallel
    kept = 0.0
    once = 0.0
    backward = 0.0
    for index in range(stage * shape.num_layers // p.pp, (stage + 1) * shape.num_layers // p.pp):
        base, mixture = count_layer_activations(
            shape, index, own_kernels=learner.backend == "megatron"
        )
        if index in shape.moe_layers:
            exchanged = 3 if learner.backend == "torch" and p.ep > 1 else 0
            backward = float(
                shape.top_k * ((1 + exchanged) * shape.hidden_size + 4 * shape.expert_width)
            )
        if learner.recompute == "full":
            kept = kept + shape.hidden_size
            once = max(once, base + mixture)
        elif learner.recompute == "selective":
            kept = kept + base
            once = max(once, mixture)
        else:
            kept += base + mixture
    # Logits exist before that: of the two, only what a layer needs beyond them counts.
    per_value = DTYPE_BYTES[learner.dtype] * learner.max_tokens_per_micro_batch / (p.tp * p.cp)
    last = (
        max(0.0, backward - _estimate_logits(shape, config) / per_value)
        if stage == p.pp - 1
        else backward
    )
    return int((kept * (p.pp - stage) + once + last) * per_value)


def _estimate_logits(shape: ModelShape, config: Config) -> int:
    learner = config.learner
    width = DTYPE_BYTES[learner.dtype]
    columns = -(-shape.vocab_size // learner.parallel.tp)
    wanted = learner.max_tokens_per_micro_batch // learner.parallel.cp * columns
    on_gpus = shape.num_parameters > GPU_PARAMETERS
    most = CHUNK_ELEMENTS
    if on_gpus:
        most = min(MAX_CHUNK_ELEMENTS, int(config.cluster.gpu_gib * GIB) // GPU_BYTES_PER_LOGIT)
    chunk = min(most, wanted)
    matrix = columns * shape.hidden_size
    of_matrix = (width if wanted <= most else 4 + width) * matrix
    if on_gpus:
        return (4 + width + 1) * chunk + of_matrix
    # float32 needs no rounded copy.
    return max(9 * chunk, (4 if width == 4 else 6) * chunk + of_matrix)


def estimate_engine_memory(shape: ModelShape, config: Config) -> EngineMemory:
    """Estimate one generator's engine."""
    args: dict[str, Any] = config.generator.engine_args
    tp = int(args.get("tensor_parallel_size", 1))
    width = DTYPE_BYTES[config.generator.dtype]
    heads = max(1, shape.num_kv_heads // tp)  # fewer heads than ranks are held more than once
    # Latent attention keeps the compressed form of keys and values, on every rank.
    values = shape.kv_rank + shape.rope_dim if shape.kv_rank else 2 * heads * shape.head_dim
    cached = CACHE_DTYPE_BYTES[args.get("kv_cache_dtype", "auto")] or width
    token_bytes = values * cached
    states, per_episode = _estimate_episode_cache(shape, config, token_bytes)
    needed = per_episode * config.generator.concurrency
    graphs = 0.0
    if shape.num_parameters > GPU_PARAMETERS:
        graphs = CONTEXT_BYTES + (0 if args.get("enforce_eager") else GRAPHS_BYTES)
    adapters = 0
    if config.learner.lora.delivers_adapters:
        slots = count_served_versions(config.schedule)
        adapters = slots * width * count_slot_parameters(shape, config.learner.lora, tp)
    return EngineMemory(
        devices=tp,
        weights=shape.num_parameters * width // tp,
        step=_estimate_engine_step(shape, config, tp),
        graphs=int(graphs),
        kv_per_token=len(shape.attention_layers) * token_bytes,
        states=states,
        kv_per_episode=per_episode,
        kv_needed=needed,
        adapters=adapters,
    )


def _estimate_episode_cache(shape: ModelShape, config: Config, token_bytes: int) -> tuple[int, int]:
    """Return the bytes of the states that an episode keeps, and those of all its cache if it is as
    long as allowed. Layers with a sliding window count as if they kept every token.

    Args:
        token_bytes: Bytes of a token's keys and values in one layer.
    """
    args = config.generator.engine_args
    tokens = config.episode.max_total_tokens
    width = DTYPE_BYTES[config.generator.dtype]
    mixer = shape.recurrent_mixer
    own = args.get("mamba_ssm_cache_dtype", "auto")
    state_dtype = mixer.state_dtype if own == "auto" else own
    state_width = {"": width, "float32": 4}.get(state_dtype, 2)
    state = mixer.last_inputs * width + mixer.state * state_width
    state //= int(args.get("tensor_parallel_size", 1))
    if not state:
        return 0, len(shape.attention_layers) * token_bytes * tokens
    step = int(args.get("block_size", ENGINE_BLOCK_TOKENS))
    block = step * -(-state // (step * token_bytes))
    blocks = -(-tokens // block)
    kept = 2 if args.get("enable_prefix_caching", True) else 1
    if kept == 2 and args.get("mamba_cache_mode") == "all":
        kept = blocks
    page = block * token_bytes
    states = len(shape.recurrent_layers) * kept * page
    return states, states + len(shape.attention_layers) * blocks * page


def _estimate_engine_step(shape: ModelShape, config: Config, tp: int) -> int:
    """Estimate the layer that needs most, the logits of all requests in float32, twice, and
    the routes' buffer."""
    tokens = int(config.generator.engine_args.get("max_num_batched_tokens", ENGINE_BATCH_TOKENS))
    width = DTYPE_BYTES[config.generator.dtype]
    experts = (
        shape.top_k * (shape.hidden_size + 3 * shape.expert_width // tp) if shape.moe_layers else 0
    )
    layer = 4 * shape.hidden_size + max(experts, 3 * shape.mlp_width // tp)
    routes = 4 * shape.num_layers * shape.top_k if shape.moe_layers else 0
    if config.routing.gates == "rollout":
        routes *= 2
    return tokens * (width * layer + routes) + 8 * config.generator.concurrency * shape.vocab_size
