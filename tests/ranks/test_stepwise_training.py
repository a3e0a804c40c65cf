"""The same episodes as one row, and as a row a turn, give the same loss and gradient as a row that is built by hand."""

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from r3async.config import Config, EpisodeConfig, config_from_dict, to_dict
from r3async.data.model_shape import RoutingShape
from r3async.data.records import Sample, TokenTable, Trajectory, Turn
from r3async.data.versions import VersionSpan
from r3async.envs import Message, StepResult
from r3async.learner.batch.packing import MicroBatch, pack
from r3async.learner.torch.backend import TorchLearner
from r3async.learner.trainer import prepare
from r3async.rollout.chat import ChatRenderer
from r3async.rollout.engines import Generation, GenerationRequest
from r3async.rollout.episode import EpisodePlayer, EpisodeTask
from r3async.tools.init_model import byte_tokenizer
from tests.helpers import torch as ht
from tests.helpers.parity import gradients_of_rank, of_rank

SHAPE = RoutingShape(layers=2, top_k=ht.TOP_K, num_experts=ht.EXPERTS)
TURNS, EPISODES = 4, 3
VOCABULARY = 272


class Sampler:
    """Answers, log-probs and routes from a table by position: whoever asks, for whatever rows, hears the same."""

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
    """Each turn has a reward of its own."""

    def __init__(self, seed: int):
        self.rewards = np.random.default_rng(seed).random(TURNS).tolist()

    async def reset(self, task_seed):
        return [Message("user", "begin")]

    async def step(self, action):
        return StepResult(self.rewards.pop(0), [Message("user", "an observation, and go on")], done=not self.rewards)


def play(mode: str) -> tuple[list[Trajectory], list[Sampler]]:
    chat = ChatRenderer(byte_tokenizer())
    limits = EpisodeConfig(max_new_tokens=16, max_prompt_tokens=300, max_total_tokens=400, rows=mode, temperature=0.8)
    engines = [Sampler(seed, chat.end_id) for seed in range(EPISODES)]
    trajectories = [
        asyncio.run(EpisodePlayer(EpisodeTask(0, i, 0), Graded(i), engine, chat, limits).play())
        for i, engine in enumerate(engines)
    ]
    return trajectories, engines


def by_hand(trajectory: Trajectory, engine: Sampler) -> Trajectory:
    """One row, put together from what the engine was asked and answered."""
    prompt, answer = engine.calls[-1]
    ids = np.asarray(prompt + answer)
    table = TokenTable.of_tokens(ids)
    mask, turn, rewards = np.zeros(len(ids), bool), np.full(len(ids), -1, np.int32), np.zeros(len(ids), np.float32)
    turns = []
    for index, (before, said) in enumerate(engine.calls):
        rows = slice(len(before), len(before) + len(said))
        mask[rows], turn[rows] = True, index
        rewards[rows.stop - 1] = trajectory.turns[index].reward
        turns.append(Turn(index, 0, rows.start, rows.stop, trajectory.turns[index].reward, "stop"))
    recorded = np.ones(len(ids), bool)
    recorded[-1] = False
    routes = engine.routes[: len(ids)].copy()
    routes[-1] = np.arange(SHAPE.top_k)
    table = table.with_columns(
        loss_mask=mask,
        turn=turn,
        rewards=rewards,
        rollout_logprobs=np.where(mask, engine.logprobs[: len(ids)], np.float32(0)),
        policy_version=np.where(mask, 0, -1).astype(np.int32),
        routed_experts=routes,
        routing_recorded=recorded,
    )
    return Trajectory("h", 0, trajectory.episode_index, 0, "", "env_done", turns, [Sample("hs0", table, 0.8)])


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return ht.make_model(tmp_path_factory.mktemp("model"), "qwen3", vocab_size=VOCABULARY, max_position_embeddings=512)


@pytest.mark.parametrize("credit", ["trajectory", "turn", "token"])
def test_merged_and_stepwise_rows_give_loss_and_gradient_of_the_row_built_by_hand(model, credit):
    config = ht.settings(algorithm__credit=credit, episode__max_new_tokens=16)
    merged, engines = play("auto")
    stepwise, _ = play("stepwise")
    hand = [by_hand(t, e) for t, e in zip(merged, engines, strict=True)]
    assert [len(t.samples) for t in merged] == [1] * EPISODES
    assert [len(t.samples) for t in stepwise] == [TURNS] * EPISODES
    for mine, wanted in zip(merged, hand, strict=True):
        assert mine.samples[0].table == wanted.samples[0].table
    prepared = {
        name: prepare([g], config)[0][0] for name, g in [("hand", hand), ("merged", merged), ("step", stepwise)]
    }
    assert len(prepared["step"]) == TURNS * EPISODES
    want_losses, want = ht.reference_step(model, prepared["hand"], config, torch.float64)
    assert want_losses["grad_norm"] > 0.01
    for name in ("merged", "step"):
        losses, got = ht.reference_step(model, prepared[name], config, torch.float64)
        assert losses == pytest.approx(
            want_losses, rel=1e-7
        )  # transformers keeps norms in float32 whatever the model's dtype
        assert ht.worst_error(got, want)[0] < 1e-6
        learner = TorchLearner.load(config, model)
        result, got = ht.gradients_of_step(learner, pack(prepared[name], 400))
        assert result.metrics["loss/policy"] == pytest.approx(want_losses["loss/policy"], rel=1e-4)
        error, tensor = ht.worst_error(got, want)
        assert error < 1e-5, tensor


