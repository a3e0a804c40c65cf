"""`gymnasium:ID`: environments of the package gymnasium whose observations can be read and whose actions can be written."""

from __future__ import annotations

import importlib
import re
from typing import Any

from r3async.config import ConfigError, EnvConfig, did_you_mean
from r3async.envs.base import Action, EnvironmentFactory, Message, StepResult
from r3async.envs.factory import class_factory, optional_package

PATH = "r3async.envs.adapt_gymnasium:GymnasiumGame"


class GymnasiumGame:
    """`gymnasium.make(id, **settings)`, one message a step.

    Observation: what `render()` draws with `render_mode = "ansi"` (coloured places in brackets), a text as it is, anything else
    as Python writes it.
    Action: the text of a `Text` space; the number of a `Discrete` action, or its name if `actions` names them in order. An
    answer that is no action is told so, earns `invalid_reward`, and does not move the game; after `invalid_limit` of them the
    episode ends. `prompt` stands before the first observation.

    Reward: the environment's own, as it is; terminated and truncated both end the episode. The task seed is the reset's seed.
    """

    def __init__(
        self,
        id: str,
        prompt: str = "",
        actions: list[str] | None = None,
        invalid_reward: float = 0.0,
        invalid_limit: int = 3,
        **settings: Any,
    ):
        import gymnasium

        self._game: Any = gymnasium.make(id, **settings)
        spaces, space = gymnasium.spaces, self._game.action_space
        if isinstance(space, spaces.Discrete):
            self._first = int(space.start)
            self._names = actions or [str(self._first + index) for index in range(int(space.n))]
            if len(self._names) != space.n:
                raise ValueError(f"actions names {len(self._names)} actions, {id} has {space.n}")
        elif isinstance(space, spaces.Text):
            self._names = []
            if actions:
                raise ValueError(f"{id} takes any text, so there are no actions to name")
        else:
            raise ValueError(
                f"the actions of {id} are {space}; only Discrete and Text ones can be written as an answer"
            )
        self._prompt, self._ansi = prompt, self._game.render_mode == "ansi"
        self._invalid_reward, self._invalid_limit, self._invalid = invalid_reward, invalid_limit, 0

    def reset(self, task_seed: int) -> list[Message]:
        self._invalid = 0
        seed = task_seed % 2**31
        observation, _ = self._game.reset(seed=seed)
        return [Message("user", "\n".join(filter(None, [self._prompt, self._read(observation)])))]

    def step(self, action: Action) -> StepResult:
        text = action.text.strip()
        if (self._names and text not in self._names) or (not self._names and text not in self._game.action_space):
            self._invalid += 1
            wanted = f"one of: {', '.join(self._names)}" if self._names else f"a text of {self._game.action_space}"
            ends = self._invalid >= self._invalid_limit
            return StepResult(self._invalid_reward, [] if ends else [Message("user", f"answer with {wanted}")], ends)
        move = self._first + self._names.index(text) if self._names else text
        observation, reward, terminated, truncated, _ = self._game.step(move)
        done = bool(terminated or truncated)
        return StepResult(float(reward), [] if done else [Message("user", self._read(observation))], done)

    def close(self) -> None:
        self._game.close()

    def _read(self, observation: Any) -> str:
        drawn = self._game.render() if self._ansi else observation
        if isinstance(drawn, str):
            # A game that is drawn for a terminal marks its place by colour, which a policy can not see.
            return re.sub(r"\x1b\[[1-9][\d;]*m(.*?)\x1b\[0m", r"[\1]", drawn, flags=re.DOTALL).strip()
        return str(_plain(drawn))


def _plain(value: Any) -> Any:
    """numpy's numbers and arrays as Python's."""
    if isinstance(value, tuple):
        return tuple(_plain(part) for part in value)
    if isinstance(value, dict):
        return {name: _plain(part) for name, part in value.items()}
    return value.tolist() if hasattr(value, "tolist") else value


def make(target: str, config: EnvConfig) -> EnvironmentFactory:
    """Played in the pool. `ID` may be `module:ID`, which imports the module that registers it."""
    gymnasium = optional_package("gymnasium", config)
    module, _, name = target.rpartition(":")
    try:
        if module:
            importlib.import_module(module)
        gymnasium.spec(name)
    except (ImportError, ValueError) as error:
        raise ConfigError(f"`env.name` = {config.name!r} can not be loaded: {error}") from error
    except gymnasium.error.Error as error:
        hint = did_you_mean(name, gymnasium.registry)
        raise ConfigError(f"`env.name` = {config.name!r}: {error} {hint}") from error
    return class_factory(GymnasiumGame, PATH, config, id=target)
