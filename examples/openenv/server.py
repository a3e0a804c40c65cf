"""Hangman as an OpenEnv server: `python server.py [PORT]`. It needs `pip install openenv-core`, and r3async does not."""

from __future__ import annotations

import random
import sys

import uvicorn
from openenv.core.env_server import Action, Environment, Observation, State, create_app

WORDS = (
    *("anchor", "basket", "candle", "dragon", "engine", "forest", "garden", "hammer"),
    *("island", "jungle", "kettle", "ladder", "magnet", "needle", "orange", "pillow"),
)
TRIES = 3


class Guess(Action):
    letters: str


class Word(Observation):
    text: str


class Hangman(Environment):
    """A word is hidden. A try names up to six letters, and pays the share of the word that it uncovers."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def reset(self, seed=None, episode_id=None, **kwargs):
        self.word, self.found, self.tries = random.Random(seed).choice(WORDS), set(), TRIES
        return Word(
            text=f"A word of {len(self.word)} letters: {self.show()}. Name letters, at most six in a try."
        )

    def step(self, action, timeout_s=None, **kwargs):
        named = list(
            dict.fromkeys(letter for letter in action.letters.lower() if letter.isalpha())
        )[:6]
        new = [letter for letter in self.word if letter in named and letter not in self.found]
        self.found.update(new)
        self.tries -= 1
        done = self.tries == 0 or self.found >= set(self.word)
        return Word(
            text=f"{self.show()}, {self.tries} tries left",
            reward=len(new) / len(self.word),
            done=done,
        )

    def show(self):
        return "".join(letter if letter in self.found else "_" for letter in self.word)

    @property
    def state(self):
        return State()


app = create_app(Hangman, Guess, Word, env_name="hangman", max_concurrent_envs=64)

if __name__ == "__main__":
    uvicorn.run(
        app,
        host="127.0.0.1",
        port=int(sys.argv[1]) if len(sys.argv) > 1 else 8765,
        log_level="warning",
    )
