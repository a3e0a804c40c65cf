"""The other sections, one a room."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import msgspec

from r3async.config.secret import Secret, revealed
from r3async.config.section import Bytes, Positive, PositiveInt, Section, Seed, Share, Signed


class InitConfig(Section):
    """A small random Qwen3-MoE, made and warmed up on the environment's oracle when `model.path` is not given."""

    seed: Seed = 0
    """Of the random weights and the warm-up. Its own, so that runs with different `seed`s begin with the same model."""
    hidden_size: PositiveInt = 128
    layers: PositiveInt = 4
    heads: PositiveInt = 4
    kv_heads: PositiveInt = 2
    experts: PositiveInt = 8
    top_k: PositiveInt = 2
    expert_hidden_size: PositiveInt = 64
    gate_std: float = 0.1
    """Standard deviation of the router weights: larger is a sharper router."""
    max_positions: PositiveInt = 1024
    rope_theta: Positive = 10_000.0
    """Base of the rotary positions. Small ones tell near positions apart more easily; large ones reach further."""
    warm_reward: Signed = 0.4
    """Supervised steps stop when the mean sampled reward reaches this."""
    max_warm_steps: int = 2000
    warm_lr: Positive = 1e-3
    warm_batch: PositiveInt = 64

    def __post_init__(self) -> None:
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
    """Built-in name; `module:Class`; `dataset:PATH` (JSONL); or an adapter's: `reasoning-gym:TASK`, `gymnasium:ID`,
    `textarena:ID`, `verifiers:ID`."""
    args: dict[str, Any] = msgspec.field(default_factory=dict)
    workers: PositiveInt = 2
    """Processes that play blocking environments (plain `def reset` and `def step`), in each generator."""
    step_timeout: Positive = 30.0
    """Seconds that one call of a blocking environment may take; its process is then killed and replaced."""
    start_timeout: Positive = 120.0
    """Seconds that such a process may take to start and to import the environment."""
    variables: list[str] = msgspec.field(default_factory=list)
    """Environment variables of the generator that these processes, and the programs of `agent-command`, get besides a few that
    every program needs (PATH, HOME, LANG, TMPDIR, PYTHON…). No other is passed on."""

    def __post_init__(self) -> None:
        if isinstance(environment := self.args.get("environment"), Mapping):
            hidden = {name: Secret(value) if isinstance(value, str) else value for name, value in environment.items()}
            self.args = {**self.args, "environment": hidden}

    def arguments(self, setting: str = "env.args") -> dict[str, Any]:
        """`args` with the secrets of `args.environment` revealed. Raises `ConfigError`."""
        return revealed(self.args, setting)


RowsMode = Literal["auto", "merged", "stepwise"]


class EpisodeConfig(Section):
    max_turns: PositiveInt = 16
    """Turns after which an episode ends, whatever the environment says."""
    max_new_tokens: PositiveInt = 256
    """Tokens sampled in one turn, at most; less when little context is left."""
    max_prompt_tokens: PositiveInt = 3840
    """Of any turn's prompt, with everything that the model is shown in it: a first prompt that is longer is an error, a later
    one ends the episode (`stop_reason` `length`)."""
    max_total_tokens: PositiveInt = 4096
    """Of any turn's prompt and its answer together: what a row of training may have."""
    rows: RowsMode = "auto"
    """`auto`: turns are one row of training as long as each prompt extends what the model has seen exactly, and a new row where
    one does not (a template or an environment that rewrites history). `merged`: the same, but that is an error.
    `stepwise`: one row a turn."""
    template_args: dict[str, Any] = msgspec.field(default_factory=dict)
    """Further variables of the chat template, for example `{ enable_thinking = false }`."""
    temperature: Positive = 1.0
    timeout: Positive = 600.0
    """Seconds one episode may take. One that has answers by then is trained on them; another is tried again."""
    retries: int = 2
    """Times an episode in which the environment failed is tried again. What becomes of one that fails for good:
    `supervise.max_failed_fraction`."""
    engine_retries: int = 2
    """Times in an episode that a call at which the engine failed (an error, an aborted request) is made again. The turns before
    it stay; an episode that needs more has failed."""

    def __post_init__(self) -> None:
        if self.max_prompt_tokens >= self.max_total_tokens:
            raise ValueError("`max_prompt_tokens` must be less than `max_total_tokens`, or nothing can be sampled")


