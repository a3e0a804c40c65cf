"""`reasoning-gym:TASK`: procedural tasks of the package reasoning-gym."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any

from r3async.config import ConfigError, EnvConfig, did_you_mean
from r3async.envs import Action, EnvironmentFactory, Message, StepResult
from r3async.envs.factory import import_optional_package
from r3async.envs.pool import make_pooled_factory


class ReasoningGymEnvironment:
    """An environment for one task of the procedural data set `task`, made with the task seed.

    The answer is the text in `<answer>...</answer>`, or the whole text. The reward is the package's
    own score, in `0..1`. The oracle is the package's own answer, which some tasks score below 1
    because they accept many answers.

    Args:
        settings: Fields of the task's configuration class.
    """

    def __init__(self, task: str, system: str = "", **settings: Any):
        import reasoning_gym

        self._package: Any = reasoning_gym
        self._task = task
        self._system = system
        self._settings = convert_settings(settings)
        self._dataset: Any = None
        self._entry: dict[str, Any] = {}

    def reset(self, task_seed: int) -> list[Message]:
        # Tasks add an index to the seed, and some give it to numpy, which takes 32 bits.
        self._dataset = self._package.create_dataset(
            self._task, seed=task_seed % 2**31, size=1, **self._settings
        )
        self._entry = self._dataset[0]
        asked = [Message("user", self._entry["question"])]
        return [Message("system", self._system), *asked] if self._system else asked

    def oracle(self) -> str:
        return str(self._entry["answer"] or "")

    def step(self, action: Action) -> StepResult:
        marked = self._package.utils.extract_answer(action.text)
        answer = marked if marked is not None else action.text.strip()
        return StepResult(float(self._dataset.score_answer(answer, self._entry)), done=True)


def convert_settings(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of a task with `datasets`, the tables of the task `composite`, as
    reasoning-gym takes them."""
    tables = settings.get("datasets")
    if not isinstance(tables, list):
        return dict(settings)
    specification = importlib.import_module("reasoning_gym.composite").DatasetSpec
    return {
        **settings,
        "datasets": [specification(**{"weight": 1.0, "config": {}, **table}) for table in tables],
    }


def make_reasoning_gym(target: str, config: EnvConfig) -> EnvironmentFactory:
    """Return a factory of reasoning-gym environments. They run in the pool, as some tasks take
    seconds to make. `env.args` holds the task's own settings and `system`."""
    import_optional_package("reasoning_gym", config)
    known = import_optional_package("reasoning_gym.factory", config).DATASETS
    if target not in known:
        hint = did_you_mean(target, known, f"it has {len(known)}, such as chain_sum.")
        raise ConfigError(
            f"`env.name` = {config.name!r}: reasoning-gym has no task {target!r}; {hint}"
        )
    settings = {name: value for name, value in config.reveal_args().items() if name != "system"}
    fields = known[target][1].__dataclass_fields__
    for name in settings:
        if name not in fields or name in ("seed", "size"):
            own = [field for field in fields if field not in ("seed", "size")]
            raise ConfigError(
                f"`env.args.{name}`: {target!r} has no such setting; {did_you_mean(name, own)} it "
                f"has {', '.join(own)}"
            )
    try:
        settings_class = known[target][1](**convert_settings(settings))
        if hasattr(settings_class, "validate"):
            settings_class.validate()
    except (AssertionError, TypeError, ValueError) as error:
        raise ConfigError(f"`env.args` do not fit {config.name!r}: {error}") from error
    return make_pooled_factory(
        f"{__name__}:ReasoningGymEnvironment",
        {"task": target, **config.reveal_args()},
        config,
        has_oracle=True,
    )
