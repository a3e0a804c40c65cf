"""An episode is trained alike as one row and as many: the same gradient for every loss, reduction, correction and credit."""

import itertools
import sys
import threading
import types
import typing
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from r3async.config import (
    BUILTIN_ADVANTAGES,
    BUILTIN_POLICY_LOSSES,
    AlgorithmConfig,
    Config,
    CorrectionConfig,
    RowsMode,
    config_from_dict,
)
from r3async.data.tokens import Trajectory
from r3async.data.versions import VersionSpan
from r3async.learner import LearnerError
from r3async.learner.loss_sums import LossSums
from r3async.learner.micro_batches import MicroBatch, pack_for_ranks, pack_samples
from r3async.learner.minibatch import build_minibatch
from r3async.learner.policy_loss import LossInputs, PolicyLoss
from r3async.learner.prepare import prepare_minibatches
from r3async.learner.rank_group import RankGroup
from r3async.learner.token_choice import TOKEN_CHOICES
from r3async.rollout.engine import Generation
from r3async.rollout.samples import EpisodeSamples
from tests.helpers.algorithms import distance

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

        def one(call: Any) -> Any:
            try:
                return call()
            except BaseException:
                self._barrier.abort()
                raise

        with ThreadPoolExecutor(len(calls)) as threads:
            made = [threads.submit(one, call) for call in calls]
        for each in sorted(made, key=lambda m: isinstance(m.exception(), threading.BrokenBarrierError)):
            each.result()
        return [each.result() for each in made]


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


def built(micro_batches: list[MicroBatch], config: Config, **options: Any) -> Any:
    return build_minibatch(micro_batches, config, needs_routes=False, version=VERSION, rollout_kl_coef=0.1, **options)


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
            minibatch = built(mine, config, ranks=together.of(rank))
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
            metrics, spread = LossSums.compute_metrics(sums), int(minibatch.split_episodes.sum())
            return *(x.numpy() for x in grads), total, metrics, spread

        results = together.run([lambda r=r, m=m: one(r, m) for r, m in enumerate(packed)])
        by_logprob, by_entropy, losses, metrics, spread = zip(*results, strict=True)
        assert all(m == metrics[0] for m in metrics), "every rank has the same figures"
        outcome.by_logprob.append(np.sum(by_logprob, axis=0))
        outcome.by_entropy.append(np.sum(by_entropy, axis=0))
        outcome.losses.append(sum(losses))
        outcome.metrics.append(metrics[0])
        outcome.spread.append(spread[0])
    return outcome


Groups = list[list[list[Said]]]


def choices(name: str) -> list[str]:
    """The values that `algorithm.NAME` may have, from the configuration itself."""
    if name == "advantage":
        return list(BUILTIN_ADVANTAGES)
    return list(typing.get_args(typing.get_type_hints(AlgorithmConfig)[name]))


BITES = {"low": 0.9, "high": 1.1}
"""Bounds at which a correction leaves out some of the made-up episodes; others leave out what is above 0.05."""
WEIGHTS = ("numerator", "weight", "weight_cap")
"""Of `algorithm.correction`: no bounds."""
CORRECTIONS: list[dict[str, float]] = [
    {},
    *(
        {name: BITES.get(name.rsplit("_", 1)[-1], 0.05)}
        for name in CorrectionConfig.__struct_fields__
        if name not in WEIGHTS
    ),
    {"max_token_age": 2},  # of the schedule
]
OWN = "losses_of_this_test:sequence_ratio"


@pytest.fixture(autouse=True)
def losses(monkeypatch: pytest.MonkeyPatch) -> None:
    """A loss of one's own, whose gradient by a token's log-prob reaches it through all tokens of the episode."""

    def sequence_ratio(inputs: LossInputs) -> PolicyLoss:
        ratio = inputs.episode_mean(inputs.ratio()) + 0.1 * inputs.episode_sum(inputs.advantages.square())
        return PolicyLoss(-ratio * inputs.advantages, torch.zeros_like(inputs.mask))

    made = types.ModuleType("losses_of_this_test")
    made.sequence_ratio = sequence_ratio  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "losses_of_this_test", made)


