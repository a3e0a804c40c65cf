"""Configuration sections for operating a run: schedule, weights, transport, supervision, checkpoints, metrics and
the cluster."""

from __future__ import annotations

from typing import Literal

import msgspec

from r3async.config.section import ByteCount, Port, PositiveFloat, PositiveInt, Section, SignedFloat, UnitFraction

# Difficulty filter and curriculum: tasks are posed more or less often, by the scores of their groups.


class DifficultyConfig(Section):
    """Difficulty filter and curriculum, for environments that know how many tasks they have. Off by default."""

    groups: PositiveInt = 3
    """Number of a task's most recent groups whose mean rewards decide how difficult it is."""
    settled_share: UnitFraction = 1.0
    """Difficulty filter: share of its turns in which a settled task is posed; in the others another task takes its
    place. A task is settled if its last `groups` groups all had `easy` or more, or all `hard` or less. 1: no filter.
    0.1 still notices a task that the model has learnt or forgotten."""
    easy: SignedFloat = 1.0
    """Mean reward of a group at or above which it is too easy."""
    hard: SignedFloat = 0.0
    """Mean reward of a group at or below which it is too hard."""
    target: SignedFloat | None = None
    """Curriculum: among `among` tasks, the next one and others at random, pose the one whose last groups' mean reward
    is nearest to this. Unset: tasks are posed in turn."""
    among: PositiveInt = 4
    """Number of tasks that the curriculum chooses among."""

    @property
    def is_active(self) -> bool:
        """True if past rewards change which tasks are posed."""
        return self.settled_share < 1 or self.target is not None

    def check_values(self) -> None:
        if self.hard >= self.easy:
            raise ValueError(f"`hard` = {self.hard:g} must be less than `easy` = {self.easy:g}")


class ScheduleConfig(Section):
    max_staleness: int = 1
    """Versions that the oldest trained token may lag behind, with `window = 1`. 0 is exactly on-policy (synchronous)
    training, whatever the window."""
    window: PositiveInt = 1
    """Number of the oldest untrained groups that a step may choose from. 1: strictly in the order of their leases.
    Larger: up to `window - 1` younger groups may overtake a late one, and a token may be `max_staleness + ceil((window
    - 1) / (prompts_per_step * steps_per_publication))` versions old."""
    max_token_age: int | None = None
    """Maximum age of a token in versions: older tokens are left out of the policy loss, but not of the KL terms. Unset:
    no token is left out."""
    split: Literal["idle", "capacity"] = "idle"
    """Condition for playing one group on several generators. `idle`: when fewer groups can be leased than generators
    are idle, or when a group is larger than what one may play at once. `capacity`: also whenever a generator has
    capacity for a part."""
    pace_seconds: PositiveFloat = 60.0
    """Seconds that learner or generators wait for the other side before an event names the slower side."""
    prompts_per_step: PositiveInt = 16
    """Groups that a step trains; with `tokens_per_step`, the minimum."""
    tokens_per_step: int = 0
    """Minimum number of trainable tokens of a step. If not 0, a step takes further groups until it has that many, or
    all that may be in flight."""
    replaced_groups: int = 0
    """Dynamic sampling: maximum number of groups that a step takes in place of those whose episodes all have the same
    score, without `algorithm.overlong_penalty`. Set `algorithm.filter_zero_variance` too, which keeps the replaced ones
    from training."""
    difficulty: DifficultyConfig = msgspec.field(default_factory=DifficultyConfig)
    group_size: PositiveInt = 8
    """Episodes of one prompt, whose rewards are compared."""
    minibatches_per_step: PositiveInt = 1
    """Parts into which a step's groups are divided, each trained with its own optimizer update. At most
    `prompts_per_step`: a group is never divided."""
    epochs_per_step: PositiveInt = 1
    """Times that a step goes through its minibatches, with an update for each. Staleness stays the same; drift is
    measured before each update."""
    steps_per_publication: PositiveInt = 1
    """Steps between two versions of the weights that engines are given. Staleness counts versions."""

    @property
    def updates_per_step(self) -> int:
        """The number of optimizer updates of a step in which none is skipped."""
        return self.minibatches_per_step * self.epochs_per_step

    @property
    def updates_per_version(self) -> int:
        """The number of optimizer updates from one version that engines are given to the next."""
        return self.updates_per_step * self.steps_per_publication

    @property
    def takes_extra_groups(self) -> bool:
        """True if a step may take more than `prompts_per_step`."""
        return bool(self.tokens_per_step or self.replaced_groups)

    def check_values(self) -> None:
        if self.replaced_groups and self.tokens_per_step:
            raise ValueError(
                "`replaced_groups` and `tokens_per_step` both say how many more groups a step takes: set one"
            )
        if self.replaced_groups and self.max_staleness == 0:
            raise ValueError(
                "`replaced_groups` needs `max_staleness` = 1 or more: with 0 no group is in flight besides those of the step"
            )
        if self.minibatches_per_step > self.prompts_per_step:
            raise ValueError(
                f"`minibatches_per_step` = {self.minibatches_per_step} is more than `prompts_per_step` = "
                f"{self.prompts_per_step}: a group is trained in one minibatch. Lower the first or raise the second"
            )