class GeneratorConfig(Section):
    count: PositiveInt = 1
    concurrency: PositiveInt = 64
    """Episodes that one generator plays at once, at most."""
    concurrency_min: PositiveInt = 1
    """Episodes that it plays at once at least, however full its engine's KV cache is: between the two the number follows
    the cache. Set it to `concurrency` to keep the number fixed."""
    engine: Literal["vllm", "scripted"] = "vllm"
    """`scripted`: no model at all. Answers are letters at random, and log-probs and routes are made up: for rehearsing how a run
    fails and recovers where vLLM is not at hand, with `weights.probe=false` or `learner.backend="scripted"`. Nothing is
    learnt."""
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    threads: PositiveInt = 1
    """OpenMP threads of one engine on CPU. More than one is slower beside a learner on the same cores."""
    kv_cache_gib: Positive = 1.0
    """KV cache of one engine on CPU, GiB."""
    on_update: Literal["keep", "recompute", "drain"] = "keep"
    """Requests that run when new weights come. `keep`: they go on with the keys and values that the old weights made.
    `recompute`: keys and values are made anew by the new weights; tokens, log-probs and routes that they have stay.
    `drain`: the weights wait for them, and new requests wait for the weights."""
    max_restarts: int = 8
    """Times one generator process is restarted before the run stops."""
    start_timeout: Positive = 600.0
    engine_args: dict[str, Any] = msgspec.field(default_factory=dict)
    """Passed to vLLM's AsyncEngineArgs as they are; refused where r3async sets or relies on a value of its own. The scripted
    engine knows `token_seconds`."""

    def __post_init__(self) -> None:
        if self.concurrency_min > self.concurrency:
            raise ValueError("`concurrency_min` must not be more than `concurrency`")


class ScheduleConfig(Section):
    max_staleness: int = 1
    """Versions that the oldest trained token may lag behind, with `window = 1`. 0 is exactly on-policy (synchronous)
    training, whatever the window."""
    window: PositiveInt = 1
    """1: groups are trained strictly in the order of their leases. Larger: a step takes the oldest complete groups among the
    `window` oldest that are not trained, so that `window - 1` younger groups may overtake a late one. A token may then be
    `max_staleness + ceil((window - 1) / (groups_per_step * steps_per_publication))` versions old."""
    max_token_age: int | None = None
    """Tokens of which the learner is more versions ahead are left out of the policy loss, one by one. The KL terms keep them,
    and denominators stay. Unset: none is."""
    split: Literal["idle", "room"] = "idle"
    """When the episodes of one group, which share a prompt, are played by several generators. `idle`: when fewer groups can be
    leased than generators have nothing to do, or when a group is larger than what a generator may play at once. `room`:
    also whenever a generator has room for a part of one."""
    pace_seconds: Positive = 60.0
    """An event says which side to give more resources when the other one has waited for it for this long."""
    groups_per_step: PositiveInt = 16
    """Groups that a step trains; with `tokens_per_step`, at least."""
    tokens_per_step: int = 0
    """If not 0, a step takes further groups, in lease order, until it has that many trainable tokens, or until it has all
    groups that may be in flight: `(max_staleness + 1) * groups_per_step * steps_per_publication`."""
    samples_per_group: PositiveInt = 8
    minibatches_per_step: PositiveInt = 1
    """Parts into which a step's groups are divided, each trained with an optimizer update of its own. At most
    `groups_per_step`: a group is never divided."""
    steps_per_publication: PositiveInt = 1
    """Steps between two versions of the weights that engines are given. Staleness counts versions."""

    def __post_init__(self) -> None:
        if self.minibatches_per_step > self.groups_per_step:
            raise ValueError(
                f"`minibatches_per_step` = {self.minibatches_per_step} is more than `groups_per_step` = "
                f"{self.groups_per_step}: a group is trained in one minibatch. Lower the first or raise the second"
            )