def configured(correction: dict[str, float] | None = None, minibatches: int = 1, **algorithm: object) -> Config:
    correction = dict(correction or {})
    schedule = {"minibatches_per_step": minibatches, "max_token_age": correction.pop("max_token_age", None)}
    terms = {
        "entropy_coef": 0.1,
        "reference_kl": {"coef": 0.2},
        "gspo": {"clip_low": 0.1, "clip_high": 0.1},
        "cppo": {"threshold": 0.05, "weight_min": 0.5, "budget": 0.01},
        "clip_cov": {"share": 0.2, "low": 0.0},
        "kl_cov": {"share": 0.2},
        "m2po": {"limit": 0.01},
    }
    return config_from_dict(
        {
            "schedule": {k: v for k, v in schedule.items() if v is not None},
            "algorithm": terms | {"correction": correction} | algorithm,
            "routing": {"replay": "off"},
        }
    )


said = st.builds(
    Said,
    before=st.integers(1, 3),
    tokens=st.integers(1, 5),
    version=st.integers(0, 5),
    reward=st.integers(0, 3).map(float),
    kind=st.sampled_from(["on", "on", "forgets", "aside"]),
)
episodes = st.lists(st.lists(st.lists(said, min_size=1, max_size=4), min_size=1, max_size=3), min_size=1, max_size=3)


def same(got: Outcome, want: Outcome) -> None:
    assert len(got.by_logprob) == len(want.by_logprob)
    assert distance(got.by_logprob, want.by_logprob) < 1e-9
    assert distance(got.by_entropy, want.by_entropy) < 1e-9
    assert got.losses == pytest.approx(want.losses, rel=1e-9, abs=1e-12)
    for mine, other in zip(got.metrics, want.metrics, strict=True):
        assert mine == pytest.approx(other, rel=1e-9, abs=1e-9)


def check(groups: Groups, leaves: Leaves, config: Config, ranks: int, cap: int) -> Outcome:
    """Rows as they come and a row a turn, scattered over micro-batches and ranks, against rows that are all together."""
    want = trained(played(groups, leaves, "auto"), leaves, config)
    got = trained(played(groups, leaves, "stepwise"), leaves, config, ranks=ranks, cap=cap)
    same(got, want)
    same(trained(played(groups, leaves, "auto"), leaves, config, ranks=ranks, cap=cap), want)
    return got


def longest(groups: Groups) -> int:
    return max(sum(t.before + t.tokens for t in episode) for group in groups for episode in group)


@pytest.mark.long
@pytest.mark.parametrize("loss", [*BUILTIN_POLICY_LOSSES, OWN])
@settings(max_examples=6)
@given(data=st.data(), groups=episodes)
def test_merged_and_stepwise_rows_have_one_gradient(loss, data, groups):
    """Any episodes, with any settings, in any number of minibatches, on any number of ranks, in micro-batches of any size."""
    names = ("reduction", "advantage", "credit", "anchor")
    drawn = {name: data.draw(st.sampled_from(choices(name)), label=name) for name in names}
    correction = data.draw(st.sampled_from(CORRECTIONS), label="correction")
    minibatches, ranks = (data.draw(st.integers(1, n), label=label) for n, label in ((2, "minibatches"), (3, "ranks")))
    cap = longest(groups) + data.draw(st.integers(0, 10), label="spare")
    leaves = leaves_of(groups, data.draw(st.integers(0, 99), label="seed"))
    check(groups, leaves, configured(correction, minibatches, policy_loss=loss, **drawn), ranks, cap)


