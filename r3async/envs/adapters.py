"""Environments of other people's packages: `reasoning-gym:TASK`, `gymnasium:ID`, `textarena:ID`. All are played in the pool.

The packages are imported where they are used: whoever plays something else does without them.
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
import random
import re
from collections.abc import Callable, Iterator
from typing import Any

from r3async.config import ConfigError, EnvConfig, did_you_mean
from r3async.envs import Action, EnvironmentFactory, EnvironmentFailed, Message, StepResult
from r3async.envs.factory import build_class_factory, import_for_setting, import_optional_package
from r3async.envs.pool import make_pooled_factory

MAX_OPPONENT_MOVES = 100
OpponentPolicy = Callable[[str, random.Random], str]


class ReasoningGymEnvironment:
    """One task of the procedural data set `task`, made with the task seed; `settings` are of its configuration class.

    The answer is what stands in `<answer>...</answer>`, or the whole text. Reward: the package's own score, in `0..1`. The
    oracle is the package's own answer, which some tasks score below 1 because they accept many.
    """

    def __init__(self, task: str, system: str = "", **settings: Any):
        import reasoning_gym

        self._package: Any = reasoning_gym
        self._task, self._system, self._settings = task, system, settings
        self._dataset: Any = None
        self._entry: dict[str, Any] = {}

    def reset(self, task_seed: int) -> list[Message]:
        # Tasks add an index to the seed, and some give it to numpy, which takes 32 bits.
        self._dataset = self._package.create_dataset(self._task, seed=task_seed % 2**31, size=1, **self._settings)
        self._entry = self._dataset[0]
        asked = [Message("user", self._entry["question"])]
        return [Message("system", self._system), *asked] if self._system else asked

    def oracle(self) -> str:
        return str(self._entry["answer"] or "")

    def step(self, action: Action) -> StepResult:
        marked = self._package.utils.extract_answer(action.text)
        answer = marked if marked is not None else action.text.strip()
        return StepResult(float(self._dataset.score_answer(answer, self._entry)), done=True)


def make_reasoning_gym(target: str, config: EnvConfig) -> EnvironmentFactory:
    """Some tasks take seconds to make. `env.args` are the task's own settings, and `system`."""
    import_optional_package("reasoning_gym", config)
    known = import_optional_package("reasoning_gym.factory", config).DATASETS
    if target not in known:
        hint = did_you_mean(target, known, f"it has {len(known)}, such as chain_sum.")
        raise ConfigError(f"`env.name` = {config.name!r}: reasoning-gym has no task {target!r}; {hint}")
    settings = {name: value for name, value in config.reveal_args().items() if name != "system"}
    fields = known[target][1].__dataclass_fields__
    for name in settings:
        if name not in fields or name in ("seed", "size"):
            own = [field for field in fields if field not in ("seed", "size")]
            raise ConfigError(
                f"`env.args.{name}`: {target!r} has no such setting; {did_you_mean(name, own)} it has {', '.join(own)}"
            )
    try:
        settings_class = known[target][1](**settings)
        if hasattr(settings_class, "validate"):
            settings_class.validate()
    except (AssertionError, TypeError, ValueError) as error:
        raise ConfigError(f"`env.args` do not fit {config.name!r}: {error}") from error
    return make_pooled_factory(
        f"{__name__}:ReasoningGymEnvironment", {"task": target, **config.reveal_args()}, config, has_oracle=True
    )


