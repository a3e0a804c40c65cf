"""One typed run configuration: defaults here, a short TOML file over them, `key=value` overrides over that.

Each section is a struct with its documentation next to the value. Unknown or ill-typed keys are refused with the
key's path and the nearest valid name (`ConfigError`).
"""

from __future__ import annotations

import difflib
import importlib
import inspect
import tomllib
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import msgspec


class ConfigError(ValueError):
    """A configuration that can not be used; the message names the key and the fix."""


class Section(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """Base of all sections."""


def _positive(section: Section, *names: str) -> None:
    for name in names:
        if getattr(section, name) <= 0:
            raise ValueError(f"`{name}` must be greater than 0, got {getattr(section, name)}")


class InitConfig(Section):
    """A small random Qwen3-MoE, made and warmed up on the environment's oracle when `model.path` is not given."""

    seed: int = 0
    """Of the random weights and the warm-up. Its own, so that runs with different `seed`s begin with the same model."""
    hidden_size: int = 128
    layers: int = 4
    heads: int = 4
    kv_heads: int = 2
    experts: int = 8
    top_k: int = 2
    expert_hidden_size: int = 64
    gate_std: float = 0.1
    """Standard deviation of the router weights: larger is a sharper router."""
    max_positions: int = 1024
    rope_theta: float = 10_000.0
    """Base of the rotary positions. Small ones tell near positions apart more easily; large ones reach further."""
    warm_reward: float = 0.4
    """Supervised steps stop when the mean sampled reward reaches this."""
    max_warm_steps: int = 2000
    warm_lr: float = 1e-3
    warm_batch: int = 64

    def __post_init__(self) -> None:
        _positive(
            self,
            "hidden_size",
            "layers",
            "heads",
            "kv_heads",
            "experts",
            "top_k",
            "expert_hidden_size",
            "max_positions",
        )
        if self.top_k > self.experts:
            raise ValueError(f"`top_k` = {self.top_k} is more than `experts` = {self.experts}")
        if self.hidden_size % self.heads or self.heads % self.kv_heads:
            raise ValueError("`hidden_size` must divide by `heads`, and `heads` by `kv_heads`")


class ModelConfig(Section):
    path: str = ""
    """Directory of a Hugging Face model (safetensors + tokenizer with a chat template). Empty: make one from `init`."""
    init: InitConfig = msgspec.field(default_factory=InitConfig)


class EnvConfig(Section):
    name: str = "reverse-text"
    """Built-in name, or `module:Class`."""
    args: dict[str, Any] = {}


class EpisodeConfig(Section):
    max_turns: int = 16
    """Turns after which an episode ends, whatever the environment says."""
    max_new_tokens: int = 256
    """Tokens sampled in one turn, at most; less when little context is left."""
    max_prompt_tokens: int = 1024
    """A first prompt longer than this is an error."""
    max_total_tokens: int = 4096
    """Prompt, observations and answers together."""
    temperature: float = 1.0
    timeout: float = 600.0
    """Seconds one episode may take."""
    retries: int = 2
    """Times a failed episode (an environment's error, an aborted request) is tried again before the run stops."""

    def __post_init__(self) -> None:
        _positive(
            self, "max_turns", "max_new_tokens", "max_prompt_tokens", "max_total_tokens", "temperature", "timeout"
        )
        if self.max_prompt_tokens >= self.max_total_tokens:
            raise ValueError("`max_prompt_tokens` must be less than `max_total_tokens`, or nothing can be sampled")


class GeneratorConfig(Section):
    count: int = 1
    concurrency: int = 64
    """Episodes that one generator plays at once."""
    engine: Literal["vllm"] = "vllm"
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    threads: int = 1
    """OpenMP threads of one engine on CPU. More than one is slower beside a learner on the same cores."""
    kv_cache_gib: float = 1.0
    """KV cache of one engine on CPU, GiB."""
    max_restarts: int = 8
    """Times one generator process is restarted before the run stops."""
    start_timeout: float = 600.0
    engine_args: dict[str, Any] = {}
    """Passed to vLLM's AsyncEngineArgs as they are, over ours."""

    def __post_init__(self) -> None:
        _positive(self, "count", "concurrency", "threads", "kv_cache_gib", "start_timeout")
        if self.max_restarts < 0:
            raise ValueError("`max_restarts` must not be negative")


class ScheduleConfig(Section):
    max_staleness: int = 1
    """Versions that the oldest trained token may lag behind. 0 is exactly on-policy (synchronous) training."""
    groups_per_step: int = 16
    """Groups that a step trains; with `tokens_per_step`, at least."""
    tokens_per_step: int = 0
    """If not 0, a step takes further groups, in lease order, until it has that many trainable tokens, or until it has all
    groups that may be in flight: `(max_staleness + 1) * groups_per_step * steps_per_publication`."""
    samples_per_group: int = 8
    minibatches_per_step: int = 1
    """Parts into which a step's samples are divided, each trained with an optimizer update of its own."""
    steps_per_publication: int = 1
    """Steps between two versions of the weights that engines are given. Staleness counts versions."""

    def __post_init__(self) -> None:
        _positive(self, "groups_per_step", "samples_per_group", "minibatches_per_step", "steps_per_publication")
        if self.tokens_per_step < 0:
            raise ValueError("`tokens_per_step` must be 0 (off) or more")
        if self.minibatches_per_step > self.groups_per_step * self.samples_per_group:
            raise ValueError(
                "`minibatches_per_step` is more than a step's samples, groups_per_step * samples_per_group"
            )
        if self.max_staleness < 0:
            raise ValueError("`max_staleness` must be 0 (on-policy) or more")


class RoutingConfig(Section):
    replay: Literal["rollout", "learner", "off"] = "rollout"
    """`rollout`: the learner uses the experts that the engine chose (R3). `learner`: those that it chose itself in a pass
    before the step (R2). `off`: every pass routes by itself."""
    min_recorded_fraction: float = 0.9
    """With replay, a step whose recorded share of trained tokens' inputs is below this stops the run."""
    trace: Literal["off", "sample", "all"] = "sample"
    """Whose routes are kept in `runs/NAME/routes`, as the engine returned them and as the learner used them. `sample`: the
    first trajectory's of every `trace_every`-th step. `all`: every trajectory's; `r3async inspect NAME --verify-routes`
    then proves that they are equal. Per token 14 bytes and 3 ids for each MoE layer and expert it is sent to."""
    trace_every: int = 10

    def __post_init__(self) -> None:
        _positive(self, "trace_every")
        if not 0 <= self.min_recorded_fraction <= 1:
            raise ValueError("`min_recorded_fraction` must be in 0..1")


class RolloutKLConfig(Section):
    """The trust region: a term `coef * KL(rollout || learner)` on every trained token."""

    estimator: Literal["k1", "abs", "k2", "k3"] = "k2"
    """Of the term in the loss. What is measured, for `target` and `max`, is always k3's mean over trained tokens."""
    coef: float = 0.01
    """Weight of the term; with `target`, where it starts."""
    target: float | None = None
    """Drift, in nats per token, to which the coefficient is adapted after every step. Unset: the coefficient stays."""
    max: float | None = None
    """A step whose measured drift is above this, or not finite, makes no optimizer update. Unset: none is refused."""
    coef_min: float = 1e-4
    coef_max: float = 100.0
    """Bounds of the adapted coefficient."""
    gain: float = 0.1
    """Of the adaptation: e-folds that the coefficient moves in a step when drift is twice its target."""

    def __post_init__(self) -> None:
        if self.coef < 0:
            raise ValueError("`coef` must not be negative")
        _positive(self, "coef_min", "gain", *(n for n in ("target", "max") if getattr(self, n) is not None))
        if self.coef_max < self.coef_min:
            raise ValueError("`coef_max` must be at least `coef_min`")
        if self.target is not None and not self.coef_min <= self.coef <= self.coef_max:
            raise ValueError("with `target`, `coef` must be between `coef_min` and `coef_max`")
        if self.target is not None and self.max is not None and self.max <= self.target:
            raise ValueError("`max` must be more than `target`, or every other step makes no update")


class ReferenceKLConfig(Section):
    coef: float = 0.0
    """Weight of KL(learner || frozen reference model); 0 does without that model."""

    def __post_init__(self) -> None:
        if self.coef < 0:
            raise ValueError("`coef` must not be negative")


class ClipConfig(Section):
    """Ratios are clipped to `1 - clip_low .. 1 + clip_high`."""

    clip_low: float = 0.2
    clip_high: float = 0.2
    """DAPO (arXiv 2503.14476) takes 0.28."""

    def __post_init__(self) -> None:
        _positive(self, "clip_low", "clip_high")


class PPOConfig(ClipConfig):
    dual_clip: float | None = None
    """If set, bounds the loss of tokens with negative advantage to this many times the advantage (3 in arXiv 1912.09729)."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.dual_clip is not None and self.dual_clip <= 1:
            raise ValueError("`dual_clip` must be more than 1")


class DecoupledPPOConfig(PPOConfig):
    behaviour_cap: float = 5.0
    """Truncation of the behaviour weights, recomputed / rollout."""

    def __post_init__(self) -> None:
        super().__post_init__()
        _positive(self, "behaviour_cap")


class GSPOConfig(ClipConfig):
    clip_low: float = 3e-4
    clip_high: float = 4e-4


class CISPOConfig(ClipConfig):
    clip_low: float = 1.0
    """1: no lower bound."""
    clip_high: float = 4.0


class SAPOConfig(Section):
    tau_positive: float = 1.0
    tau_negative: float = 1.05
    """Temperatures of the gate, for tokens of positive and of negative advantage."""

    def __post_init__(self) -> None:
        _positive(self, "tau_positive", "tau_negative")


class DPPOConfig(Section):
    threshold_low: float = 0.2
    threshold_high: float = 0.2
    """|difference of probability| above which a token is pushed no further down, and no further up."""

    def __post_init__(self) -> None:
        _positive(self, "threshold_low", "threshold_high")


class CorrectionConfig(Section):
    """Trained tokens that the policy loss leaves out because learner and rollout policy differ on them too much. The KL
    terms keep them, and denominators stay. Each is off unless set; a ratio is learner / rollout, and bounds are inclusive."""

    icepop_low: float | None = None
    icepop_high: float | None = None
    """A token is kept if its ratio is within these. IcePop: 0.5 and 5."""
    kpop: float | None = None
    """A token is kept if the binary KL, in both directions, is at most this. KPop: 0.1."""
    geometric_low: float | None = None
    geometric_high: float | None = None
    """A sample is kept if the geometric mean of its tokens' ratios is within these, 0.99 and 1.001, say."""
    product_low: float | None = None
    product_high: float | None = None
    """A sample is kept if the product of its tokens' ratios is within these."""
    max_token_kl: float | None = None
    """A sample is kept if none of its tokens' k3 is above this."""
    max_token_age: int | None = None
    """A token is kept if the learner is at most this many versions ahead of the one that sampled it."""

    def __post_init__(self) -> None:
        for name in ("icepop", "geometric", "product"):
            low, high = getattr(self, f"{name}_low"), getattr(self, f"{name}_high")
            if low is not None and not 0 < low <= 1:
                raise ValueError(f"`{name}_low` must be in 0..1: a ratio of 1 means that the policies agree")
            if high is not None and high < 1:
                raise ValueError(f"`{name}_high` must be at least 1: a ratio of 1 means that the policies agree")
        for name in ("kpop", "max_token_kl", "max_token_age"):
            value = getattr(self, name)
            if value is not None and value < 0:
                raise ValueError(f"`{name}` must not be negative")


class OverlongPenaltyConfig(Section):
    """DAPO's soft punishment of long answers (arXiv 2503.14476, eq. 13)."""

    buffer: int = 0
    """Tokens before `episode.max_new_tokens` over which the penalty grows from 0 to `factor`; 0: no penalty."""
    factor: float = 1.0

    def __post_init__(self) -> None:
        if self.buffer < 0:
            raise ValueError("`buffer` must not be negative")
        _positive(self, "factor")


POLICY_LOSSES = ("tis", "ppo", "gspo", "cispo", "sapo", "dppo", "decoupled_ppo")
"""The built-in values of `algorithm.policy_loss`."""


class RouterAuxConfig(Section):
    """Load balance of the routers, with the experts that were replayed as the load."""

    coef: float = 0.0
    """Weight of `experts * sum_i f_i P_i` of every MoE layer: `f_i` the share of the step's choices that fell on expert i,
    `P_i` the router's mean probability of it (Switch Transformer, arXiv 2101.03961, eq. 4). 1 is even. Needs
    `routing.replay`, whose routes are known before the step's first forward pass."""

    def __post_init__(self) -> None:
        if self.coef < 0:
            raise ValueError("`coef` must not be negative")


class AlgorithmConfig(Section):
    advantage: Literal["grpo", "dr_grpo", "rloo", "reinforce_pp", "reinforce_pp_baseline", "maxrl"] = "grpo"
    """How scores become advantages; formulas and sources in `algorithms.estimators`."""
    credit: Literal["turn", "trajectory", "token"] = "turn"
    """`turn`: a turn's advantage is relative to the same turn of its group. `trajectory`: all turns share the episode's.
    `token`: a token's score is the reward from it to the episode's end, relative to the same turn of its group."""
    normalize_std: bool = True
    """With `advantage = "grpo"`, divide by the group's standard deviation; off gives Dr.GRPO's."""
    filter_zero_variance: bool = False
    """Do not train groups whose episodes all scored the same (DAPO's dynamic sampling, without sampling again)."""
    overlong_filter: bool = False
    """Do not train episodes that ended because an answer, or the context, became too long. They still count as scores."""
    overlong_penalty: OverlongPenaltyConfig = msgspec.field(default_factory=OverlongPenaltyConfig)
    reduction: Literal["token_mean", "sequence_mean", "sequence_mean_token_sum_norm", "prompt_mean"] = "token_mean"
    """What the loss is a mean over; formulas in `algorithms.reduction`."""
    policy_loss: str = "tis"
    """`tis`, `ppo`, `gspo`, `cispo`, `sapo`, `dppo`, `decoupled_ppo` (formulas and sources in `algorithms.policy_loss`), or
    your own as `module:function`, of the type `algorithms.policy_loss.PolicyLossFunction`."""
    anchor: Literal["rollout", "recomputed"] = "rollout"
    """Denominator of the policy loss's ratio: the log-probs that the engine sampled with, or those that the learner
    recomputes before the step's first update (one more forward pass)."""
    ratio_cap: float = 2.0
    """Of `tis`: truncation of its importance weights."""
    ppo: PPOConfig = msgspec.field(default_factory=PPOConfig)
    gspo: GSPOConfig = msgspec.field(default_factory=GSPOConfig)
    cispo: CISPOConfig = msgspec.field(default_factory=CISPOConfig)
    sapo: SAPOConfig = msgspec.field(default_factory=SAPOConfig)
    dppo: DPPOConfig = msgspec.field(default_factory=DPPOConfig)
    decoupled_ppo: DecoupledPPOConfig = msgspec.field(default_factory=DecoupledPPOConfig)
    loss_args: dict[str, Any] = {}
    """Passed to your own policy loss, as `inputs.config.loss_args`."""
    correction: CorrectionConfig = msgspec.field(default_factory=CorrectionConfig)
    entropy_coef: float = 0.0
    """Weight of the entropy bonus."""
    rollout_kl: RolloutKLConfig = msgspec.field(default_factory=RolloutKLConfig)
    reference_kl: ReferenceKLConfig = msgspec.field(default_factory=ReferenceKLConfig)
    router_aux: RouterAuxConfig = msgspec.field(default_factory=RouterAuxConfig)

    def __post_init__(self) -> None:
        _positive(self, "ratio_cap")
        if self.advantage == "maxrl" and self.overlong_penalty.buffer:
            raise ValueError("`overlong_penalty` makes rewards negative, and `advantage` = 'maxrl' is for rewards >= 0")
        if self.policy_loss not in POLICY_LOSSES:
            import_policy_loss(self.policy_loss)


def import_policy_loss(path: str) -> Callable[..., Any]:
    """The function at `module:function`. Raises `ValueError` if there is none that takes one argument."""
    module_name, colon, name = path.partition(":")
    if not colon:
        near = difflib.get_close_matches(path, POLICY_LOSSES, n=1, cutoff=0.4)
        hint = f"did you mean {near[0]!r}?" if near else f"built in: {', '.join(POLICY_LOSSES)}."
        raise ValueError(f"`policy_loss` = {path!r}: no such loss; {hint} Your own is `module:function`.")
    try:
        function = getattr(importlib.import_module(module_name), name)
    except Exception as error:  # importing somebody's module may raise anything
        raise ValueError(f"`policy_loss` = {path!r} can not be loaded: {error}") from error
    try:
        inspect.signature(function).bind(None)
    except TypeError as error:
        raise ValueError(
            f"`policy_loss` = {path!r} must be a function of one argument, the loss inputs: {error}"
        ) from error
    return function


class ParallelConfig(Section):
    """How the learner's ranks divide the model and the batch; there are `dp * tp * pp` of them."""

    dp: int = 1
    """Data parallel: ranks (or groups of ranks) that train different micro-batches. With `backend = "torch"` the weights
    are sharded among them (FSDP2)."""
    tp: int = 1
    """Tensor parallel, always with sequence parallelism."""
    pp: int = 1
    """Pipeline stages (1F1B)."""
    ep: int = 1
    """Expert parallel: among how many of the `dp * tp` ranks of a stage the experts are divided."""
    cp: int = 1
    """Context parallel: not supported."""
    vpp: int = 1
    """Virtual pipeline stages: not supported."""

    @property
    def world(self) -> int:
        return self.dp * self.tp * self.pp

    def __post_init__(self) -> None:
        _positive(self, "dp", "tp", "pp", "ep", "cp", "vpp")
        if self.dp * self.tp % self.ep:
            raise ValueError(
                f"`ep` = {self.ep} must divide dp * tp = {self.dp * self.tp}: experts are divided among these"
            )
        if self.cp > 1:
            raise ValueError(
                "`cp` (context parallelism) is not supported: samples are packed whole, and attention sees them on one rank; "
                "use `tp` for long samples, whose activations it splits along the sequence"
            )
        if self.vpp > 1:
            raise ValueError(
                "`vpp` (virtual pipeline stages) is not supported: a rank would hold several separate pieces of the model, and "
                "neither weights nor recorded routes are divided that way; use `pp` alone"
            )


class LearnerConfig(Section):
    backend: Literal["megatron", "torch"] = "megatron"
    """`megatron`: Qwen3-MoE on megatron-core. `torch`: any mixture of experts that transformers has, with FSDP2."""
    parallel: ParallelConfig = msgspec.field(default_factory=ParallelConfig)
    recompute: Literal["none", "selective", "full"] = "none"
    """Activations made again in the backward pass: `selective` those of MoE layers, `full` those of whole layers."""
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    """Compute dtype; the optimizer keeps fp32 master weights."""
    lr: float = 1e-6
    warmup_steps: int = 0
    weight_decay: float = 0.0
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    max_grad_norm: float = 1.0
    max_tokens_per_micro_batch: int = 16384
    threads: int = 1
    """Torch threads of the learner on CPU."""
    start_timeout: float = 600.0
    collective_timeout: float = 600.0
    """Seconds that one rank waits for the others before it gives up."""

    def __post_init__(self) -> None:
        _positive(self, "lr", "eps", "max_grad_norm", "max_tokens_per_micro_batch", "threads", "start_timeout")
        _positive(self, "collective_timeout")
        p = self.parallel
        if self.backend == "torch" and max(p.tp, p.pp, p.ep) > 1:
            raise ValueError(
                '`backend` = "torch" shards everything over `parallel.dp` (FSDP2); tp, pp and ep need backend = "megatron"'
            )


class WeightsConfig(Section):
    install_timeout: float = 120.0
    probe: bool = True
    """After the first delivery, compare log-probs of a fixed text between learner and engine; refuse to train on a mismatch."""
    probe_tolerance: float | None = None
    """Mean |difference| in nats that the probe accepts. Default: 1e-3 if engine and learner are both float32, else 0.15."""
    directory: str = ""
    """Where published weights live; default: shared memory (`/dev/shm`), or the temporary directory where there is none."""


class TransportConfig(Section):
    host: str = "127.0.0.1"
    """Interface that the learner's socket binds to. Loopback unless named."""
    credit_bytes: int = 256 * 2**20
    """Bytes of trajectories that all generators together may have unacknowledged or waiting at the learner."""
    ack_timeout: float = 5.0
    """Seconds without an acknowledgement after which a sender says HELLO again and resends."""
    max_message_bytes: int = 64 * 2**20

    def __post_init__(self) -> None:
        _positive(self, "credit_bytes", "ack_timeout", "max_message_bytes")


class SuperviseConfig(Section):
    stall_seconds: float = 600.0
    """The run stops with the reason if no group arrives for this long."""
    stop_grace_seconds: float = 30.0

    def __post_init__(self) -> None:
        _positive(self, "stall_seconds", "stop_grace_seconds")


class ClusterConfig(Section):
    address: str = ""
    """Address of a Ray cluster. Empty: the one in RAY_ADDRESS, else a local one is started."""


class Config(Section):
    """A whole run."""

    name: str = ""
    """Run directory below `runs/`; default: preset and time."""
    seed: int = 0
    steps: int = 100
    model: ModelConfig = msgspec.field(default_factory=ModelConfig)
    env: EnvConfig = msgspec.field(default_factory=EnvConfig)
    episode: EpisodeConfig = msgspec.field(default_factory=EpisodeConfig)
    generator: GeneratorConfig = msgspec.field(default_factory=GeneratorConfig)
    schedule: ScheduleConfig = msgspec.field(default_factory=ScheduleConfig)
    routing: RoutingConfig = msgspec.field(default_factory=RoutingConfig)
    algorithm: AlgorithmConfig = msgspec.field(default_factory=AlgorithmConfig)
    learner: LearnerConfig = msgspec.field(default_factory=LearnerConfig)
    weights: WeightsConfig = msgspec.field(default_factory=WeightsConfig)
    transport: TransportConfig = msgspec.field(default_factory=TransportConfig)
    supervise: SuperviseConfig = msgspec.field(default_factory=SuperviseConfig)
    cluster: ClusterConfig = msgspec.field(default_factory=ClusterConfig)

    def __post_init__(self) -> None:
        _positive(self, "steps")
        if self.algorithm.router_aux.coef and self.routing.replay == "off":
            raise ValueError("`algorithm.router_aux.coef` needs the routes of a step beforehand: set `routing.replay`")
        if self.episode.max_total_tokens > self.learner.max_tokens_per_micro_batch:
            raise ValueError(
                f"`episode.max_total_tokens` = {self.episode.max_total_tokens} is more than "
                f"`learner.max_tokens_per_micro_batch` = {self.learner.max_tokens_per_micro_batch}: "
                "such a sample could not be trained"
            )


def _fields(kind: type) -> dict[str, Any]:
    return {f.encode_name: f.type for f in msgspec.structs.fields(kind)}


def _unknown_key(path: str, key: str, names: Sequence[str]) -> ConfigError:
    near = difflib.get_close_matches(key, names, n=1, cutoff=0.5)
    prefix = f"{path}." if path else ""
    hint = f"did you mean `{prefix}{near[0]}`?" if near else f"valid here: {', '.join(names)}"
    return ConfigError(f"unknown key `{prefix}{key}`: {hint}")


def _convert(kind: Any, value: Any, path: str) -> Any:
    """Build section `kind` from plain data, with dotted paths in every error."""
    if not (isinstance(kind, type) and issubclass(kind, Section)):
        try:
            return msgspec.convert(value, kind)
        except msgspec.ValidationError as error:
            raise ConfigError(f"`{path}` = {value!r}: {str(error).split(' - at')[0]}{_expected(kind)}") from error
    if not isinstance(value, Mapping):
        raise ConfigError(
            f"`{path}` is a section, not the value {value!r}; set one of its keys: {', '.join(_fields(kind))}"
        )
    fields = _fields(kind)
    built = {}
    for key, inner in value.items():
        if key not in fields:
            raise _unknown_key(path, key, list(fields))
        built[key] = _convert(fields[key], inner, f"{path}.{key}" if path else key)
    try:
        return kind(**built)
    except ValueError as error:
        raise ConfigError(f"[{path}] {error}" if path else str(error)) from error


def _expected(kind: Any) -> str:
    if typing.get_origin(kind) is Literal:
        return f" (one of: {', '.join(map(repr, typing.get_args(kind)))})"
    if typing.get_origin(kind) in (typing.Union, types.UnionType):
        return ""
    return f" (a {kind.__name__})" if isinstance(kind, type) else ""


def parse_override(text: str) -> tuple[list[str], Any]:
    """`learner.lr=1e-4` -> (["learner", "lr"], 0.0001). Values are TOML; a bare word is a string."""
    path, equals, raw = text.partition("=")
    if not equals or not path.strip():
        raise ConfigError(f"override {text!r} is not of the form key=value, for example learner.lr=1e-4")
    try:
        value = tomllib.loads(f"value = {raw}")["value"]
    except tomllib.TOMLDecodeError:
        value = raw
    return [part.strip() for part in path.split(".")], value


def _merge(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    out = dict(base)
    for key, value in over.items():
        old = out.get(key)
        out[key] = _merge(old, value) if isinstance(value, Mapping) and isinstance(old, Mapping) else value
    return out


def preset_directory() -> Path:
    """Where the presets are: beside the code in a checkout, inside the package when installed from a wheel."""
    packaged = Path(__file__).parent / "presets"
    return packaged if packaged.is_dir() else Path(__file__).parent.parent / "configs"


def find_config(name_or_path: str) -> Path:
    """A TOML file, or the preset of that name. Raises `ConfigError` with the nearest preset's name."""
    path = Path(name_or_path)
    if path.suffix == ".toml":
        if not path.is_file():
            raise ConfigError(f"no such file: {name_or_path}")
        return path
    preset = preset_directory() / f"{name_or_path}.toml"
    if not preset.is_file():
        names = sorted(p.stem for p in preset_directory().glob("*.toml"))
        near = difflib.get_close_matches(name_or_path, names, n=1, cutoff=0.4)
        hint = f"did you mean {near[0]!r}?" if near else f"there are: {', '.join(names)}"
        raise ConfigError(f"no preset {name_or_path!r}; {hint} (a file must end in .toml)")
    return preset


def _read(path: Path, seen: tuple[Path, ...] = ()) -> dict[str, Any]:
    if path in seen:
        raise ConfigError(f"`extends` goes in a circle: {' -> '.join(str(p) for p in (*seen, path))}")
    try:
        data = tomllib.loads(path.read_text())
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path} is not valid TOML: {error}") from error
    base = data.pop("extends", None)
    return _merge(_read(find_config(base), (*seen, path)), data) if base is not None else data


def load_config(name_or_path: str, overrides: Sequence[str] = ()) -> Config:
    """The configuration of a preset or file (which may `extends` another), with `key=value` overrides."""
    data = _read(find_config(name_or_path))
    for text in overrides:
        keys, value = parse_override(text)
        nested: Any = value
        for key in reversed(keys):
            nested = {key: nested}
        data = _merge(data, nested)
    return _convert(Config, data, "")


def config_from_dict(data: Mapping[str, Any]) -> Config:
    return _convert(Config, data, "")


def to_dict(config: Section) -> dict[str, Any]:
    """Plain data, every key resolved."""
    return msgspec.to_builtins(config)


def to_toml(config: Config) -> str:
    """The resolved configuration as TOML. Unset (None) values are left out: TOML has no null."""

    def without_none(value: Any) -> Any:
        if isinstance(value, dict):
            return {k: without_none(v) for k, v in value.items() if v is not None}
        return value

    return msgspec.toml.encode(without_none(to_dict(config))).decode()