EPISODE_LEVEL = {
    "gspo": {"policy_loss": "gspo", "gspo": {"clip_low": 0.004, "clip_high": 0.004}, "reduction": "sequence_mean"},
    "masks": {
        "correction": {"geometric_high": 1.02, "product_low": 0.4, "max_token_kl": 0.5},
        "reduction": "sequence_mean_token_sum_norm",
    },
}
"""Settings whose loss at a token depends on its whole episode."""


def sampled_near(trajectories: list[Trajectory], values: np.ndarray) -> list[Trajectory]:
    """With rollout log-probs `values` float32, of all sampled tokens in order: the same whatever the rows."""
    start = 0
    for trajectory in trajectories:
        for sample in trajectory.samples:
            mask = sample.table["loss_mask"]
            column = sample.table["rollout_logprobs"].copy()
            column[mask] = values[start : start + mask.sum()]
            start += int(mask.sum())
            sample.table = sample.table.with_columns(rollout_logprobs=column)
    assert start == len(values)
    return trajectories


def gradients_of_torch(path: str, settings: Config, micro_batches: list[MicroBatch]) -> dict[str, Any]:
    """As `gradients_of_rank`, of the other backend."""
    rank = dist.get_rank() if settings.learner.parallel.dp > 1 else 0
    learner = TorchLearner.load(settings, Path(path))
    mine = of_rank(micro_batches, rank, settings.learner.parallel.dp)
    result, found = ht.gradients_of_step(learner, mine)
    return {"gradients": {n: g.numpy() for n, g in found.items()}, "result": result}


@pytest.mark.parametrize("level", EPISODE_LEVEL)
@pytest.mark.parametrize("backend", ["torch", "megatron"])
def test_a_model_has_one_gradient_however_the_rows_are_scattered(model, two_ranks, backend, level):
    """Of merged rows in one micro-batch; of step-wise rows in many; and of those on two ranks."""
    gradients = {"torch": gradients_of_torch, "megatron": gradients_of_rank}[backend]
    plain = to_dict(ht.settings(episode__max_new_tokens=16))
    plain["algorithm"] |= EPISODE_LEVEL[level]
    plain["learner"]["backend"] = backend
    config = config_from_dict(plain)
    learner = TorchLearner.load(ht.settings(), model)
    rows, _ = play("auto")
    (together,) = pack([s for t in rows for s in t.samples], 2000)
    known = learner.logprobs([together])[0][together.table["loss_mask"]]
    values = (known + np.random.default_rng(0).normal(0, 0.15, len(known))).astype(np.float32)
    merged, stepwise = (prepare([sampled_near(play(m)[0], values)], config)[0][0] for m in ("auto", "stepwise"))

    want = gradients(str(model), config, pack(merged, 2000))
    scattered = pack(stepwise, max(len(s.table) for s in stepwise))
    assert len(scattered) > 2
    assert 0 < sum(want["result"].metrics[f"rollout_corr/{n}_fraction"] for n in ("clipped", "masked")) < 1
    plain["learner"]["parallel"] |= {"dp": 2}
    one = gradients(str(model), config, scattered)
    two = two_ranks.call(gradients, str(model), config_from_dict(plain), scattered)[0]
    figures = [n for n in want["result"].metrics if n.startswith(("loss/", "rollout_corr/", "rollout_kl/"))]
    assert want["result"].metrics["batch/split_episodes"] == 0
    for got in (one, two):
        assert got["result"].metrics["batch/split_episodes"] == EPISODES
        assert {n: got["result"].metrics[n] for n in figures} == pytest.approx(
            {n: want["result"].metrics[n] for n in figures}, rel=1e-4, abs=1e-6
        )
        norm = np.sqrt(sum(float(np.square(g).sum()) for g in want["gradients"].values()))
        for name, exact in want["gradients"].items():
            assert np.linalg.norm(got["gradients"][name] - exact) <= 1e-5 * max(np.linalg.norm(exact), 0.1 * norm), name
