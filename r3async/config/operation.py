"""Sections of the configuration about how a run is kept going: schedule, weights, transport, checkpoints, metrics, hosts."""

from __future__ import annotations

from typing import Literal
from urllib.parse import urlsplit

import msgspec

from r3async.config.section import ByteCount, Port, PositiveFloat, PositiveInt, Section, SignedFloat, UnitFraction

# The section about tasks that are posed more or less often, by what their groups scored.


class DifficultyConfig(Section):
    """Difficulty filter and curriculum, for environments that know how many tasks they have. Off by default."""

    groups: PositiveInt = 3
    """A task is judged by the mean rewards of its last so many groups."""
    settled_share: UnitFraction = 1.0
    """Difficulty filter: in what share of its turns a task is posed that is settled: all of its last `groups` groups had a mean
    reward of `easy` or more, or all had `hard` or less. In the others another takes its place. 1: always posed; 0.1 is rare,
    and still notices a task that the model has learnt or forgotten."""
    easy: SignedFloat = 1.0
    """Mean reward of a group from which on it is too easy."""
    hard: SignedFloat = 0.0
    """Mean reward of a group up to which it is too hard."""
    target: SignedFloat | None = None
    """Curriculum: of `among` tasks, that whose turn it is and others at random, pose the one of which the mean reward of the last
    `groups` groups is nearest to this. A task without past groups goes before. Unset: tasks in turn."""
    among: PositiveInt = 4
    """Tasks that the curriculum chooses among."""

    @property
    def is_active(self) -> bool:
        """Whether past rewards change what is posed."""
        return self.settled_share < 1 or self.target is not None

    def check_values(self) -> None:
        if self.hard >= self.easy:
            raise ValueError(f"`hard` = {self.hard:g} must be less than `easy` = {self.easy:g}")


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
    split: Literal["idle", "capacity"] = "idle"
    """When the episodes of one group, which share a prompt, are played by several generators. `idle`: when fewer groups can be
    leased than generators have nothing to do, or when a group is larger than what a generator may play at once. `capacity`:
    also whenever a generator has capacity for a part of one."""
    pace_seconds: PositiveFloat = 60.0
    """An event names the side to give more resources when the other one has waited for it for this long."""
    groups_per_step: PositiveInt = 16
    """Groups that a step trains; with `tokens_per_step`, at least."""
    tokens_per_step: int = 0
    """If not 0, a step takes further groups, in lease order, until it has that many trainable tokens, or until it has all
    groups that may be in flight: `(max_staleness + 1) * groups_per_step * steps_per_publication`."""
    replaced_groups: int = 0
    """Dynamic sampling: a step takes up to so many further groups in place of those in which all episodes scored the same, as far
    as they may be in flight. What it takes is consumed; `algorithm.filter_zero_variance` keeps those groups from training."""
    difficulty: DifficultyConfig = msgspec.field(default_factory=DifficultyConfig)
    samples_per_group: PositiveInt = 8
    minibatches_per_step: PositiveInt = 1
    """Parts into which a step's groups are divided, each trained with an optimizer update of its own. At most
    `groups_per_step`: a group is never divided."""
    epochs_per_step: PositiveInt = 1
    """How often a step goes through its minibatches, with an update for each every time. All are made before the next version, so
    the age of a token is the same in each of them; drift is measured again before each update."""
    steps_per_publication: PositiveInt = 1
    """Steps between two versions of the weights that engines are given. Staleness counts versions."""

    @property
    def updates_per_step(self) -> int:
        """Optimizer updates of a step in which none is skipped."""
        return self.minibatches_per_step * self.epochs_per_step

    @property
    def updates_per_version(self) -> int:
        """Optimizer updates from one version that engines are given to the next."""
        return self.updates_per_step * self.steps_per_publication

    @property
    def takes_extra_groups(self) -> bool:
        """Whether a step may take more than `groups_per_step`."""
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
        if self.minibatches_per_step > self.groups_per_step:
            raise ValueError(
                f"`minibatches_per_step` = {self.minibatches_per_step} is more than `groups_per_step` = "
                f"{self.groups_per_step}: a group is trained in one minibatch. Lower the first or raise the second"
            )


