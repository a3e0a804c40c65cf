"""One typed run configuration: defaults here, a short TOML file over them, `key=value` overrides over that.

Each section is a struct with its documentation next to the value. Unknown or ill-typed keys are refused with the
key's path and the nearest valid name (`ConfigError`).
"""

from r3async.config.algorithm import (
    POLICY_LOSSES,
    AlgorithmConfig,
    CISPOConfig,
    ClipConfig,
    CorrectionConfig,
    DecoupledPPOConfig,
    DPPOConfig,
    GSPOConfig,
    OverlongPenaltyConfig,
    PPOConfig,
    ReferenceKLConfig,
    RolloutKLConfig,
    RouterAuxConfig,
    SAPOConfig,
    import_policy_loss,
)
from r3async.config.buffer import BufferConfig
from r3async.config.checkpoint import CheckpointConfig
from r3async.config.hosts import bare_host, in_url, is_loopback
from r3async.config.learner import LearnerConfig, ParallelConfig
from r3async.config.observe import ObserveConfig
from r3async.config.read import (
    Config,
    config_from_dict,
    find_config,
    flat,
    load_command,
    load_config,
    parse_override,
    preset_directory,
    to_dict,
    to_toml,
)
from r3async.config.secret import HIDDEN, Secret, check_kept, revealed, secret_settings
from r3async.config.section import ConfigError, Section, did_you_mean
from r3async.config.sections import (
    ClusterConfig,
    EnvConfig,
    EpisodeConfig,
    GeneratorConfig,
    InitConfig,
    ModelConfig,
    RoutingConfig,
    RowsMode,
    ScheduleConfig,
    TransportConfig,
    WeightsConfig,
)
from r3async.config.serving import EvaluationConfig, ServingConfig
from r3async.config.supervise import SuperviseConfig

__all__ = [
    "HIDDEN",
    "POLICY_LOSSES",
    "AlgorithmConfig",
    "BufferConfig",
    "CISPOConfig",
    "CheckpointConfig",
    "ClipConfig",
    "ClusterConfig",
    "Config",
    "ConfigError",
    "CorrectionConfig",
    "DPPOConfig",
    "DecoupledPPOConfig",
    "EnvConfig",
    "EpisodeConfig",
    "EvaluationConfig",
    "GSPOConfig",
    "GeneratorConfig",
    "InitConfig",
    "LearnerConfig",
    "ModelConfig",
    "ObserveConfig",
    "OverlongPenaltyConfig",
    "PPOConfig",
    "ParallelConfig",
    "ReferenceKLConfig",
    "RolloutKLConfig",
    "RouterAuxConfig",
    "RoutingConfig",
    "RowsMode",
    "SAPOConfig",
    "ScheduleConfig",
    "Secret",
    "Section",
    "ServingConfig",
    "SuperviseConfig",
    "TransportConfig",
    "WeightsConfig",
    "bare_host",
    "check_kept",
    "config_from_dict",
    "did_you_mean",
    "find_config",
    "flat",
    "import_policy_loss",
    "in_url",
    "is_loopback",
    "load_command",
    "load_config",
    "parse_override",
    "preset_directory",
    "revealed",
    "secret_settings",
    "to_dict",
    "to_toml",
]