BASE_INSTALL_SECONDS = 120.0
"""Seconds to install any version, to which the time for its bytes is added."""
BASE_WRITE_SECONDS = 600.0
"""Seconds to write any version, to which the time for its bytes is added."""
BASE_CHECKPOINT_SECONDS = 1800.0
"""Seconds to write any checkpoint, to which the time for its bytes is added."""
FULL_BYTES_PER_SECOND = 2e8
"""Minimum rate in bytes per second where all of a file is written, or fetched and loaded by vLLM's own loader: the
61 GB of 30 B parameters take an engine 100 to 280 s."""
DELTA_BYTES_PER_SECOND = 5e8
"""Minimum rate in bytes per second where only changes are fetched and the file is loaded by the plan."""


def _resolve_timeout(
    configured: float | None, base_seconds: float, nbytes: int, rate: float = FULL_BYTES_PER_SECOND
) -> float:
    """Return the seconds that work on `nbytes` may take: `configured`, or by default `base_seconds` and a second for
    each `rate` bytes."""
    return base_seconds + nbytes / rate if configured is None else configured


class WeightsConfig(Section):
    backend: Literal["auto", "shared_memory", "tcp", "nccl"] = "auto"
    """Transfer of weights to the engines. `shared_memory`: a file that engines on the learner's host map. `tcp`: to one
    such file on each other host, as changes or whole. `auto`: `tcp` if there are several hosts. `nccl`: between GPUs;
    needs CUDA on both sides, and has not yet run on GPUs."""
    relay: bool = True
    """With `tcp`, let hosts of generators pass weights on to others, so that the learner sends a version twice however
    many hosts there are. They listen on a free port, with the run's keys; one that others cannot reach is left out."""
    bucket_bytes: ByteCount = 64 * 2**20
    """Size of the pieces in which weights are converted and sent."""
    install_timeout: PositiveFloat | None = None
    """Seconds that an engine may take to get and install a version; then it is restarted. Default: 120, plus 1 for each
    500 MB of a version, or for each 200 MB at an engine's first one. `--dry-run` shows it."""
    write_timeout: PositiveFloat | None = None
    """Seconds that writing one version may take; the step after the next waits for it. Default: 600, plus 1 for each
    200 MB. `--dry-run` shows it."""
    probe: bool = True
    """Compare log-probs of learner and engine, of a fixed text and of tokens sampled after it. A mismatch stops the run
    and names the tensor. Done at the first delivery, every `probe_every` versions, and after a restart of a
    generator."""
    probe_every: PositiveInt = 10
    """Versions between two probes of a generator."""
    probe_tolerance: float | None = None
    """Mean |difference| in nats that the probe accepts. Default: 0.15; if engine and learner are both float32, 1e-3, or
    0.019 for an engine on GPUs, whose kernel of experts rounds."""
    directory: str = ""
    """Directory of published weights. Default: shared memory (`/dev/shm`), or the temporary directory where there is
    none."""

    def resolve_install_timeout(self, nbytes: int, first: bool) -> float:
        """Return the seconds that `install_timeout` allows for a version of `nbytes`; `first` if the engine has no
        weights yet."""
        rate = FULL_BYTES_PER_SECOND if first else DELTA_BYTES_PER_SECOND
        return _resolve_timeout(self.install_timeout, BASE_INSTALL_SECONDS, nbytes, rate)

    def resolve_write_timeout(self, nbytes: int) -> float:
        """Return the seconds that `write_timeout` allows for a version of `nbytes`."""
        return _resolve_timeout(self.write_timeout, BASE_WRITE_SECONDS, nbytes)


