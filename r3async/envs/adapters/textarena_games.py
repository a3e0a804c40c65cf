"""`textarena:ID`: games of the package TextArena, alone or against an opponent."""

from __future__ import annotations

import inspect
import random
import re
from collections.abc import Callable
from typing import Any

from r3async.config import ConfigError, EnvConfig, did_you_mean
from r3async.envs import Action, EnvironmentFactory, EnvironmentFailed, Message, StepResult
from r3async.envs.factory import build_class_factory, import_for_setting, import_optional_package

MAX_OPPONENT_MOVES = 100
OpponentPolicy = Callable[[str, random.Random], str]


def choose_random_move(observation: str, rng: random.Random) -> str:
    """Return a random one of the bracketed moves that the game last listed as available; without
    such a list, one from the last line that contains any."""
    _, listed, moves = observation.rpartition("Available")
    lines = [moves] if listed else reversed(observation.splitlines())
    for line in lines:
        found = [
            move
            for move in re.findall(r"\[[^\[\]\n]+\]", line)
            if not re.match(r"\[(GAME|Player)", move)
        ]
        if found:
            return rng.choice(found)
    return ""


class TextArenaEnvironment:
    """A TextArena game, `textarena.make(id, **settings)`, in which the policy is player `seat`.

    Messages are what the game shows the policy and has not shown it before. The reward comes with
    the last answer and is the game's own for the policy, -1..1 in most games; an answer that the
    game refuses for good loses.

    Args:
        players: Number of players; 0 for the fewest with which the game can be played.
        seat: Number of the policy among the players.
        opponent: Policy of all other players: `random`, or
            `module:function(observation, rng) -> move`.
    """

    def __init__(
        self, id: str, players: int = 0, seat: int = 0, opponent: str = "random", **settings: Any
    ):
        import textarena

        if players < 0 or seat < 0 or (players and seat >= players):
            raise ValueError(f"seat must be in 0..players-1, got seat {seat} of {players} players")
        self._opponent: OpponentPolicy = (
            choose_random_move
            if opponent == "random"
            else import_for_setting(opponent, "env.args.opponent")
        )
        self._make_game = lambda: textarena.make(id, **settings)
        self._id = id
        self._players = players
        self._seat = seat
        self._rng = random.Random(0)
        self._game: Any = None
        self._shown_text = ""
        self._make_game()  # wrong settings are an error now

    def reset(self, task_seed: int) -> list[Message]:
        self._rng = random.Random(f"opponent {task_seed}")
        self._shown_text = ""
        self._game = self._start_game(task_seed % 2**31)
        if self._play_opponents():
            raise EnvironmentFailed(f"{self._id} was over before the policy could move")
        return self._render_new_text()

    def step(self, action: Action) -> StepResult:
        done, _ = self._game.step(action=action.text)
        if not done and not self._play_opponents():
            return StepResult(0.0, self._render_new_text())
        rewards, _ = self._game.close()
        return StepResult(float((rewards or {}).get(self._seat, 0.0)), done=True)

    def _start_game(self, seed: int) -> Any:
        """Start a game with as few players as it accepts. Raises `ValueError` if none of the
        numbers is accepted."""
        refused = ""
        for players in [self._players] if self._players else range(self._seat + 1, 16):
            game = self._make_game()
            try:
                game.reset(num_players=players, seed=seed)
                return game
            except (AssertionError, ValueError) as error:
                refused = str(error)
        raise ValueError(
            f"{self._id} does not start with {self._players or 'so many'} players: {refused}"
        )

    def _play_opponents(self) -> bool:
        """Play the opponents' moves until it is the policy's turn. Returns True if the game
        ended before that."""
        for _ in range(MAX_OPPONENT_MOVES):
            player, observation = self._game.get_observation()
            if player == self._seat:
                self._observed_text = str(observation)
                return False
            done, _ = self._game.step(action=self._opponent(str(observation), self._rng))
            if done:
                return True
        raise EnvironmentFailed(
            f"the opponent moved {MAX_OPPONENT_MOVES} times in {self._id}: is every move refused?"
        )

    def _render_new_text(self) -> list[Message]:
        """Return what the game shows now without what it showed before: most games repeat the whole
        history every time."""
        seen = self._shown_text
        self._shown_text = self._observed_text
        return [Message("user", self._observed_text.removeprefix(seen).strip() or "your move")]


def make_textarena(target: str, config: EnvConfig) -> EnvironmentFactory:
    import_optional_package("textarena", config)
    games = import_optional_package("textarena.envs.registration", config).ENV_REGISTRY
    if target not in games:
        raise ConfigError(
            f"`env.name` = {config.name!r}: textarena has no game {target!r}; "
            f"{did_you_mean(target, games)}"
        )
    if target.endswith("-raw"):
        shown = target.removesuffix("-raw")
        raise ConfigError(
            f"`env.name` = {config.name!r} shows Python objects; `textarena:{shown}` shows "
            "the game as text"
        )
    opponent = config.args.get("opponent", "random")
    if opponent != "random":
        function = import_for_setting(str(opponent), "env.args.opponent")
        try:
            inspect.signature(function).bind("", random.Random(0))
        except TypeError as error:
            raise ConfigError(
                f"`env.args.opponent` = {opponent!r} must take (observation, rng): {error}"
            ) from error
    return build_class_factory(
        TextArenaEnvironment, f"{__name__}:TextArenaEnvironment", config, id=target
    )
