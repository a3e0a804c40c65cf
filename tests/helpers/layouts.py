"""Made-up episodes as different rows of training, and the gradient of their step by each sampled token's log-prob."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np
import torch

from r3async.config import Config, RowsMode
from r3async.data.tokens import Trajectory
from r3async.data.versions import VersionSpan
from r3async.learner.backend import RankGroup
from r3async.learner.batch import MicroBatch, pack_for_ranks
from r3async.learner.metrics import LossSums
from r3async.learner.trainer import build_minibatch, prepare_minibatches
from r3async.rollout.engine import Generation
from r3async.rollout.samples import EpisodeSamples

VERSION = 5
"""Version of the learner; tokens are of versions 0..5."""


@dataclass(frozen=True)
class Said:
    """One turn.

    Attributes:
        before: number of tokens that the environment wrote.
        tokens: number of tokens that were sampled.
        version: version that sampled them.
        kind: `on` continues the conversation; `forgets` cuts its history in half first, so that its prompt extends no
            row; `aside` is a separate call, which the conversation does not see.
    """

    before: int
    tokens: int
    version: int
    reward: float
    kind: Literal["on", "forgets", "aside"] = "on"


@dataclass
class Leaves:
    """The values of each sampled token, by its id, float64 `[n]`. Ids count from 1, in the order in which tokens are
    made."""

    seed: int
    size: int
    drift: float = 0.3
    lost: float = 0.05
    """Share of tokens whose rollout log-prob is not finite."""
    logprobs: np.ndarray = field(init=False)
    rollout: np.ndarray = field(init=False)
    old: np.ndarray = field(init=False)
    reference: np.ndarray = field(init=False)

    def __post_init__(self) -> None:
        rng = np.random.default_rng(self.seed)
        self.logprobs = -rng.exponential(1.0, self.size) - 0.01
        # Most episodes hardly drift, and some do, so that bands on whole episodes keep some and leave out others.
        near = [
            np.minimum(self.logprobs + rng.normal(0, s, self.size), -1e-3) for s in (self.drift, self.drift / 2, 0.6)
        ]
        self.rollout, self.old, self.reference = (x.astype(np.float32) for x in near)
        self.rollout[rng.random(self.size) < self.lost] = np.nan


def leaves_of(groups: Sequence[Sequence[Sequence[Said]]], seed: int, **options: float) -> Leaves:
    return Leaves(seed, 1 + sum(turn.tokens for group in groups for episode in group for turn in episode), **options)


def played(groups: Sequence[Sequence[Sequence[Said]]], leaves: Leaves, mode: RowsMode) -> list[list[Trajectory]]:
    """Return the episodes as rows of `mode`, built by the code that builds rows of real ones."""
    first, written = 1, 10**6  # ids of what is sampled, and of what the environment writes
    out = []
    for g, group in enumerate(groups):
        out.append([])
        for e, turns in enumerate(group):
            rows, history = EpisodeSamples(None, mode), []
            for turn in turns:
                kept = {"on": history, "forgets": history[len(history) // 2 :], "aside": []}[turn.kind]
                prompt = [*kept, *range(written, written + turn.before)]
                written += turn.before
                ids = np.arange(first, first + turn.tokens)
                first += turn.tokens
                spans = [VersionSpan(turn.version, 0, turn.tokens)]
                answer = Generation(ids.astype(np.int32), leaves.rollout[ids], spans, None, 0, "stop")
                rows.add_reward(rows.finish_call(rows.start_call(prompt), answer), turn.reward)
                if turn.kind != "aside":
                    history = [*prompt, *ids.tolist()]
            name = f"g{g:08d}e{e:04d}"
            samples, described = rows.build_samples(name, 1.0)
            out[-1].append(Trajectory(name, g, e, 0, "", "env_done", described, samples))
    return out


class Together:
    """The collectives of ranks that are threads of this process."""

    def __init__(self, ranks: int):
        self._barrier, self._given = threading.Barrier(ranks, timeout=60), [np.zeros(0)] * ranks

    def of(self, rank: int) -> RankGroup:
        return OneOfThem(rank, len(self._given), torch.device("cpu"), self)

    def reduce(self, rank: int, values: np.ndarray, how: str) -> np.ndarray:
        self._given[rank] = values
        self._barrier.wait()
        total = np.sum(self._given, axis=0) if how == "sum" else np.max(self._given, axis=0)
        self._barrier.wait()
        return total

    def run(self, calls: Sequence[Any]) -> list[Any]:
        """Run each call in a thread, and raise the first of their errors."""
        results: list[Any] = [None] * len(calls)

        def one(index: int) -> None:
            try:
                results[index] = calls[index]()
            except BaseException as error:
                results[index] = error
                self._barrier.abort()

        threads = [threading.Thread(target=one, args=(i,)) for i in range(len(calls))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(timeout=120)
        for result in sorted(results, key=lambda r: isinstance(r, threading.BrokenBarrierError)):
            if isinstance(result, BaseException):
                raise result
        return results


@dataclass(frozen=True)
class OneOfThem(RankGroup):
    """One of the ranks that are threads."""

    together: Together

    def all_reduce(self, values: np.ndarray, how: str) -> np.ndarray:
        return self.together.reduce(self.rank, values, how)


def with_logprobs(micro_batch: MicroBatch, leaves: Leaves) -> MicroBatch:
    """Return the micro-batch with the columns that a learner adds before the first update."""
    ids = np.where(micro_batch.table["loss_mask"], micro_batch.table["token_ids"], 0)
    columns = {"old_logprobs": leaves.old[ids], "reference_logprobs": leaves.reference[ids]}
    return replace(micro_batch, table=micro_batch.table.with_columns(**columns))


@dataclass
class Outcome:
    """Results by minibatch: gradients by the tokens' log-probs and entropies, float64 `[n]`, the sum of the
    micro-batches' losses, metrics, and the number of episodes that were in several micro-batches."""

    by_logprob: list[np.ndarray]
    by_entropy: list[np.ndarray]
    losses: list[float]
    metrics: list[dict[str, float]]
    spread: list[int]


