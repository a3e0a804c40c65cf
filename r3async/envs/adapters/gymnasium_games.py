"""`gymnasium:ID`: environments of the package Gymnasium whose actions can be written."""

from __future__ import annotations

import importlib
import re
from typing import Any

from r3async.config import ConfigError, EnvConfig, did_you_mean
from r3async.envs import Action, EnvironmentFactory, Message, StepResult
from r3async.envs.factory import build_class_factory, import_optional_package


class GymnasiumEnvironment:
    """A Gymnasium environment, `gymnasium.make(id, **settings)`, with one message per step.

    An observation is shown as `render()` draws it with `render_mode = "ansi"` (colors as words, in
    brackets), a text as it is, and anything else as Python writes it.

    An action is the text of a `Text` space, the number of a `Discrete` action, or its name if
    `actions` names them in order. An invalid answer is refused in a message, earns
    `invalid_reward`, and does not move the game.

    The reward is the environment's own, unchanged; terminated and truncated both end the episode.
    The task seed is the seed of the reset.

    Args:
        prompt: Text before the first observation.
        actions: Names of the discrete actions, in order.
        invalid_reward: Reward of an invalid answer.
        invalid_limit: Number of invalid answers after which the episode ends.
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
        spaces = gymnasium.spaces
        space = self._game.action_space
        if isinstance(space, spaces.Discrete):
            self._first_action = int(space.start)
            self._action_names = actions or [
                str(self._first_action + index) for index in range(int(space.n))
            ]
            if len(self._action_names) != space.n:
                raise ValueError(
                    f"actions names {len(self._action_names)} actions, {id} has {space.n}"
                )
        elif isinstance(space, spaces.Text):
            self._action_names = []
            if actions:
                raise ValueError(f"{id} takes any text, so there are no actions to name")
        else:
            raise ValueError(
                f"the actions of {id} are {space}; only Discrete and Text ones can be "
                "written as an answer"
            )
        self._prompt = prompt
        self._renders_ansi = self._game.render_mode == "ansi"
        self._invalid_reward = invalid_reward
        self._invalid_limit = invalid_limit
        self._invalid_count = 0

    def reset(self, task_seed: int) -> list[Message]:
        self._invalid_count = 0
        seed = task_seed % 2**31
        observation, _ = self._game.reset(seed=seed)
        return [
            Message(
                "user",
                "\n".join(filter(None, [self._prompt, self._render_observation(observation)])),
            )
        ]

    def step(self, action: Action) -> StepResult:
        text = action.text.strip()
        if (self._action_names and text not in self._action_names) or (
            not self._action_names and text not in self._game.action_space
        ):
            self._invalid_count += 1
            wanted = (
                f"one of: {', '.join(self._action_names)}"
                if self._action_names
                else f"a text of {self._game.action_space}"
            )
            ends = self._invalid_count >= self._invalid_limit
            return StepResult(
                self._invalid_reward,
                [] if ends else [Message("user", f"answer with {wanted}")],
                ends,
            )
        move = self._first_action + self._action_names.index(text) if self._action_names else text
        observation, reward, terminated, truncated, _ = self._game.step(move)
        done = bool(terminated or truncated)
        return StepResult(
            float(reward),
            [] if done else [Message("user", self._render_observation(observation))],
            done,
        )

    def close(self) -> None:
        self._game.close()

    def _render_observation(self, observation: Any) -> str:
        drawn = self._game.render() if self._renders_ansi else observation
        if isinstance(drawn, str):
            return write_colors_as_words(drawn).strip()
        return str(_to_python_values(drawn))


_COLORS = ("black", "red", "green", "yellow", "blue", "magenta", "cyan", "white")
_STYLE_NAMES = {
    "1": "bold",
    **{f"3{number}": color for number, color in enumerate(_COLORS)},
    **{f"4{number}": f"on {color}" for number, color in enumerate(_COLORS)},
}
"""Names of a terminal's styles (ECMA-48, SGR), by their numbers."""


def write_colors_as_words(drawing: str) -> str:
    """Return a drawing for a terminal with words for its colors, which a policy cannot
    see: `[on red: S]`."""
    first, *rest = re.split(r"\x1b\[([\d;]*)m", drawing)
    written = [first]
    style: list[str] = []
    for codes, text in zip(rest[::2], rest[1::2], strict=True):
        for code in codes.split(";"):
            style = [] if code in ("", "0") else [*style, _STYLE_NAMES.get(code, f"style {code}")]
        written.append(f"[{' '.join(style)}: {text}]" if style and text else text)
    return "".join(written)


def _to_python_values(value: Any) -> Any:
    """Return `value` with NumPy numbers and arrays converted to Python's."""
    if isinstance(value, tuple):
        return tuple(_to_python_values(part) for part in value)
    if isinstance(value, dict):
        return {name: _to_python_values(part) for name, part in value.items()}
    return value.tolist() if hasattr(value, "tolist") else value


def make_gymnasium(target: str, config: EnvConfig) -> EnvironmentFactory:
    """Return a factory of Gymnasium environments. An id of the form `module:ID` first imports the
    module that registers it."""
    gymnasium = import_optional_package("gymnasium", config)
    module, _, name = target.rpartition(":")
    try:
        if module:
            importlib.import_module(module)
        gymnasium.spec(name)
    except (ImportError, ValueError) as error:
        raise ConfigError(f"`env.name` = {config.name!r} cannot be loaded: {error}") from error
    except gymnasium.error.Error as error:
        hint = did_you_mean(name, gymnasium.registry)
        raise ConfigError(f"`env.name` = {config.name!r}: {error} {hint}") from error
    return build_class_factory(
        GymnasiumEnvironment, f"{__name__}:GymnasiumEnvironment", config, id=target
    )
