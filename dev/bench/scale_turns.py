"""The turn and request axes of `bench scale`: the cost of an episode beside environment, agent and engine."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Sequence
from statistics import median
from typing import Any

import msgspec
import numpy as np

from dev.bench.jobs import Say
from dev.bench.scale import Point
from r3async.config import EpisodeConfig
from r3async.envs import Action, Message, StepResult
from r3async.rollout.chat import ChatRenderer
from r3async.rollout.endpoint.session import AgentSession
from r3async.rollout.engine import Generation, GenerationRequest
from r3async.rollout.episode import EpisodePlayer, EpisodeTask
from r3async.rollout.scripted import ScriptedEngine
from r3async.tools.init_model import build_byte_tokenizer

TURNS = (10, 25, 50, 100, 200, 400)
QUICK = (4, 8, 16)
ANSWER_TOKENS, QUESTION_CHARACTERS = 32, 32
REPEATS = 5

TEMPLATE = """{%- if messages[0].role != 'system' -%}<|system|>You are a helpful assistant.<|end|>
{% endif -%}
{%- for message in messages %}{{ '<|' + message.role + '|>' + message.content + '<|end|>' + '\\n' }}{% endfor -%}
{%- if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"""


class _Asking:
    """An environment that never stops asking.

    Each question is new, even to earlier episodes: the renderer remembers the tokens of what it has encoded, and would
    know all questions of short episodes.
    """

    _asked = itertools.count(1)

    async def reset(self, task_seed: int) -> list[Message]:
        return [Message("system", "Answer each question."), self._question()]

    async def step(self, action: Action) -> StepResult:
        return StepResult(0.5, [self._question()])

    def _question(self) -> Message:
        return Message("user", f"{next(self._asked):0{QUESTION_CHARACTERS}d}")


class _Timed(ScriptedEngine):
    """A scripted engine that records how much CPU time it used."""

    seconds_used = 0.0

    async def generate(self, request: GenerationRequest) -> Generation:
        began = time.process_time()
        try:
            return await super().generate(request)
        finally:
            self.seconds_used += time.process_time() - began


class _Counted(ChatRenderer):
    """A renderer that counts the messages that the template renders, and the characters that are encoded."""

    messages = characters = 0

    def render(self, messages, tools=()):  # type: ignore[no-untyped-def]
        self.messages += len(messages)
        return super().render(messages, tools)

    def encode(self, text: str) -> list[int]:
        self.characters += len(text)
        return super().encode(text)


def measure(quick: bool, say: Say) -> list[Point]:
    """Measure episodes of various numbers of turns, one after the other; their tokens are the work."""
    tokenizer = build_byte_tokenizer()
    tokenizer.chat_template = TEMPLATE
    points = []
    for turns in QUICK if quick else TURNS:
        renderer = _Counted(tokenizer)
        _episode(renderer, 2)
        renderer.messages = renderer.characters = 0
        played = [_episode(renderer, turns) for _ in range(1 if quick else REPEATS)]
        done = {"messages": renderer.messages, "characters": renderer.characters}
        points.append(_point(turns, played, {name: count / len(played) for name, count in done.items()}))
        say(f"{turns} turns: {points[-1].unit_us:.2f} µs a token")
    return points


def _episode(renderer: ChatRenderer, turns: int) -> tuple[int, float]:
    """Play an episode, and return its tokens and its CPU seconds without the engine's."""
    engine = _Timed(_answer, keep_requests=False)

    async def play() -> tuple[int, float]:
        await engine.start()
        began = time.process_time()
        trajectory = await EpisodePlayer(
            EpisodeTask(0, 1, 0), _Asking(), engine, renderer, _settings(turns)
        ).play_episode()
        return trajectory.num_tokens, time.process_time() - began - engine.seconds_used

    return asyncio.run(play())


def _settings(turns: int) -> EpisodeConfig:
    return EpisodeConfig(
        max_turns=turns,
        max_new_tokens=ANSWER_TOKENS,
        max_prompt_tokens=1_000_000,
        max_total_tokens=2_000_000,
        rows="merged",
    )


def _point(turns: int, played: Sequence[tuple[int, float]], counts: dict[str, float]) -> Point:
    seconds = [cpu for _, cpu in played]
    middle = median(seconds)
    return Point(turns, played[0][0], middle, len(played), (max(seconds) - min(seconds)) / middle, counts)


def _answer(request: GenerationRequest, index: int) -> list[int]:
    letters = np.random.default_rng(index).integers(97, 123, ANSWER_TOKENS - 1)
    return [*letters.tolist(), *request.stop_token_ids[:1]]


def measure_requests(quick: bool, say: Say) -> list[Point]:
    """Measure episodes that an agent plays through the endpoint's sessions: each request repeats the conversation."""
    tokenizer = build_byte_tokenizer()
    tokenizer.chat_template = TEMPLATE
    renderer = ChatRenderer(tokenizer)
    _session(renderer, 2)
    points = []
    for turns in QUICK if quick else TURNS:
        played = [_session(renderer, turns) for _ in range(1 if quick else REPEATS)]
        points.append(_point(turns, played, {}))
        say(f"{turns} requests: {points[-1].unit_us:.2f} µs a token")
    return points


def _session(renderer: ChatRenderer, turns: int) -> tuple[int, float]:
    """Play an episode through a session, and return what `_episode` returns. Neither the agent is measured nor the JSON
    of its requests, which repeat the conversation."""
    engine = _Timed(_answer, keep_requests=False)
    history: list[dict[str, Any]] = [{"role": "system", "content": "Answer each question."}]

    async def play() -> tuple[int, float]:
        await engine.start()
        session = AgentSession(EpisodeTask(0, 1, 0), engine, renderer, _settings(turns))
        own = 0.0
        for turn in range(turns):
            history.append({"role": "user", "content": f"{turn:0{QUESTION_CHARACTERS}d}"})
            asked = msgspec.json.decode(msgspec.json.encode(history))
            began = time.process_time()
            async with session.answer_chat(session.parse_messages(asked)) as (_, message):
                pass
            own += time.process_time() - began
            history.append(message)
        began = time.process_time()
        session.set_reward(1.0)
        session.close()
        trajectory = session.build_trajectory("stop")
        return trajectory.num_tokens, own + time.process_time() - began - engine.seconds_used

    return asyncio.run(play())