def trained(
    groups: Sequence[Sequence[Trajectory]],
    leaves: Leaves,
    config: Config,
    *,
    ranks: int = 1,
    cap: int = 10**6,
    whole_episodes: bool = False,
) -> Outcome:
    """Prepare the groups, pack them under `cap` tokens and train them on `ranks` ranks, as the learner does, all in
    float64."""
    outcome = Outcome([], [], [], [], [])
    for part in prepare_minibatches(groups, config)[0]:
        packed = [
            [with_logprobs(m, leaves) for m in mine]
            for mine in pack_for_ranks(part, cap, ranks=ranks, whole_episodes=whole_episodes)
        ]
        together = Together(ranks)

        def one(rank: int, mine: list[MicroBatch], together: Together = together) -> tuple[Any, ...]:
            minibatch = build_minibatch(
                mine, config, needs_routes=False, version=VERSION, rollout_kl_coef=0.1, ranks=together.of(rank)
            )
            if minibatch.needs_global_logprobs:
                minibatch.set_global_logprobs(
                    [leaves.logprobs[np.where(m.table["loss_mask"], m.table["token_ids"], 0)] for m in mine]
                )
            logprobs = torch.from_numpy(leaves.logprobs.copy()).requires_grad_()
            entropies = torch.full_like(logprobs, 0.7).requires_grad_()
            total = 0.0
            for index, m in enumerate(minibatch.micro_batches):
                ids = torch.from_numpy(m.table["token_ids"][minibatch.trained_rows[index]].astype(np.int64))
                loss = minibatch.compute_micro_batch_loss(index, logprobs[ids], entropies[ids])
                loss.backward()
                total += loss.item()
            sums = minibatch.reduce_loss_sums()
            grads = [torch.zeros_like(x) if x.grad is None else x.grad for x in (logprobs, entropies)]
            return (
                *(x.numpy() for x in grads),
                total,
                LossSums.compute_metrics(sums),
                int(minibatch.split_episodes.sum()),
            )

        results = together.run([lambda r=r, m=m: one(r, m) for r, m in enumerate(packed)])
        by_logprob, by_entropy, losses, metrics, spread = zip(*results, strict=True)
        assert all(m == metrics[0] for m in metrics), "every rank has the same figures"
        outcome.by_logprob.append(np.sum(by_logprob, axis=0))
        outcome.by_entropy.append(np.sum(by_entropy, axis=0))
        outcome.losses.append(sum(losses))
        outcome.metrics.append(metrics[0])
        outcome.spread.append(spread[0])
    return outcome