@pytest.mark.long
@pytest.mark.parametrize("loss", [*BUILTIN_POLICY_LOSSES, OWN])
def test_each_loss_with_each_reduction_and_each_correction_has_one_gradient(loss):
    """Each two of the three together, with two minibatches, of episodes whose rows are in several micro-batches on two ranks."""
    groups = [[turns[1:5] for turns in group[:2]] for group in LONG[:2]]  # of every kind, and some too old
    leaves = leaves_of(groups, 1)
    merged, stepwise = (played(groups, leaves, mode) for mode in ("auto", "stepwise"))
    losses, reductions = [*BUILTIN_POLICY_LOSSES, OWN], choices("reduction")
    assert len(reductions) <= min(len(losses), len(CORRECTIONS)), "so that each of them meets all the others"
    first = losses.index(loss)
    for i, correction in enumerate(CORRECTIONS):
        config = configured(correction, 2, policy_loss=loss, reduction=reductions[(first + i) % len(reductions)])
        got = trained(stepwise, leaves, config, ranks=2, cap=longest(groups))
        assert all(got.spread), "episodes are in several micro-batches"
        same(got, trained(merged, leaves, config))


LONG: Groups = [
    [
        [Said(2, 4, v, float(e + (g + i) % 3), "on" if i % 3 else "forgets") for i, v in enumerate((5, 3, 4, 5, 2, 5))]
        for e in range(4)
    ]
    for g in range(3)
]
"""Episodes whose rows cannot be together in a small micro-batch."""


BANDS = {
    "geometric_low": 0.97,
    "geometric_high": 1.03,
    "product_low": 0.5,
    "product_high": 2.0,
    "max_token_kl": 0.1,
    "veto_high": 1.45,
}


@pytest.mark.long
@pytest.mark.parametrize("minibatches", [1, 2])
@pytest.mark.parametrize(
    "changes",
    [
        {"policy_loss": "gspo", "gspo": {"clip_low": 0.005, "clip_high": 0.005}},
        {"policy_loss": "cppo"},
        {"policy_loss": "clip_cov"},
        {"policy_loss": "m2po"},
        {"policy_loss": "sequence_truncated_pg"},
        {"policy_loss": OWN},
        *({"correction": {k: v}} for k, v in BANDS.items()),
    ],
    ids=str,
)
def test_episodes_in_several_micro_batches_and_ranks_are_judged_whole(changes, minibatches):
    leaves = leaves_of(LONG, 1, drift=0.2)
    config = configured(minibatches=minibatches, reduction="sequence_mean", **changes)
    got = check(LONG, leaves, config, ranks=2, cap=longest(LONG))
    assert all(n > 2 for n in got.spread), "episodes are in several micro-batches"
    judged = "masked_sequence_fraction" if "correction" in changes else "clipped_fraction"
    if changes.get("policy_loss") != OWN:
        assert 0 < sum(m[f"rollout_corr/{judged}"] for m in got.metrics) < minibatches, "some, and not all"


def test_prefixes_follow_the_turns_and_not_the_rows():
    """Every other turn is a row of its own, behind the row that goes on after it."""
    kinds = itertools.cycle(("on", "aside"))
    groups = [[[Said(2, 4, 5, float(e), next(kinds)) for _ in range(6)] for e in range(4)]]
    leaves = leaves_of(groups, 1, lost=0.0)
    merged, single = (played(groups, leaves, mode) for mode in ("auto", "stepwise"))
    assert len(merged[0][0].samples) < len(single[0][0].samples)
    for budget in (0.03, 0.06, 0.09, 0.12):
        config = configured(policy_loss="cppo", cppo={"threshold": 0.1, "weight_min": 0.3, "budget": budget})
        want = trained(merged, leaves, config)
        same(trained(single, leaves, config, ranks=2, cap=longest(groups)), want)
        assert 0 < want.metrics[0]["rollout_corr/clipped_fraction"] < 1