BASE_INSTALL_SECONDS = 120.0
"""To install any version; beyond that it is a matter of its bytes."""
BASE_WRITE_SECONDS = 600.0
"""To write any version."""
BASE_CHECKPOINT_SECONDS = 1800.0
"""To write any checkpoint."""
FULL_BYTES_PER_SECOND = 2e8
"""At least, where all of a file is written, or fetched and loaded by vLLM's own loader: the 61 GB of 30 B parameters take an
engine 100 to 280 s."""
DELTA_BYTES_PER_SECOND = 5e8
"""At least, where what changed is fetched and the file is loaded by the plan."""


def _resolve_timeout(
    configured: float | None, base_seconds: float, nbytes: int, rate: float = FULL_BYTES_PER_SECOND
) -> float:
    """Return how long work on so many bytes may take: `configured`, or by default `base_seconds` and a second for each
    `rate` bytes."""
    return base_seconds + nbytes / rate if configured is None else configured


class WeightsConfig(Section):
    backend: Literal["auto", "shared_memory", "tcp", "nccl"] = "auto"
    """How weights get to the engines. `shared_memory`: a file that engines of the learner's host map. `tcp`: from there to one
    such file on each other host, as what changed since the version before, or whole. `auto`: the first if all are on one
    host, else the second. `nccl`: from the learner's GPU to the engines'; refused without CUDA on both sides, and not yet run on
    GPUs."""
    relay: bool = True
    """With `tcp`: hosts of generators pass weights on to others, so that the learner sends a version twice, however many hosts
    there are. They listen on a free port, with the run's keys. One that others cannot reach is left out after two attempts."""
    bucket_bytes: ByteCount = 64 * 2**20
    """Weights are converted and sent in pieces of this size, so that no second copy of the model is held on the way."""
    install_timeout: PositiveFloat | None = None
    """Seconds that an engine may take to get and install a version; with `generator.on_update = drain`, the wait included. Then
    it is restarted. Default: 120, and by the bytes of a version: 1 for each 200 MB at the first installation of an engine, which
    fetches and loads all of them, and 1 for each 500 MB at the others. `--dry-run` says how many that are."""
    write_timeout: PositiveFloat | None = None
    """Seconds that writing one version may take. It is written beside the next step; the step after that waits for it. Default:
    600, and 1 for each 200 MB of a version. `--dry-run` says how many that are."""
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

    def resolve_install_timeout(self, nbytes: int, first: bool) -> float:
        """What `install_timeout` says of a version of so many bytes. `first`: for an engine that has no weights yet."""
        rate = FULL_BYTES_PER_SECOND if first else DELTA_BYTES_PER_SECOND
        return _resolve_timeout(self.install_timeout, BASE_INSTALL_SECONDS, nbytes, rate)

    def resolve_write_timeout(self, nbytes: int) -> float:
        """Return what `write_timeout` allows for a version of so many bytes."""
        return _resolve_timeout(self.write_timeout, BASE_WRITE_SECONDS, nbytes)


class TransportConfig(Section):
    host: str = "127.0.0.1"
    """Interface that the learner's socket binds to. Loopback unless named."""
    credit_bytes: ByteCount = 256 * 2**20
    """Bytes of trajectories that may wait at the learner, beyond those of the next step; what does not fit waits at its
    generator. As many as half of it may be in flight besides."""
    ack_timeout: PositiveFloat = 5.0
    """Seconds without an acknowledgement after which a sender says HELLO again and resends."""
    max_message_bytes: ByteCount = 64 * 2**20
    """Largest trajectory, in memory."""
    routes: Literal["plain", "bits", "dense"] = "bits"
    """How recorded routes travel and are kept. `plain`: one byte an expert, two beyond 256 experts. `bits`: as many bits as an id
    has (8 of 128 experts: 7/8 of the bytes), for less time than sending the rest takes. `dense`: near their information content
    (43 of 64 bits), for about 1 us a token; what is recorded is then in ascending order. Records of few tokens stay plain."""
    keys: str = ""
    """Directory made by `r3async keys`: its keys are used, and only those that it holds are let in. Empty: each start of the run
    makes keys of its own. Connections are encrypted in both cases, over loopback too."""
    trusted_network: bool = False
    """Everything that reaches `host` is trusted: `weights.backend = "nccl"`, which has no keys, may then send over it."""