class RoutingConfig(Section):
    replay: Literal["rollout", "learner", "off"] = "rollout"
    """`rollout`: the learner uses the experts that the engine chose (R3). `learner`: those that it chose itself in a pass
    before the step (R2). `off`: every pass routes by itself."""
    min_recorded_fraction: Share = 0.9
    """With replay, a step whose recorded share of trained tokens' inputs is below this stops the run."""
    trace: Literal["off", "sample", "all"] = "sample"
    """Whose routes are kept in `runs/NAME/routes`, as the engine returned them and as the learner used them. `sample`: the
    first trajectory's of every `trace_every`-th step. `all`: every trajectory's; `r3async inspect verify NAME`
    then proves that they are equal. Per token 25 bytes and 3 ids for each MoE layer and expert it is sent to."""
    trace_every: PositiveInt = 10


class WeightsConfig(Section):
    backend: Literal["auto", "shared_memory", "object_store", "nccl"] = "auto"
    """How weights get to the engines. `shared_memory`: a file that engines of the learner's host map. `object_store`: through
    Ray's object store to any host, and there into such a file. `auto`: the first if all are on one host, else the second.
    `nccl`: from the learner's GPU to the engines'; refused without CUDA on both sides, and not yet run on GPUs."""
    bucket_bytes: Bytes = 64 * 2**20
    """Weights are converted and sent in pieces of this size, so that no second copy of the model is held on the way."""
    install_timeout: Positive = 120.0
    """Seconds that an engine may take to get and install a version; with `generator.on_update = drain`, the wait included."""
    write_timeout: Positive = 600.0
    """Seconds that writing one version may take. It is written beside the next step; the step after that waits for it."""
    probe: bool = True
    """Compare log-probs of a fixed text, and those that the engine reports of tokens sampled after it at the run's temperature,
    between learner and engine; on a mismatch stop the run and name the tensor. At the first delivery, every `probe_every`
    versions, and when a generator was restarted."""
    probe_every: PositiveInt = 10
    """Versions between two probes of a generator."""
    probe_tolerance: float | None = None
    """Mean |difference| in nats that the probe accepts. Default: 1e-3 if engine and learner are both float32, else 0.15."""
    directory: str = ""
    """Where published weights live; default: shared memory (`/dev/shm`), or the temporary directory where there is none."""


class TransportConfig(Section):
    host: str = "127.0.0.1"
    """Interface that the learner's socket binds to. Loopback unless named."""
    credit_bytes: Bytes = 256 * 2**20
    """Bytes of trajectories that may wait at the learner, beyond those of the next step; what does not fit waits at its
    generator. As many as half of it may be in flight besides."""
    ack_timeout: Positive = 5.0
    """Seconds without an acknowledgement after which a sender says HELLO again and resends."""
    max_message_bytes: Bytes = 64 * 2**20
    """Largest trajectory, in memory."""
    keys: str = ""
    """Directory made by `r3async keys`: its keys are used, and only those that it holds are let in. Empty: each start of the run
    makes keys of its own. Connections are encrypted in both cases, over loopback too."""
    trusted_network: bool = False
    """Everything that reaches `host` is trusted: `weights.backend = "nccl"`, which has no keys, may then send over it."""


class ClusterConfig(Section):
    address: str = ""
    """Address of a Ray cluster. Empty: the one in RAY_ADDRESS, else a local one is started."""
    gpu_gib: Positive = 80.0
    """Memory of one GPU, which `--dry-run` and `r3async cluster` reckon with."""