@pytest.mark.parametrize("reduction", choices("reduction"))
def test_a_sequence_of_the_reductions_is_an_episode(reduction):
    """Two episodes with rewards that differ, of as many tokens: one of one turn, one of four."""
    groups = [[[Said(1, 8, 5, 0.0)], [Said(1, 2, 5, 0.25, "aside") for _ in range(4)]]]
    leaves = leaves_of(groups, 0, lost=0.0)
    config = configured(policy_loss="truncated_pg", reduction=reduction, rollout_kl={"coef": 0.0}, entropy_coef=1.0)
    got = trained(played(groups, leaves, "stepwise"), leaves, config)
    # The entropy bonus has the gradient of the weights alone.
    first, second = -got.by_entropy[0][1:9], -got.by_entropy[0][9:]
    assert first == pytest.approx(second), "episodes weigh the same"


def test_a_loss_that_is_by_token_needs_no_pass_and_others_do():
    leaves = leaves_of(LONG, 1)
    parts, _ = prepare_minibatches(played(LONG, leaves, "stepwise"), configured())
    micro_batches = [with_logprobs(m, leaves) for m in pack_samples(parts[0], longest(LONG))]
    for loss in [*BUILTIN_POLICY_LOSSES, OWN]:
        config = configured(policy_loss=loss)
        takes_episodes = loss in ("sequence_truncated_pg", "gspo", "cppo", OWN)
        chooses = loss in TOKEN_CHOICES
        assert built(micro_batches, config).needs_global_logprobs == (takes_episodes or chooses)
        assert built(pack_samples(parts[0], 10**6), config).needs_global_logprobs == chooses


def test_rows_that_do_not_say_their_place_are_refused_where_it_matters():
    parts, _ = prepare_minibatches(played(LONG, leaves_of(LONG, 1), "stepwise"), configured())
    bare = [replace(m, table=m.table.without_columns("place")) for m in pack_samples(parts[0], longest(LONG))]
    built(bare, configured())
    with pytest.raises(LearnerError, match=r"'gspo' or a correction takes whole episodes.*column 'place' is missing"):
        built(bare, configured(policy_loss="gspo"))
    with pytest.raises(LearnerError, match=r"'kl_cov'.*chooses tokens of the whole minibatch.*column 'place'"):
        built(bare, configured(policy_loss="kl_cov"))


@pytest.mark.parametrize("advantage", choices("advantage"))
def test_credit_by_token_follows_the_turns_and_not_the_rows(advantage):
    """An aside between two turns of a conversation is a row of its own, behind both of them."""
    rewards = ((1.0, 5.0, 0.0), (0.0, 2.0, 3.0))
    groups = [
        [[Said(1, 3 if i == 1 else 2, 5, r, "aside" if i == 1 else "on") for i, r in enumerate(e)] for e in rewards]
    ]
    leaves = leaves_of(groups, 0, lost=0.0)
    rows, single = (played(groups, leaves, mode) for mode in ("auto", "stepwise"))
    assert [t.samples[0].table["turn"].max() for t in rows[0]] == [2, 2], "it has the first and the last turn"
    config = configured(credit="token", advantage=advantage)
    same(trained(single, leaves, config), trained(rows, leaves, config))


def test_an_episode_that_fits_is_in_one_micro_batch_where_the_loss_takes_it_whole():
    leaves = leaves_of(LONG, 1)
    config = configured(policy_loss="gspo")
    (part,), _ = prepare_minibatches(played(LONG, leaves, "stepwise"), config)
    cap = max(sum(len(s.table) for s in part if s.table["episode"][0] == e) for e in range(12))
    plain = trained(played(LONG, leaves, "stepwise"), leaves, config, ranks=2, cap=cap)
    whole = trained(played(LONG, leaves, "stepwise"), leaves, config, ranks=2, cap=cap, whole_episodes=True)
    assert plain.spread[0] > 0
    assert whole.spread == [0]
    same(whole, plain)
    scarce = pack_samples(part, cap // 2, whole_episodes=True)
    assert max(m.num_tokens for m in scarce) <= cap // 2
    assert sorted(i for m in scarce for i in m.sample_ids) == sorted(s.sample_id for s in part)
