"""The configuration of a whole run: all its sections."""

from __future__ import annotations

from pathlib import Path

import msgspec

from r3async.config.algorithm import AlgorithmConfig
from r3async.config.checkpoint import CheckpointConfig
from r3async.config.cluster import ClusterConfig
from r3async.config.env import EnvConfig
from r3async.config.episode import EpisodeConfig
from r3async.config.evaluation import EvaluationConfig
from r3async.config.generator import GeneratorConfig
from r3async.config.learner import LearnerConfig, RoutingConfig
from r3async.config.model import ModelConfig
from r3async.config.observe import LogConfig, ObserveConfig
from r3async.config.schedule import ScheduleConfig
from r3async.config.section import PositiveInt, Section, Seed
from r3async.config.serving import ServingConfig
from r3async.config.sft import SftConfig
from r3async.config.supervise import SuperviseConfig
from r3async.config.transport import BufferConfig, TransportConfig
from r3async.config.weights import WeightsConfig


def explain_bad_name(name: str) -> str:
    """Return why no run can have this name. "" for a valid name, and for the empty one, which
    stands for preset and time."""
    if name == "latest":
        return "is the link to the newest run"
    if name and (name in (".", "..") or Path(name).name != name or "\\" in name):
        return "is a path, and a run stays in its directory of runs (--runs chooses another)"
    if name and (not name.strip() or not name.isprintable() or len(name.encode()) > 200):
        return "is not readable: 1 to 200 bytes, no control characters"
    return ""


class Config(Section):
    """Configuration of a whole run."""

    name: str = ""
    """Run directory in `runs/`, a plain name without separators; default: preset and time."""
    seed: Seed = 0
    """Seed of the order of tasks, of sampling, and of new adapters."""
    steps: PositiveInt = 100
    """Steps of training. Raise it to continue a finished run."""
    resume: str = "auto"
    """Checkpoint to start from. `auto`: this run's newest intact one, if any. `none`: start at
    step 0. Otherwise a checkpoint's or run's path."""
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
    buffer: BufferConfig = msgspec.field(default_factory=BufferConfig)
    supervise: SuperviseConfig = msgspec.field(default_factory=SuperviseConfig)
    checkpoint: CheckpointConfig = msgspec.field(default_factory=CheckpointConfig)
    log: LogConfig = msgspec.field(default_factory=LogConfig)
    observe: ObserveConfig = msgspec.field(default_factory=ObserveConfig)
    cluster: ClusterConfig = msgspec.field(default_factory=ClusterConfig)
    serving: ServingConfig = msgspec.field(default_factory=ServingConfig)
    evaluation: EvaluationConfig = msgspec.field(default_factory=EvaluationConfig)
    sft: SftConfig = msgspec.field(default_factory=SftConfig)

    def check_values(self) -> None:
        problem = explain_bad_name(self.name)
        if problem:
            raise ValueError(
                f"`name` = {self.name!r} {problem}. Choose a plain name, such as name=first-try"
            )
        if not self.resume:
            raise ValueError('`resume` must be "auto", "none", or the path of a checkpoint or run')
        if self.schedule.group_size < 2 and self.algorithm.advantage != "reinforce_pp":
            raise ValueError(
                f"`schedule.group_size` = {self.schedule.group_size} leaves `algorithm.advantage` "
                f"= {self.algorithm.advantage!r} nothing to compare an episode with, so every "
                "advantage would be 0: set `schedule.group_size` to 2 or more, or "
                "`algorithm.advantage` = 'reinforce_pp', which compares with the whole batch"
            )
        if self.schedule.replaced_groups and not self.algorithm.filter_zero_variance:
            raise ValueError(
                "`schedule.replaced_groups` takes other groups in place of those with zero "
                "variance, which are then not to be trained: set "
                "`algorithm.filter_zero_variance` = true"
            )
        if self.algorithm.router_aux.coef and self.routing.replay == "off":
            raise ValueError(
                "`algorithm.router_aux.coef` needs the routes of a step beforehand: set "
                "`routing.replay`"
            )
        if self.algorithm.distillation.teacher and self.learner.backend == "scripted":
            raise ValueError(
                "`algorithm.distillation.teacher` judges tokens of a model: `learner.backend` = "
                '"scripted" has none'
            )
        if self.algorithm.distillation.is_served:
            self._check_served_teacher()
        if not self.episode.temperature:
            raise ValueError(
                "`episode.temperature` must be greater than 0, got 0: greedy answers are all the "
                "same, and have no log-probs to train on. Evaluations may be greedy: "
                "`evaluation.temperature` = 0"
            )
        if (
            self.generator.engine == "scripted"
            and self.weights.probe
            and self.learner.backend != "scripted"
        ):
            raise ValueError(
                '`generator.engine = "scripted"` has no weights to compare: set '
                "`weights.probe` = false"
            )
        if self.learner.lora.delivers_adapters:
            self._check_delivery_of_adapters()
        self.evaluation.check_keep_best(
            self.checkpoint.keep_best, self.schedule.steps_per_publication
        )
        if self.episode.max_total_tokens > self.learner.max_tokens_per_micro_batch:
            raise ValueError(
                f"`episode.max_total_tokens` = {self.episode.max_total_tokens} is more than "
                "`learner.max_tokens_per_micro_batch` = "
                f"{self.learner.max_tokens_per_micro_batch}: such a sample could not be trained"
            )

    def _check_served_teacher(self) -> None:
        """Raise `ValueError` if a server cannot score the samples: it knows only the whole
        distribution at temperature 1."""
        if self.episode.temperature != 1 or self.episode.truncates_sampling:
            raise ValueError(
                "`algorithm.distillation.teacher` is served, so it scores tokens at temperature 1 "
                "over the whole vocabulary: set `episode.temperature` = 1, and leave `top_p`, "
                "`top_k` and `min_p` unset; or name the directory of its model"
            )

    def _check_delivery_of_adapters(self) -> None:
        if self.generator.engine == "scripted":
            raise ValueError(
                '`generator.engine` = "scripted" has no model to which adapters could be added: '
                'set `learner.lora.deliver` = "merged"'
            )
        if self.generator.on_update != "keep":
            raise ValueError(
                f'`generator.on_update` = "{self.generator.on_update}" is about requests that run '
                'through an update, and with `learner.lora.deliver` = "adapter" each keeps its '
                'version to the end: set it to "keep"'
            )
        if self.weights.backend == "nccl":
            raise ValueError(
                '`weights.backend` = "nccl" sends whole weights, and with `learner.lora.deliver` = '
                '"adapter" a version is a small file: set `weights.backend` = "auto"'
            )
