"""r3async: asynchronous reinforcement learning for mixture-of-experts language models.

    import r3async

    run = r3async.train("quickstart", steps=20)
    print(r3async.evaluate(run, tasks=64).reward_mean)

The names that user code needs are exported here: the two commands, the configuration, and the types
for environments, losses and columns. Everything else is internal, and may move.
docs/architecture.md describes the modules.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from r3async.actors.process import NotTrained as NotTrained
    from r3async.actors.process import RunFailed as RunFailed
    from r3async.actors.process import StoppedBeforeStep as StoppedBeforeStep
    from r3async.api import evaluate as evaluate
    from r3async.api import train as train
    from r3async.config import Config as Config
    from r3async.config import ConfigError as ConfigError
    from r3async.config import load_config as load_config
    from r3async.data.tokens import SCHEMA as SCHEMA
    from r3async.data.tokens import Column as Column
    from r3async.data.tokens import Sample as Sample
    from r3async.data.tokens import TokenTable as TokenTable
    from r3async.data.tokens import Trajectory as Trajectory
    from r3async.data.tokens import Turn as Turn
    from r3async.envs import Action as Action
    from r3async.envs import BlockingEnvironment as BlockingEnvironment
    from r3async.envs import Environment as Environment
    from r3async.envs import EnvironmentFailed as EnvironmentFailed
    from r3async.envs import Message as Message
    from r3async.envs import StepResult as StepResult
    from r3async.learner.advantages import AdvantageInputs as AdvantageInputs
    from r3async.learner.policy_loss import LossInputs as LossInputs
    from r3async.learner.policy_loss import PolicyLoss as PolicyLoss
    from r3async.learner.policy_loss import by_token as by_token
    from r3async.rollout.evaluation_results import Evaluation as Evaluation
    from r3async.tools.callbacks import Callback as Callback
    from r3async.tools.callbacks import CallbackFailed as CallbackFailed
    from r3async.tools.callbacks import CheckpointRecord as CheckpointRecord
    from r3async.tools.callbacks import EndRecord as EndRecord
    from r3async.tools.callbacks import EvaluationRecord as EvaluationRecord
    from r3async.tools.callbacks import StepRecord as StepRecord

__version__ = "0.1.0"

_HOME = {
    "r3async.actors.process": ("NotTrained", "RunFailed", "StoppedBeforeStep"),
    "r3async.api": ("evaluate", "train"),
    "r3async.config": ("Config", "ConfigError", "load_config"),
    "r3async.data.tokens": ("SCHEMA", "Column", "Sample", "TokenTable", "Trajectory", "Turn"),
    "r3async.envs": (
        "Action",
        "BlockingEnvironment",
        "Environment",
        "EnvironmentFailed",
        "Message",
        "StepResult",
    ),
    "r3async.learner.advantages": ("AdvantageInputs",),
    "r3async.learner.policy_loss": ("LossInputs", "PolicyLoss", "by_token"),
    "r3async.rollout.evaluation": ("Evaluation",),
    "r3async.tools.callbacks": (
        "Callback",
        "CallbackFailed",
        "CheckpointRecord",
        "EndRecord",
        "EvaluationRecord",
        "StepRecord",
    ),
}
"""Names by their module. They are loaded on first use: an environment's process
does not need torch."""

__all__ = ["__version__", *sorted(name for names in _HOME.values() for name in names)]


def __getattr__(name: str) -> Any:
    for module, names in _HOME.items():
        if name in names:
            value = getattr(importlib.import_module(module), name)
            globals()[name] = value
            return value
    raise AttributeError(f"module 'r3async' has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