class BufferConfig(Section):
    durability: Literal["memory", "disk"] = "memory"
    """`disk`: a trajectory is in the run's spool before it is acknowledged, and stays until a checkpoint that trained it
    is committed. It survives the loss of any process. `memory`: one that was not trained yet is lost with the learner."""
    memory_bytes: ByteCount = 128 * 2**20
    """With `disk`: trajectories beyond this many bytes are on disk only, and mapped back while they are trained. Has an
    effect below `transport.credit_bytes`, which bounds memory in any case."""
    disk_bytes: ByteCount = 8 * 2**30
    """With `disk`: when the spool holds this much, generators wait. The groups that the next step needs still pass."""
    fsync: bool = False
    """With `disk`: also survive power loss. Each acknowledgement then waits for the device."""
    quarantine_bytes: PositiveInt = 64 * 2**20
    """Trajectories that were accepted and turned out not to be trainable are kept in the run's `quarantine/`, up to so many bytes
    together; the oldest make way."""


class SuperviseConfig(Section):
    stall_seconds: PositiveFloat = 600.0
    """Seconds for which a stage may have work and do nothing (no token, no trajectory, no acknowledgement) before it counts as
    stalled; then `on_stall`. More than the longest call of an environment or tool. What has a limit of its own is given that,
    and a little more: an optimizer step (`step_seconds`), writing weights (`weights.write_timeout`), installing them
    (`weights.install_timeout`)."""
    step_seconds: PositiveFloat = 3600.0
    """Seconds that one step of the learner may take before training counts as stalled."""
    on_stall: Literal["warn", "restart", "abort"] = "restart"
    """What a stall leads to, after the event `stalled` and the stacks in `runs/NAME/stacks`. `warn`: nothing else. `restart`: a
    generator that stalled is restarted, which counts for `generator.max_restarts`; a learner or a conductor that does not
    answer is lost (`max_run_restarts`); a full disk is waited for; any other stage ends the run. `abort`: the run ends, and
    says which stage it was."""
    silence_seconds: PositiveFloat = 60.0
    """A generator that did not report for so long is suspect: it is leased no new episodes and nobody waits for it, until it
    reports again; after twice as long its groups are leased again. They report many times a second, but an engine on CPU may
    keep one busy for a while."""
    restart_backoff: PositiveFloat = 1.0
    """Seconds before a lost generator is loaded again; doubled for every further loss, up to a minute, until it was healthy
    for ten minutes."""
    max_run_restarts: int = 3
    """How often the run restarts from its newest checkpoint when the learner's or the conductor's process is lost. A lost
    generator is restarted by itself (`generator.max_restarts`), and so are the ranks of a learner of several."""
    max_rank_restarts: int = 3
    """How often in a row, without a step in between, the learner's ranks are started again when one is lost. Then the run
    restarts from its newest checkpoint."""
    copy_steps: int = 1
    """Of a learner of several ranks on one host: steps between two copies of its state in host memory, in Ray's object store,
    with which its ranks start again if one is lost. Steps since the last copy are made again. A copy is 12 bytes a parameter over
    all ranks (with LoRA, of the adapters). There are two, and a third one beside them while a copy is made. 0: none; the run then
    restarts from its newest checkpoint."""
    stop_grace_seconds: PositiveFloat = 30.0
    leave_seconds: PositiveFloat = 120.0
    """Seconds that a generator which leaves the run (`r3async scale`) may take to finish the episodes that it plays. Those that
    it has not finished then are played by others."""
    max_failed_fraction: UnitFraction = 0.1
    """Share of the run's last 100 tasks (or of as many as can be in flight) that may fail for good (after `episode.retries`)
    before it stops with what the last one failed with; a task of which some episodes fail counts for their share. Failures of
    environments, of the engine and refusals of the learner are counted apart. A failed episode is not trained, and is
    compared with nobody in its group. A task of which every episode fails (not by the engine) is quarantined: it is not posed
    again. 0: the first failure stops it."""

    max_skipped_steps: int = 20
    """Steps in a row that may make no update because the gradient was not finite or the drift beyond `algorithm.rollout_kl.max`;
    at the next one the run fails. Steps without contrast do not count: they have an event of their own, `no_contrast`. 0: the
    first one stops it."""


