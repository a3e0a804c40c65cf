"""One run of `bench replay-map` in a single process without Ray: the learner's real step on what an engine in this
process sampled.

Everything from a step's groups to the update is the code of a run (`Trainer`, the torch backend). Only the source of
the groups differs: single-turn episodes, which `BatchEngine` plays all at once for a step, all `max_staleness` versions
old.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np
import torch

from dev.bench.replay_engine import PRECISIONS, Answers, BatchEngine, tap
from r3async.actors.ranks import LocalRank
from r3async.config import Config, ConfigError
from r3async.data.tokens import SCHEMA, Sample, TokenTable, Trajectory, Turn, format_trajectory_id
from r3async.envs import Action, Environment
from r3async.envs.factory import build_environment_factory
from r3async.learner import LearnerError
from r3async.learner.batch import build_cost_model, pack_samples
from r3async.learner.torch.backend import TorchLearner
from r3async.learner.trainer import Trainer
from r3async.rollout.chat import ChatRenderer, Conversation
from r3async.tools.replay import NullReporter, NullTracer


class Disturbance(msgspec.Struct, frozen=True):
    """Differences of engine and learner beside their weights.

    Attributes:
        noise: standard deviation of the noise added to the engine's router logits.
        learner_noise: the same for the learner's router logits.
        margin: with replay, a token is not replayed if the learner is surer than this of all its own choices; 0 replays
            all.
    """

    noise: float = 0.0
    learner_noise: float = 0.0
    precision: str = "float32"
    margin: float = 0.0

    def __post_init__(self) -> None:
        if self.precision not in PRECISIONS:
            raise ConfigError(f"precision {self.precision!r} must be one of {', '.join(PRECISIONS)}")


@dataclass
class _Episode:
    env: Environment
    prompt: np.ndarray


def _no_stand_in(trajectory: Trajectory) -> Trajectory:
    raise LearnerError(f"{trajectory.trajectory_id} cannot be trained")


class InProcessRun:
    """A run of `config` from the model in `path`. Its methods block, and are all called from one thread.

    Raises `ConfigError` for settings that need more than it has: backends other than torch, several ranks, multi-turn
    episodes.
    """

    def __init__(self, config: Config, path: Path, disturbance: Disturbance | None = None):
        self.config, self.disturbance = config, disturbance or Disturbance()
        if config.learner.backend != "torch" or config.learner.parallel.world_size > 1 or config.episode.max_turns != 1:
            raise ConfigError("a run in one process needs learner.backend=torch, one rank and episode.max_turns=1")
        torch.set_num_threads(config.learner.threads)
        learner = TorchLearner.from_pretrained(config, path)
        given = self.disturbance
        self._tap = tap(learner.model.routers, given.learner_noise, 2 * config.seed + 1)
        self._engine = BatchEngine(
            learner.model.causal_lm, precision=given.precision, noise=given.noise, seed=2 * config.seed
        )
        cost = build_cost_model(json.loads((path / "config.json").read_text()))
        self.learner = learner
        self._trainer = Trainer(config, cost, LocalRank(config, learner), NullTracer(), NullReporter(), _no_stand_in)
        self._renderer = ChatRenderer.from_model(path)
        self._factory = build_environment_factory(config.env)
        self._tasks = random.Random(f"tasks {config.seed}")
        self._versions: deque[dict[str, torch.Tensor]] = deque(maxlen=config.schedule.max_staleness + 1)
        self.keep()

    def keep(self) -> None:
        """Keep the learner's present weights as the next version."""
        named = self.learner.model.causal_lm.named_parameters()
        self._versions.append({name: p.detach().clone() for name, p in named})

    def steps(self) -> Iterator[dict[str, float]]:
        """Yield the metrics of each step, with `reward/mean`."""
        for step in range(self.config.steps):
            groups = self.play(step)
            done = self._trainer.train_step(step + 1, step, self._trainer.prepare_step(groups))
            self.keep()
            rewards = [t.reward for group in groups for t in group]
            yield done.metrics | {"reward/mean": float(np.mean(rewards))}

    def play(self, step: int) -> list[list[Trajectory]]:
        """Play the groups of step `step`, counted from 0, with the oldest weights that are kept."""
        s = self.config.schedule
        version = max(0, step - s.max_staleness)
        self._engine.load(self._versions[0])
        seeds = [self._tasks.getrandbits(63) for _ in range(s.prompts_per_step)]
        episodes = asyncio.run(self._begin(seeds, s.group_size))
        prompts = [e.prompt for e in episodes]
        if len({len(p) for p in prompts}) != 1:
            raise ConfigError(f"{self.config.env.name} has prompts of several lengths; they are answered all at once")
        settings = self.config.episode
        answers = self._engine.answer(np.stack(prompts), settings.max_new_tokens, self._renderer.stop_token_ids)
        rewards = asyncio.run(self._end(episodes, answers))
        tables = tables_of(np.stack(prompts), answers, version, rewards)
        trajectories = []
        for at, (table, reward) in enumerate(zip(tables, rewards, strict=True)):
            group, index = divmod(at, s.group_size)
            start, stop = len(prompts[at]), len(table)
            reason = "stop" if answers.stopped[at] else "length"
            name = format_trajectory_id(step * s.prompts_per_step + group, index)
            turn = Turn(0, 0, start, stop, reward, reason)
            trajectories.append(
                Trajectory(name, step, index, seeds[group], "bench", reason, [turn], [Sample(name, table)])
            )
        if self.disturbance.margin:
            trajectories = self._near_ties(trajectories)
        each = s.group_size
        return [trajectories[i : i + each] for i in range(0, len(trajectories), each)]

    async def _begin(self, seeds: Sequence[int], each: int) -> list[_Episode]:
        out = []
        for seed in seeds:
            prompt = None
            for _ in range(each):
                env = self._factory()
                messages = await env.reset(seed)
                if prompt is None:  # equal seeds pose equal tasks
                    prompt = np.asarray(Conversation(self._renderer, messages).build_prompt().token_ids, np.int32)
                out.append(_Episode(env, prompt))
        return out

    async def _end(self, episodes: Sequence[_Episode], answers: Answers) -> list[float]:
        rewards = []
        for at, episode in enumerate(episodes):
            stopped = bool(answers.stopped[at])
            text = self._renderer.decode_answer(answers.tokens[at, : answers.lengths[at] - stopped].tolist())
            result = await episode.env.step(Action(text, "stop" if stopped else "length"))
            rewards.append(float(result.reward))
        return rewards

    def _near_ties(self, trajectories: Sequence[Trajectory]) -> list[Trajectory]:
        """Keep the routes of only those tokens for which, in some layer, the learner's own choice is a near tie."""
        samples = [s for t in trajectories for s in t.samples]
        smallest: dict[str, np.ndarray] = {}
        for m in pack_samples(samples, self.config.learner.max_tokens_per_micro_batch):
            self._tap.margins = []
            self.learner.logprobs([m], replay=False, trained_only=True)
            least = torch.stack(self._tap.margins).amin(dim=0).numpy()
            for i, name in enumerate(m.sample_ids):
                smallest[name] = least[m.cu_seqlens[i] : m.cu_seqlens[i + 1]]
        self._tap.margins = None
        out = []
        for t in trajectories:
            (s,) = t.samples
            recorded = s.table["routing_recorded"] & (smallest[s.sample_id] < self.disturbance.margin)
            made = Sample(s.sample_id, s.table.with_columns(routing_recorded=recorded), s.temperature)
            out.append(msgspec.structs.replace(t, samples=[made]))
        return out