class TransportConfig(Section):
    host: str = ""
    """Interface that the learner's sockets bind to. Empty: loopback if all processes of the run are placed on one
    host, else the address by which Ray knows the learner's host, or that of `cluster.interface`."""
    credit_bytes: ByteCount = 256 * 2**20
    """Bytes of trajectories that may wait at the learner, beyond those of the next step; others wait at their
    generators. Up to half as many may be in flight besides."""
    ack_timeout: PositiveFloat = 5.0
    """Seconds without an acknowledgement after which a sender connects again and resends."""
    max_message_bytes: ByteCount = 64 * 2**20
    """Size of the largest trajectory, in memory."""
    routes: Literal["plain", "bits", "dense"] = "bits"
    """Encoding of recorded routes. `plain`: one byte an expert, two beyond 256 experts. `bits`: as many bits as an id
    has (7/8 of the bytes with 128 experts), in less time than that saves. `dense`: about 43 of 64 bits, for 1 us a
    token; experts are then in ascending order."""
    keys: str = ""
    """Directory made by `r3async keys`: only peers with a key in it are let in. Empty: each start of the run makes new
    keys. Connections are encrypted in both cases."""
    trusted_network: bool = False
    """Trust everything that reaches `host`: `weights.backend = "nccl"`, which has no keys, may then send over it."""


class BufferConfig(Section):
    durability: Literal["memory", "disk"] = "memory"
    """Durability of accepted trajectories. `disk`: they stay in the run's spool until a checkpoint that trained them,
    and survive the loss of any process. `memory`: they are lost with the learner, and played again."""
    memory_bytes: ByteCount = 128 * 2**20
    """With `disk`, bytes of trajectories that are also kept in memory. Has an effect below `transport.credit_bytes`."""
    disk_bytes: ByteCount = 8 * 2**30
    """Size of the spool, with `disk`, at which generators wait. The groups that the next step needs still pass."""
    fsync: bool = False
    """Survive power loss too, with `disk`. Each acknowledgement then waits for the device."""
    quarantine_bytes: PositiveInt = 64 * 2**20
    """Size of the run's `quarantine/`, which has accepted trajectories that cannot be trained. The oldest are dropped
    first."""


class SuperviseConfig(Section):
    stall_seconds: PositiveFloat = 600.0
    """Seconds for which a stage may have work and make no progress before it counts as stalled. Set it above the
    longest call of an environment or tool. docs/operations.md#stalls lists the stages, some with limits of their
    own."""
    step_seconds: PositiveFloat = 3600.0
    """Seconds that one step of the learner may take before training counts as stalled."""
    on_stall: Literal["warn", "restart", "abort"] = "restart"
    """Reaction to a stall, after the event and the stacks. `warn`: none. `restart`: a generator, the learner or the
    conductor is restarted; a full disk is waited for; any other stage ends the run. `abort`: the run ends."""
    silence_seconds: PositiveFloat = 60.0
    """Seconds without a report after which a generator gets no new episodes; after twice as long its groups are leased
    again. Generators report many times a second, but an engine on CPU may block one for a while."""
    restart_backoff: PositiveFloat = 1.0
    """Seconds before a lost generator is loaded again; doubled for every further loss, up to a minute, until it was
    healthy for ten minutes."""
    max_run_restarts: int = 3
    """Times the run restarts from its newest checkpoint when the learner's or the conductor's process is lost."""
    max_rank_restarts: int = 3
    """Times in a row, without a step in between, that the learner's ranks restart when one is lost. Then the run
    restarts from its newest checkpoint."""
    copy_steps: int = 1
    """Steps between two copies of the state of a learner of several ranks on one host, from which its ranks restart if
    one is lost. A copy is 12 bytes a parameter in host memory (with LoRA, of the adapters); there are two, and a third
    while one is made. 0: none; the run then restarts from its newest checkpoint."""
    stop_grace_seconds: PositiveFloat = 30.0
    """Seconds that each part of the end of a run may take: engines, evaluations, records that are written."""
    leave_seconds: PositiveFloat = 120.0
    """Seconds that a generator which leaves the run (`r3async scale`) may take to finish its episodes; others play the
    rest."""
    max_failed_fraction: UnitFraction = 0.1
    """Share of the last 100 tasks (or of as many as can be in flight) that may fail for good, after `episode.retries`,
    before the run stops with the last error. A task of which some episodes fail counts with their share. Failures of
    environments, of the engine, and refusals of the learner count separately. 0: the first failure stops the run."""

    max_skipped_steps: int = 20
    """Steps in a row that may make no update because the gradient was not finite or drift was above
    `algorithm.rollout_kl.max`; the next one fails the run. Steps with zero variance do not count. 0: the first stops
    the run."""