class GymnasiumEnvironment:
    """`gymnasium.make(id, **settings)`, one message a step.

    Observation: what `render()` draws with `render_mode = "ansi"` (coloured places in brackets), a text as it is, anything else
    as Python writes it.
    Action: the text of a `Text` space; the number of a `Discrete` action, or its name if `actions` names them in order. An
    answer that is no action is refused in a message, earns `invalid_reward`, and does not move the game; after `invalid_limit`
    of them the episode ends. `prompt` stands before the first observation.

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
            self._first_action = int(space.start)
            self._action_names = actions or [str(self._first_action + index) for index in range(int(space.n))]
            if len(self._action_names) != space.n:
                raise ValueError(f"actions names {len(self._action_names)} actions, {id} has {space.n}")
        elif isinstance(space, spaces.Text):
            self._action_names = []
            if actions:
                raise ValueError(f"{id} takes any text, so there are no actions to name")
        else:
            raise ValueError(
                f"the actions of {id} are {space}; only Discrete and Text ones can be written as an answer"
            )
        self._prompt, self._renders_ansi = prompt, self._game.render_mode == "ansi"
        self._invalid_reward, self._invalid_limit, self._invalid_count = invalid_reward, invalid_limit, 0

    def reset(self, task_seed: int) -> list[Message]:
        self._invalid_count = 0
        seed = task_seed % 2**31
        observation, _ = self._game.reset(seed=seed)
        return [Message("user", "\n".join(filter(None, [self._prompt, self._render_observation(observation)])))]

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
            return StepResult(self._invalid_reward, [] if ends else [Message("user", f"answer with {wanted}")], ends)
        move = self._first_action + self._action_names.index(text) if self._action_names else text
        observation, reward, terminated, truncated, _ = self._game.step(move)
        done = bool(terminated or truncated)
        return StepResult(float(reward), [] if done else [Message("user", self._render_observation(observation))], done)

    def close(self) -> None:
        self._game.close()

    def _render_observation(self, observation: Any) -> str:
        drawn = self._game.render() if self._renders_ansi else observation
        if isinstance(drawn, str):
            # A game that is drawn for a terminal marks its place by colour, which a policy cannot see.
            return re.sub(r"\x1b\[[1-9][\d;]*m(.*?)\x1b\[0m", r"[\1]", drawn, flags=re.DOTALL).strip()
        return str(_to_python_values(drawn))


def _to_python_values(value: Any) -> Any:
    """numpy's numbers and arrays as Python's."""
    if isinstance(value, tuple):
        return tuple(_to_python_values(part) for part in value)
    if isinstance(value, dict):
        return {name: _to_python_values(part) for name, part in value.items()}
    return value.tolist() if hasattr(value, "tolist") else value


def make_gymnasium(target: str, config: EnvConfig) -> EnvironmentFactory:
    """`ID` may be `module:ID`, which imports the module that registers it."""
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
    return build_class_factory(GymnasiumEnvironment, f"{__name__}:GymnasiumEnvironment", config, id=target)


def choose_random_move(observation: str, rng: random.Random) -> str:
    """Any move in brackets that the game last listed as available; without such a list, any in the last line that has one."""
    _, listed, moves = observation.rpartition("Available")
    lines = [moves] if listed else reversed(observation.splitlines())
    for line in lines:
        found = [move for move in re.findall(r"\[[^\[\]\n]+\]", line) if not re.match(r"\[(GAME|Player)", move)]
        if found:
            return rng.choice(found)
    return ""


class TextArenaEnvironment:
    """`textarena.make(id, **settings)` with `players` players (0: as few as it can be played by); the policy is player `seat`.

    Whoever else is to move is `opponent`: `random`, or `module:function(observation, rng) -> move`. Messages are what the
    game shows the policy and has not shown it before. Reward, with the last answer: the game's own for the policy, -1..1 in
    most games; an answer that the game refuses for good loses. Games use the process's random numbers: each has its own
    stream here, begun from the task seed.
    """

    def __init__(self, id: str, players: int = 0, seat: int = 0, opponent: str = "random", **settings: Any):
        import textarena

        if players < 0 or seat < 0 or (players and seat >= players):
            raise ValueError(f"seat must be in 0..players-1, got seat {seat} of {players} players")
        self._opponent: OpponentPolicy = (
            choose_random_move if opponent == "random" else import_for_setting(opponent, "env.args.opponent")
        )
        self._make_game = lambda: textarena.make(id, **settings)
        self._id, self._players, self._seat = id, players, seat
        self._rng, self._random_state = random.Random(0), random.Random(0).getstate()
        self._game: Any = None
        self._shown_text = ""
        with self._swap_random_state():
            self._make_game()  # wrong settings are an error now

    def reset(self, task_seed: int) -> list[Message]:
        self._rng, self._random_state, self._shown_text = (
            random.Random(f"opponent {task_seed}"),
            random.Random(task_seed).getstate(),
            "",
        )
        with self._swap_random_state():
            self._game = self._start_game(task_seed % 2**31)
            if self._play_opponents():
                raise EnvironmentFailed(f"{self._id} was over before the policy could move")
            return self._render_new_text()

    def step(self, action: Action) -> StepResult:
        with self._swap_random_state():
            done, _ = self._game.step(action=action.text)
            if not done and not self._play_opponents():
                return StepResult(0.0, self._render_new_text())
            rewards, _ = self._game.close()
            return StepResult(float((rewards or {}).get(self._seat, 0.0)), done=True)

    def _start_game(self, seed: int) -> Any:
        """A game with as few players as it takes. Raises `ValueError` if none of the numbers is accepted."""
        refused = ""
        for players in [self._players] if self._players else range(self._seat + 1, 16):
            game = self._make_game()
            try:
                game.reset(num_players=players, seed=seed)
                return game
            except AssertionError as error:
                refused = str(error)
        raise ValueError(f"{self._id} cannot be played by {self._players or 'so many'} players: {refused}")

    def _play_opponents(self) -> bool:
        """Plays until it is the policy's turn; whether the game ended before that."""
        for _ in range(MAX_OPPONENT_MOVES):
            player, observation = self._game.get_observation()
            if player == self._seat:
                self._observed_text = str(observation)
                return False
            done, _ = self._game.step(action=self._opponent(str(observation), self._rng))
            if done:
                return True
        raise EnvironmentFailed(f"the opponent moved {MAX_OPPONENT_MOVES} times in {self._id}: is every move refused?")

    def _render_new_text(self) -> list[Message]:
        """Most games show the whole history every time: what was shown before is cut off."""
        seen, self._shown_text = self._shown_text, self._observed_text
        return [Message("user", self._observed_text.removeprefix(seen).strip() or "your move")]

    @contextlib.contextmanager
    def _swap_random_state(self) -> Iterator[None]:
        before = random.getstate()
        random.setstate(self._random_state)
        try:
            yield
        finally:
            self._random_state = random.getstate()
            random.setstate(before)


def make_textarena(target: str, config: EnvConfig) -> EnvironmentFactory:
    import_optional_package("textarena", config)
    games = import_optional_package("textarena.envs.registration", config).ENV_REGISTRY
    if target not in games:
        raise ConfigError(
            f"`env.name` = {config.name!r}: textarena has no game {target!r}; {did_you_mean(target, games)}"
        )
    opponent = config.args.get("opponent", "random")
    if opponent != "random":
        function = import_for_setting(str(opponent), "env.args.opponent")
        try:
            inspect.signature(function).bind("", random.Random(0))
        except TypeError as error:
            raise ConfigError(f"`env.args.opponent` = {opponent!r} must take (observation, rng): {error}") from error
    return build_class_factory(TextArenaEnvironment, f"{__name__}:TextArenaEnvironment", config, id=target)
