"""One typed run configuration: defaults here, a short TOML file over them, `key=value`
overrides over that.

Each section is a struct with its documentation next to the value. Unknown or ill-typed keys are
refused with the key's path and the nearest valid name (`ConfigError`).
"""

from r3async.config.algorithm import BUILTIN_ADVANTAGES as BUILTIN_ADVANTAGES
from r3async.config.algorithm import BUILTIN_POLICY_LOSSES as BUILTIN_POLICY_LOSSES
from r3async.config.algorithm import AlgorithmConfig as AlgorithmConfig
from r3async.config.algorithm import ClipConfig as ClipConfig
from r3async.config.algorithm import CorrectionConfig as CorrectionConfig
from r3async.config.algorithm import DistillationConfig as DistillationConfig
from r3async.config.algorithm import OverlongPenaltyConfig as OverlongPenaltyConfig
from r3async.config.algorithm import RolloutKLConfig as RolloutKLConfig
from r3async.config.algorithm import check_policy_loss as check_policy_loss
from r3async.config.algorithm import import_advantage as import_advantage
from r3async.config.algorithm import import_policy_loss as import_policy_loss
from r3async.config.checkpoint import CheckpointConfig as CheckpointConfig
from r3async.config.data import DataConfig as DataConfig
from r3async.config.data import RewardConfig as RewardConfig
from r3async.config.data import parse_rewards as parse_rewards
from r3async.config.env import EnvConfig as EnvConfig
from r3async.config.env import EnvEntryConfig as EnvEntryConfig
from r3async.config.env import RunEnv as RunEnv
from r3async.config.env import resolve_env as resolve_env
from r3async.config.episode import EpisodeConfig as EpisodeConfig
from r3async.config.episode import RowsMode as RowsMode
from r3async.config.evaluation import EvaluationConfig as EvaluationConfig
from r3async.config.evaluation import EvaluationEnvConfig as EvaluationEnvConfig
from r3async.config.evaluation import EvaluationSetConfig as EvaluationSetConfig
from r3async.config.learner import LearnerConfig as LearnerConfig
from r3async.config.learner import LoraConfig as LoraConfig
from r3async.config.learner import ParallelConfig as ParallelConfig
from r3async.config.load import config_from_dict as config_from_dict
from r3async.config.load import config_from_saved as config_from_saved
from r3async.config.load import config_to_dict as config_to_dict
from r3async.config.load import config_to_toml as config_to_toml
from r3async.config.load import find_config as find_config
from r3async.config.load import load_command_config as load_command_config
from r3async.config.load import load_config as load_config
from r3async.config.load import parse_data_config as parse_data_config
from r3async.config.load import parse_mix_entries as parse_mix_entries
from r3async.config.load import parse_override as parse_override
from r3async.config.load import preset_directory as preset_directory
from r3async.config.load import resolve_envs as resolve_envs
from r3async.config.model import InitConfig as InitConfig
from r3async.config.model import InitShape as InitShape
from r3async.config.observe import LogConfig as LogConfig
from r3async.config.observe import ObserveConfig as ObserveConfig
from r3async.config.run import Config as Config
from r3async.config.schedule import ScheduleConfig as ScheduleConfig
from r3async.config.secrets import REDACTED as REDACTED
from r3async.config.secrets import Secret as Secret
from r3async.config.secrets import collect_secrets as collect_secrets
from r3async.config.secrets import refuse_lost_secret as refuse_lost_secret
from r3async.config.secrets import reveal_secrets as reveal_secrets
from r3async.config.section import ConfigError as ConfigError
from r3async.config.section import Section as Section
from r3async.config.section import did_you_mean as did_you_mean
from r3async.config.section import flatten_section as flatten_section
from r3async.config.serving import LOOPBACK_HOST as LOOPBACK_HOST
from r3async.config.serving import ServingConfig as ServingConfig
from r3async.config.serving import bracket_ipv6 as bracket_ipv6
from r3async.config.serving import is_loopback_host as is_loopback_host
from r3async.config.serving import strip_brackets as strip_brackets
from r3async.config.shorthand import DATASET_ENV as DATASET_ENV
from r3async.config.shorthand import MIX_ENV as MIX_ENV
from r3async.config.transport import BufferConfig as BufferConfig
from r3async.config.transport import TransportConfig as TransportConfig