def tables_of(prompts: np.ndarray, answers: Answers, version: int, rewards: Sequence[float]) -> list[TokenTable]:
    """Return the tables that `SampleBuilder.build_table` makes of single-turn episodes. `prompts`: int32 `[B, P]`."""
    (rows, start), width = prompts.shape, prompts.shape[1] + answers.tokens.shape[1]
    whole = {n: c.filled_rows(rows * width).reshape(rows, width) for n, c in SCHEMA.columns.items() if not c.optional}
    whole["token_ids"] = np.concatenate([prompts, answers.tokens], axis=1)
    whole["loss_mask"][:, start:] = True
    whole["turn"][:, start:] = 0
    whole["rollout_logprobs"][:, start:] = answers.logprobs
    whole["policy_version"][:, start:] = version
    layers, top_k = answers.routes.shape[2:]
    routes = SCHEMA.columns["routed_experts"].filled_rows(rows * width, (layers, top_k), answers.routes.dtype)
    routes = routes.reshape(rows, width, layers, top_k)
    routes[:, :-1] = answers.routes
    whole |= {"routed_experts": routes, "routing_recorded": np.ones((rows, width), bool)}
    ends = start + answers.lengths
    whole["rewards"][np.arange(rows), ends - 1] = rewards
    # The last sampled token has not been fed, so it has no route.
    whole["routing_recorded"][np.arange(rows), ends - 1] = False
    routes[np.arange(rows), ends - 1] = np.arange(top_k)
    return [
        TokenTable({name: column[row, :end] for name, column in whole.items()}) for row, end in enumerate(ends.tolist())
    ]