class CheckpointConfig(Section):
    every_steps: int = 100
    """Steps between two checkpoints; 0: none by steps."""
    every_minutes: float = 30.0
    """Minutes after which a step is followed by one in any case; 0: none by time. With both 0 there is one only at a stop."""
    keep_last: PositiveInt = 3
    """The newest so many are kept, and always the newest that is intact."""
    keep_every: int = 0
    """If not 0, those of steps that it divides are kept for good."""
    keep_best: str = ""
    """By which figure of the evaluations the best checkpoint is kept for good: `reward_mean`, `pass@K`, or that of one of
    `evaluation.sets`, as `greedy/reward_mean`. Each step that is evaluated then has a checkpoint. Empty: none is."""
    asynchronous: bool = True
    """Write beside the steps that follow, from a copy in host memory: 12 bytes a parameter, over all ranks. One copy waits at
    most."""
    write_timeout: PositiveFloat | None = None
    """Seconds that writing one may take; the next one waits for it. Default: 1800, and 1 for each 200 MB of it (12 bytes a
    parameter). `--dry-run` says how many that are."""
    directory: str = ""
    """Where they are; default: `checkpoints` in the run's directory."""

    def resolve_write_timeout(self, nbytes: int) -> float:
        """Return what `write_timeout` allows for a checkpoint of so many bytes."""
        return _resolve_timeout(self.write_timeout, BASE_CHECKPOINT_SECONDS, nbytes)


SinkName = Literal["tensorboard", "wandb", "mlflow", "trackio"]


class ObserveConfig(Section):
    timeline: bool = True
    """Write who did what when into `timeline.jsonl`: a few lines a step and one a group. The report draws them."""
    record: Literal["off", "full"] = "off"
    """`full`: keep what the learner trains on, and digests of every stage of every step, in `recording/` of the run's directory;
    `r3async replay RUN` makes the same steps again and compares. It takes the trajectories' size on disk, and the learner a pass
    over gradients, weights and moments a step (12 bytes and more a parameter)."""
    sinks: list[SinkName] = msgspec.field(default_factory=list)
    """Where each step's row goes too, with evaluations and a table of sample episodes. A run that resumes continues its run
    there. Each needs its package: `pip install "r3async[sinks]"`. None can slow or stop a run."""
    project: str = "r3async"
    """Project (W&B, trackio) or experiment (MLflow) that the run belongs to; in it, it has the name of its directory."""
    wandb_mode: Literal["online", "offline"] = "offline"
    """`offline`: kept in the run's directory until `wandb sync`. `online` needs `wandb login` before."""
    mlflow_uri: str = ""
    """Tracking server or store of MLflow; default: `mlruns` in the run's directory."""
    prometheus_port: Port | None = None
    """If set, every process of the run serves `/metrics` on the first free port from this one on: its memory and CPU time; the
    driver also the figures of the last step, and a generator those of its engine. Where is written into
    `runs/NAME/prometheus/`, which Prometheus reads as `file_sd_configs`. 0: any free port."""
    prometheus_host: str = "127.0.0.1"
    """Interface that it binds to. Loopback unless named."""

    def check_values(self) -> None:
        if urlsplit(self.mlflow_uri).password is not None:
            raise ValueError(
                "`mlflow_uri` has a password, and it is written to `config.toml`: leave it out, and set "
                "MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD"
            )
        if len(set(self.sinks)) < len(self.sinks):
            raise ValueError("`sinks` names one twice")


class ClusterConfig(Section):
    address: str = ""
    """Address of a Ray cluster. Empty: the one in RAY_ADDRESS, else a local one is started."""
    gpu_gib: PositiveFloat = 80.0
    """Memory of one GPU, which `--dry-run` and `r3async cluster` reckon with."""
    gpus_per_node: PositiveInt = 8
    """GPUs of one host, which `--dry-run` reckons with. Tensor-parallel ranks are on one host, and so is each engine."""
    wait_seconds: PositiveFloat = 10.0
    """Seconds that a run waits for hosts, GPUs and CPUs that others use, before it ends with what is free where."""
    interface: str = ""
    """Network interface of the learner's ranks (`eth0`): over it they meet, and NCCL and gloo move tensors between hosts
    (NCCL_SOCKET_IFNAME, GLOO_SOCKET_IFNAME). Empty: that by which Ray knows a host."""
