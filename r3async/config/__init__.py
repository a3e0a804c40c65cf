"""One typed run configuration: defaults here, a short TOML file over them, `key=value` overrides over that.

Each section is a struct with its documentation next to the value. Unknown or ill-typed keys are refused with the
key's path and the nearest valid name (`ConfigError`).
"""

from r3async.config.algorithm import POLICY_LOSSES as POLICY_LOSSES
from r3async.config.algorithm import AlgorithmConfig as AlgorithmConfig
from r3async.config.algorithm import ClipConfig as ClipConfig
from r3async.config.algorithm import CorrectionConfig as CorrectionConfig
from r3async.config.algorithm import DistillationConfig as DistillationConfig
from r3async.config.algorithm import OverlongPenaltyConfig as OverlongPenaltyConfig
from r3async.config.algorithm import RolloutKLConfig as RolloutKLConfig
from r3async.config.algorithm import check_policy_loss as check_policy_loss
from r3async.config.algorithm import import_policy_loss as import_policy_loss
from r3async.config.data import DataConfig as DataConfig
from r3async.config.data import RewardConfig as RewardConfig
from r3async.config.data import rewards_of as rewards_of
from r3async.config.evaluation import EvaluatedEnv as EvaluatedEnv
from r3async.config.evaluation import EvaluationConfig as EvaluationConfig
from r3async.config.evaluation import EvaluationSet as EvaluationSet
from r3async.config.generation import MIX as MIX
from r3async.config.generation import EnvConfig as EnvConfig
from r3async.config.generation import EpisodeConfig as EpisodeConfig
from r3async.config.generation import InitConfig as InitConfig
from r3async.config.generation import RowsMode as RowsMode
from r3async.config.generation import ServingConfig as ServingConfig
from r3async.config.generation import bare_host as bare_host
from r3async.config.generation import in_url as in_url
from r3async.config.generation import is_loopback as is_loopback
from r3async.config.mix import EntryConfig as EntryConfig
from r3async.config.mix import Posed as Posed
from r3async.config.mix import posed as posed
from r3async.config.operation import BufferConfig as BufferConfig
from r3async.config.operation import CheckpointConfig as CheckpointConfig
from r3async.config.operation import ObserveConfig as ObserveConfig
from r3async.config.operation import ScheduleConfig as ScheduleConfig
from r3async.config.operation import TransportConfig as TransportConfig
from r3async.config.read import Config as Config
from r3async.config.read import config_from_dict as config_from_dict
from r3async.config.read import data_config as data_config
from r3async.config.read import environments as environments
from r3async.config.read import find_config as find_config
from r3async.config.read import load_command as load_command
from r3async.config.read import load_config as load_config
from r3async.config.read import parse_override as parse_override
from r3async.config.read import parts_of as parts_of
from r3async.config.read import preset_directory as preset_directory
from r3async.config.read import to_dict as to_dict
from r3async.config.read import to_toml as to_toml
from r3async.config.section import HIDDEN as HIDDEN
from r3async.config.section import ConfigError as ConfigError
from r3async.config.section import Secret as Secret
from r3async.config.section import Section as Section
from r3async.config.section import check_kept as check_kept
from r3async.config.section import did_you_mean as did_you_mean
from r3async.config.section import flat as flat
from r3async.config.section import revealed as revealed
from r3async.config.section import secret_settings as secret_settings
from r3async.config.short import DATASET as DATASET
from r3async.config.training import LearnerConfig as LearnerConfig
from r3async.config.training import LoraConfig as LoraConfig
from r3async.config.training import ParallelConfig as ParallelConfig