class CheckpointConfig(Section):
    every_steps: int = 100
    """Steps between two checkpoints. 0: none by steps."""
    every_minutes: float = 30.0
    """Minutes after which a step is followed by a checkpoint in any case. 0: none by time. With both 0 there is one
    only at a stop."""
    keep_last: PositiveInt = 3
    """Number of newest checkpoints that are kept; the newest intact one is always kept."""
    keep_every: int = 0
    """Interval in steps: checkpoints of steps that are multiples of it are kept for good. 0: none."""
    keep_best: str = ""
    """Evaluation metric by which the best checkpoint is kept for good: `reward_mean`, `pass@K`, or that of a set, as
    `greedy/reward_mean`. Each evaluated step then has a checkpoint. Empty: none."""
    asynchronous: bool = True
    """Write checkpoints beside the next steps, from a copy in host memory (12 bytes a parameter over all ranks)."""
    write_timeout: PositiveFloat | None = None
    """Seconds that writing a checkpoint may take. Default: 1800, plus 1 for each 200 MB of it (12 bytes a parameter).
    `--dry-run` shows it."""
    directory: str = ""
    """Directory of the checkpoints. Default: `checkpoints` in the run's directory."""

    def resolve_write_timeout(self, nbytes: int) -> float:
        """Return the seconds that `write_timeout` allows for a checkpoint of `nbytes`."""
        return _resolve_timeout(self.write_timeout, BASE_CHECKPOINT_SECONDS, nbytes)


SinkName = Literal["tensorboard", "wandb", "mlflow", "trackio"]


class ObserveConfig(Section):
    timeline: bool = True
    """Record which process did what at which time in `timeline.jsonl`; the report draws it."""
    record: Literal["off", "full"] = "off"
    """Recording for `r3async replay`. `full`: keep what the learner trains on in `recording/`, with digests of every
    stage. It takes the trajectories' size on disk, and one pass over gradients, weights and moments a step."""
    prometheus_port: Port | None = None
    """First port for Prometheus (docs/observing.md#prometheus-and-grafana): every process serves `/metrics` on the
    first free one from this on. 0: any free port. Unset: nothing is served."""
    prometheus_host: str = "127.0.0.1"
    """Interface that `/metrics` binds to. Loopback unless set."""


class LogConfig(Section):
    to: list[SinkName] = msgspec.field(default_factory=list)
    """Services that get each step's metrics, evaluations and sample episodes, see docs/observing.md. Needs `pip install
    "r3async[sinks]"`. W&B is offline without a key or WANDB_MODE; MLflow writes to the run's directory without
    MLFLOW_TRACKING_URI."""
    metrics: Literal["main", "all"] = "main"
    """Metrics that are sent. `main`: the forty or so that reports and `tail` show, with rewards and evaluations. `all`:
    also where the time of every process goes. `metrics.jsonl` has all of them."""
    project: str = "r3async"
    """Project (W&B, trackio) or experiment (MLflow) of the run; in it, the run has the name of its directory."""

    def check_values(self) -> None:
        if len(set(self.to)) < len(self.to):
            raise ValueError("`to` names one twice")


class ClusterConfig(Section):
    address: str = ""
    """Address of a Ray cluster. Empty: the one in RAY_ADDRESS, else a local one is started."""
    gpu_gib: PositiveFloat = 79.0
    """Memory of one GPU in GiB as CUDA reports it, which `--dry-run` and `r3async cluster` calculate with. Cards of
    80 GB have 79.1 to 79.6, an H200 of 141 GB has 139.8."""
    gpus_per_node: PositiveInt = 8
    """GPUs of one host, which `--dry-run` calculates with. Tensor-parallel ranks are on one host, and so is each
    engine."""
    wait_seconds: PositiveFloat = 10.0
    """Seconds that a run waits for GPUs and CPUs that others use, before it ends with a list of what is free."""
    interface: str = ""
    """Network interface (`eth0`) over which the learner's ranks meet, and NCCL and gloo move tensors. Empty: the one by
    which Ray knows a host."""
