"""`textarena:ID`: text games of the package textarena, alone or against a scripted opponent."""

from __future__ import annotations

import contextlib
import inspect
import random
import re
from collections.abc import Callable, Iterator
from typing import Any

from r3async.config import ConfigError, EnvConfig, did_you_mean
from r3async.envs.base import Action, EnvironmentFactory, EnvironmentFailed, Message, StepResult
from r3async.envs.factory import class_factory, load, optional_package

PATH = "r3async.envs.adapt_textarena:TextArenaGame"
MAX_OPPONENT_MOVES = 100
Opponent = Callable[[str, random.Random], str]


def random_opponent(observation: str, chance: random.Random) -> str:
    """Any move in brackets that the game last listed as available; without such a list, any in the last line that has one."""
    _, listed, moves = observation.rpartition("Available")
    lines = [moves] if listed else reversed(observation.splitlines())
    for line in lines:
        found = [move for move in re.findall(r"\[[^\[\]\n]+\]", line) if not re.match(r"\[(GAME|Player)", move)]
        if found:
            return chance.choice(found)
    return ""


class TextArenaGame:
    """`textarena.make(id, **settings)` with `players` players (0: as few as it can be played by); the policy is player `seat`.

    Whoever else is to move is `opponent`: `random`, or `module:function(observation, chance) -> move`. Messages are what the
    game shows the policy and has not shown it before. Reward, with the last answer: the game's own for the policy, -1..1 in
    most games; an answer that the game refuses for good loses. Games use the process's random numbers: each has its own
    stream here, begun from the task seed.
    """

    def __init__(self, id: str, players: int = 0, seat: int = 0, opponent: str = "random", **settings: Any):
        import textarena

        if players < 0 or seat < 0 or (players and seat >= players):
            raise ValueError(f"seat must be in 0..players-1, got seat {seat} of {players} players")
        self._opponent: Opponent = random_opponent if opponent == "random" else load(opponent, "env.args.opponent")
        self._make = lambda: textarena.make(id, **settings)
        self._id, self._players, self._seat = id, players, seat
        self._chance, self._state = random.Random(0), random.Random(0).getstate()
        self._game: Any = None
        self._shown = ""
        with self._own_chance():
            self._make()  # wrong settings are an error now

    def reset(self, task_seed: int) -> list[Message]:
        self._chance, self._state, self._shown = random.Random(f"opponent {task_seed}"), _state(task_seed), ""
        with self._own_chance():
            self._game = self._begin(task_seed % 2**31)
            if self._others_move():
                raise EnvironmentFailed(f"{self._id} was over before the policy could move")
            return self._news()

    def step(self, action: Action) -> StepResult:
        with self._own_chance():
            done, _ = self._game.step(action=action.text)
            if not done and not self._others_move():
                return StepResult(0.0, self._news())
            rewards, _ = self._game.close()
            return StepResult(float((rewards or {}).get(self._seat, 0.0)), done=True)

    def _begin(self, seed: int) -> Any:
        """A game with as few players as it takes. Raises `ValueError` if none of the numbers is accepted."""
        refused = ""
        for players in [self._players] if self._players else range(self._seat + 1, 16):
            game = self._make()
            try:
                game.reset(num_players=players, seed=seed)
                return game
            except AssertionError as error:
                refused = str(error)
        raise ValueError(f"{self._id} can not be played by {self._players or 'so many'} players: {refused}")

    def _others_move(self) -> bool:
        """Plays until it is the policy's turn; whether the game ended before that."""
        for _ in range(MAX_OPPONENT_MOVES):
            player, observation = self._game.get_observation()
            if player == self._seat:
                self._observed = str(observation)
                return False
            done, _ = self._game.step(action=self._opponent(str(observation), self._chance))
            if done:
                return True
        raise EnvironmentFailed(f"the opponent moved {MAX_OPPONENT_MOVES} times in {self._id}: is every move refused?")

    def _news(self) -> list[Message]:
        """Most games show the whole history every time: what was shown before is cut off."""
        seen, self._shown = self._shown, self._observed
        return [Message("user", self._observed.removeprefix(seen).strip() or "your move")]

    @contextlib.contextmanager
    def _own_chance(self) -> Iterator[None]:
        before = random.getstate()
        random.setstate(self._state)
        try:
            yield
        finally:
            self._state = random.getstate()
            random.setstate(before)


def _state(task_seed: int) -> Any:
    return random.Random(task_seed).getstate()


def make(target: str, config: EnvConfig) -> EnvironmentFactory:
    """Played in the pool."""
    optional_package("textarena", config)
    games = optional_package("textarena.envs.registration", config).ENV_REGISTRY
    if target not in games:
        raise ConfigError(
            f"`env.name` = {config.name!r}: textarena has no game {target!r}; {did_you_mean(target, games)}"
        )
    opponent = config.args.get("opponent", "random")
    if opponent != "random":
        function = load(str(opponent), "env.args.opponent")
        try:
            inspect.signature(function).bind("", random.Random(0))
        except TypeError as error:
            raise ConfigError(f"`env.args.opponent` = {opponent!r} must take (observation, chance): {error}") from error
    return class_factory(TextArenaGame, PATH, config, id=target)
