"""`bench scale`, turns of an episode: what an episode costs beside environment and engine."""

from __future__ import annotations

import asyncio
import time
from statistics import median

import numpy as np

from r3async.config import EpisodeConfig
from r3async.envs import Action, Message, StepResult
from r3async.rollout.chat import ChatRenderer
from r3async.rollout.engines import Generation, GenerationRequest
from r3async.rollout.engines.scripted import ScriptedEngine
from r3async.rollout.episode import EpisodePlayer, EpisodeTask
from r3async.tools.bench.jobs import Say
from r3async.tools.bench.scale import Point
from r3async.tools.init_model import byte_tokenizer

TURNS = (10, 25, 50, 100, 200, 400)
QUICK = (4, 8, 16)
ANSWER_TOKENS, QUESTION_CHARACTERS = 32, 32
REPEATS = 5

TEMPLATE = """{%- if messages[0].role != 'system' -%}<|system|>You are a helpful assistant.<|end|>
{% endif -%}
{%- for message in messages %}{{ '<|' + message.role + '|>' + message.content + '<|end|>' + '\\n' }}{% endfor -%}
{%- if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"""


class _Asking:
    """An environment that asks until nobody answers; each question is new."""

    def __init__(self) -> None:
        self._asked = 0

    async def reset(self, task_seed: int) -> list[Message]:
        return [Message("system", "Answer each question."), self._question()]

    async def step(self, action: Action) -> StepResult:
        return StepResult(0.5, [self._question()])

    def _question(self) -> Message:
        self._asked += 1
        return Message("user", f"{self._asked:0{QUESTION_CHARACTERS}d}")


class _Timed(ScriptedEngine):
    """A scripted engine that knows how much processor time it used."""

    seconds_used = 0.0

    async def generate(self, request: GenerationRequest) -> Generation:
        began = time.process_time()
        try:
            return await super().generate(request)
        finally:
            self.seconds_used += time.process_time() - began


class _Counted(ChatRenderer):
    """Counts messages that the template renders, and characters that are encoded."""

    messages = characters = 0

    def render(self, messages, tools=()):  # type: ignore[no-untyped-def]
        self.messages += len(messages)
        return super().render(messages, tools)

    def encode(self, text: str) -> list[int]:
        self.characters += len(text)
        return super().encode(text)


def measure(quick: bool, say: Say) -> list[Point]:
    """Episodes of so many turns, one after the other; their tokens are the work."""
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = TEMPLATE
    points = []
    for turns in QUICK if quick else TURNS:
        renderer = _Counted(tokenizer)
        _episode(renderer, 2)
        renderer.messages = renderer.characters = 0
        played = [_episode(renderer, turns) for _ in range(1 if quick else REPEATS)]
        seconds = [cpu for _, cpu in played]
        middle, n = median(seconds), len(played)
        counts = {"messages": renderer.messages / n, "characters": renderer.characters / n}
        points.append(Point(turns, played[0][0], middle, n, (max(seconds) - min(seconds)) / middle, counts))
        say(f"{turns} turns: {points[-1].unit_us:.2f} µs a token")
    return points


def _episode(renderer: ChatRenderer, turns: int) -> tuple[int, float]:
    """Tokens of the episode, and processor seconds without the engine's."""
    settings = EpisodeConfig(
        max_turns=turns,
        max_new_tokens=ANSWER_TOKENS,
        max_prompt_tokens=1_000_000,
        max_total_tokens=2_000_000,
        rows="merged",
    )
    engine = _Timed(_answer, keep_calls=False)

    async def play() -> tuple[int, float]:
        await engine.start()
        began = time.process_time()
        trajectory = await EpisodePlayer(EpisodeTask(0, 1, 0), _Asking(), engine, renderer, settings).play()
        return trajectory.tokens, time.process_time() - began - engine.seconds_used

    return asyncio.run(play())


def _answer(request: GenerationRequest, index: int) -> list[int]:
    letters = np.random.default_rng(index).integers(97, 123, ANSWER_TOKENS - 1)
    return [*letters.tolist(), *request.stop_token_ids[:1]]
