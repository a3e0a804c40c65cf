"""Episodes as one row and as one row per turn: an engine that answers from a table, and rewards by turn."""

import asyncio

import numpy as np

from r3async.config import EpisodeConfig
from r3async.data.model_shape import RoutingShape
from r3async.data.tokens import Trajectory
from r3async.data.versions import VersionSpan
from r3async.envs import Message, StepResult
from r3async.rollout.engine import Generation, GenerationRequest
from r3async.rollout.episode import EpisodePlayer, EpisodeTask
from r3async.rollout.play_context import PlayContext
from r3async.rollout.renderer import ChatRenderer
from r3async.tools.init_model import build_byte_tokenizer
from tests.helpers import torch as ht

SHAPE = RoutingShape(layers=2, top_k=ht.TOP_K, num_experts=ht.EXPERTS)
TURNS, EPISODES = 4, 3
VOCABULARY = 272


class Sampler:
    """An engine that takes answers, log-probs and routes from a table by position, the same for every caller and kind
    of rows."""

    version, routing = 0, SHAPE

    def __init__(self, seed: int, end: int):
        chance = np.random.default_rng(seed)
        scores = chance.random((400, SHAPE.layers, SHAPE.num_experts))
        self.routes = scores.argsort(-1)[..., : SHAPE.top_k].astype(np.uint8)
        self.logprobs = -3 * chance.random(400).astype(np.float32) - 0.05
        self.answers = [[*chance.integers(1, 250, n).tolist(), end] for n in chance.integers(2, 9, TURNS)]
        self.calls: list[tuple[list[int], list[int]]] = []

    async def generate(self, request: GenerationRequest) -> Generation:
        answer = self.answers[len(self.calls)]
        self.calls.append((request.prompt_ids.tolist(), answer))
        start, n = len(request.prompt_ids), len(answer)
        return Generation(
            token_ids=np.asarray(answer, np.int32),
            logprobs=self.logprobs[start : start + n],
            version_spans=[VersionSpan(0, 0, n)],
            routed_experts=self.routes[request.routes_from : start + n - 1],
            routes_from=request.routes_from,
            stop_reason="stop",
        )


class Graded:
    """An environment that rewards each turn differently."""

    def __init__(self, seed: int):
        self.rewards = np.random.default_rng(seed).random(TURNS).tolist()

    async def reset(self, task_seed):
        return [Message("user", "begin")]

    async def step(self, action):
        return StepResult(self.rewards.pop(0), [Message("user", "an observation, and go on")], done=not self.rewards)


def play(mode: str) -> tuple[list[Trajectory], list[Sampler]]:
    chat = ChatRenderer(build_byte_tokenizer())
    limits = EpisodeConfig(max_new_tokens=16, max_prompt_tokens=300, max_total_tokens=400, rows=mode, temperature=0.8)
    engines = [Sampler(seed, chat.eos_token_id) for seed in range(EPISODES)]
    trajectories = [
        asyncio.run(EpisodePlayer(EpisodeTask(0, i, 0), Graded(i), limits, PlayContext(engine, chat)).play_episode())
        for i, engine in enumerate(engines)
    ]
    return trajectories, engines
