"""Steps of real learners that make no update: a poisoned batch, zero variance and numbers that are not finite change nothing, on
any rank, and the run's events say why.
"""

import asyncio
import contextlib
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from r3async.actors.learner import LearnerActor, TrainStepResult
from r3async.actors.rank_actor import LocalRank
from r3async.actors.run_setup import RunSetup
from r3async.config import AlgorithmConfig, Config, ConfigError, config_from_dict, config_to_dict
from r3async.data.tokens import Sample, Trajectory, Turn
from r3async.learner import build_learner
from r3async.learner.advantages import assign_advantages, has_variance
from r3async.learner.metrics import combine_results
from r3async.learner.micro_batches import MicroBatch, pack_for_ranks, pack_samples
from r3async.learner.prepare import prepare_minibatches
from r3async.record.reading import read_json_objects
from r3async.world.real import REAL_WORLD
from tests.helpers import models as hm
from tests.helpers.learner import replace_columns
from tests.helpers.learner import settings as learner_settings
from tests.helpers.parity import of_rank
from tests.helpers.steps import train_minibatch
from tests.unit.test_buffer import make_trajectory

LENGTHS = [9, 40, 5, 17, 33, 6, 21]
BUDGET = 48
LIMIT = 0.5
BACKENDS = ["megatron", "torch"]


def settings(backend: str = "megatron", **changes: Any) -> Config:
    """`changes` are of `algorithm.rollout_kl`, but for `dp`."""
    return learner_settings(
        learner__backend=backend,
        learner__parallel={"dp": changes.pop("dp", 1)},
        algorithm__rollout_kl={"coef": 0.1, "max": LIMIT} | changes,
        schedule__group_size=len(LENGTHS),
        schedule__prompts_per_step=1,
    )


@pytest.fixture(scope="module")
def batches(model_path):
    """Two batches whose rollout log-probs are the model's own, a little off."""
    learner = build_learner(settings(), model_path)
    rng = np.random.default_rng(0)
    made = []
    for seed in (1, 2):
        samples = []
        for sample in hm.make_samples(seed, LENGTHS):
            (own,) = learner.logprobs(pack_samples([sample], BUDGET))
            off = own + 0.05 * rng.standard_normal(len(own)).astype(np.float32)
            rollout = np.where(sample.table["loss_mask"], off, 0).astype(np.float32)
            samples.append(replace_columns(sample, rollout_logprobs=rollout))
        made.append(samples)
    return made


def with_logprobs(sample: Sample, change: Any) -> Sample:
    """`change(log-probs of the sampled tokens)` takes their place."""
    logprobs = sample.table["rollout_logprobs"].copy()
    mask = sample.table["loss_mask"]
    logprobs[mask] = change(logprobs[mask])
    return replace_columns(sample, rollout_logprobs=logprobs)


def first(values: np.ndarray, value: float) -> np.ndarray:
    return np.where(np.arange(len(values)) == 0, np.float32(value), values)


def shifted(samples: list[Sample]) -> list[Sample]:
    return [with_logprobs(s, lambda x: x + 3) for s in samples]


def half_shifted_half_lost(samples: list[Sample]) -> list[Sample]:
    """A third of the samples +3, a third NaN, a third infinite."""
    changes = [lambda x: x + 3, lambda x: x * np.nan, lambda x: x * -np.inf]
    return [with_logprobs(s, changes[i % 3]) for i, s in enumerate(samples)]


def one_far_token(samples: list[Sample]) -> list[Sample]:
    """One token of all that the learner finds very much more probable than the rollout policy did."""
    return [with_logprobs(samples[0], lambda x: first(x, -40)), *samples[1:]]


def one_absurd_token(samples: list[Sample]) -> list[Sample]:
    """Finite, but its drift is not."""
    return [with_logprobs(samples[0], lambda x: first(x, -3e38)), *samples[1:]]


POISONS = [shifted, half_shifted_half_lost, one_far_token, one_absurd_token]


def optimizer_state(learner: Any) -> list[torch.Tensor]:
    """This rank's master weights, moments and step counts."""
    return [tensor.clone() for state in learner.optimizer.iter_states() for tensor in state.values()]


def same(ours: list[torch.Tensor], theirs: list[torch.Tensor]) -> bool:
    """Bit for bit."""
    return len(ours) == len(theirs) > 0 and all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


def poisoned_run(learner: Any, good: list[MicroBatch], poison: list[MicroBatch] | None, then: list[MicroBatch]) -> dict:
    """Train three batches, or two without `poison`."""
    out: dict[str, Any] = {"state": [], "versions": []}
    for name, batch in (("good", good), ("broken", poison), ("then", then)):
        if batch is not None:
            out[name] = train_minibatch(learner, batch).metrics
            out["state"].append(optimizer_state(learner))
            out["versions"].append(learner.update_count)
    return out


@pytest.fixture(scope="module", params=BACKENDS)
def clean_run(request, model_path, batches):
    """Train both batches; yield the backend and the metrics of each."""
    good, then = (pack_samples(samples, BUDGET) for samples in batches)
    return request.param, poisoned_run(build_learner(settings(request.param), model_path), good, None, then)


def assert_poison_left_nothing(run: dict, clean: dict) -> None:
    """Of two runs of `poisoned_run`, the second without the poison."""
    for metrics in (run["good"], run["then"]):
        assert metrics["rollout_kl/k3"] < LIMIT
        assert metrics["optimizer/skipped"] == metrics["optimizer/broken"] == 0
    assert not run["broken"]["rollout_kl/k3"] <= LIMIT
    assert run["broken"]["optimizer/skipped"] == run["broken"]["optimizer/broken"] == 1
    assert run["versions"] == [1, 1, 2]
    assert same(run["state"][0], run["state"][1])
    assert same(run["state"][2], clean["state"][1])
    assert not same(run["state"][2], run["state"][0])
    assert run["then"] == clean["then"]


@pytest.mark.long
@pytest.mark.parametrize("poison", POISONS)
def test_a_poisoned_batch_is_as_if_it_had_never_come(model_path, batches, clean_run, poison):
    backend, clean = clean_run
    good, then = (pack_samples(samples, BUDGET) for samples in batches)
    bad = pack_samples(poison(batches[1]), BUDGET)
    run = poisoned_run(build_learner(settings(backend), model_path), good, bad, then)
    assert_poison_left_nothing(run, clean)


@pytest.mark.parametrize("backend", BACKENDS)
def test_without_max_the_same_batch_is_trained(model_path, batches, backend):
    learner = build_learner(settings(backend, max=None), model_path)
    metrics = train_minibatch(learner, pack_samples(shifted(batches[0]), BUDGET)).metrics
    assert metrics["rollout_kl/k3"] > LIMIT
    assert metrics["optimizer/skipped"] == metrics["optimizer/broken"] == 0
    assert learner.update_count == 1


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("lost", [math.nan, math.inf, -math.inf])
def test_logprobs_that_are_not_finite_are_dropped_and_do_not_break_a_step(model_path, batches, backend, lost):
    masked = [
        replace_columns(s, loss_mask=s.table["loss_mask"] & (np.arange(len(s.table)) > 6)) if i < 2 else s
        for i, s in enumerate(batches[0])
    ]
    poisoned = [
        with_logprobs(s, lambda x: np.where(np.arange(3, 3 + len(x)) > 6, x, np.float32(lost))) if i < 2 else s
        for i, s in enumerate(batches[0])
    ]
    ours, theirs = (build_learner(settings(backend), model_path) for _ in range(2))
    got, want = (
        train_minibatch(learner, pack_samples(samples, BUDGET)).metrics
        for learner, samples in ((ours, poisoned), (theirs, masked))
    )
    assert got.pop("tokens/dropped_non_finite") == 8
    assert want.pop("tokens/dropped_non_finite") == 0
    assert got == want
    assert got["optimizer/skipped"] == 0
    assert same(optimizer_state(ours), optimizer_state(theirs))

    before = optimizer_state(ours)
    nothing = train_minibatch(
        ours, pack_samples([with_logprobs(s, lambda x: x * 0 + lost) for s in batches[1]], BUDGET)
    ).metrics
    assert nothing["optimizer/skipped"] == 1
    assert nothing["optimizer/broken"] == 0
    assert nothing["batch/trained_tokens"] == 0
    assert ours.update_count == 1
    assert same(before, optimizer_state(ours))


def run_on_rank(
    path: Path, config: Config, good: list[MicroBatch], poison: list[MicroBatch] | None, then: list[MicroBatch]
) -> dict:
    import torch.distributed as dist

    rank = dist.get_rank()
    mine = None if poison is None else of_rank(poison, rank, 2)
    with contextlib.closing(build_learner(config, path)) as learner:
        return poisoned_run(learner, of_rank(good, rank, 2), mine, of_rank(then, rank, 2))


@pytest.mark.parametrize("backend", BACKENDS)
def test_all_ranks_decide_alike_if_one_of_them_has_the_poison(two_ranks, model_path, batches, backend):
    good, then = (pack_samples(samples, BUDGET) for samples in batches)
    bad = pack_samples(shifted(batches[1]), BUDGET)
    mixed = [b if i % 2 else t for i, (b, t) in enumerate(zip(bad, then, strict=True))]  # rank 1 gets the odd ones
    config = settings(backend, dp=2)
    run = two_ranks.call(run_on_rank, model_path, config, good, mixed, then)
    clean = two_ranks.call(run_on_rank, model_path, config, good, None, then)
    for ours, theirs in zip(run, clean, strict=True):
        assert ours["broken"] == run[0]["broken"]
        assert_poison_left_nothing(ours, theirs)


def trajectories(group: int, samples: list[Sample]) -> list[Trajectory]:
    """A group: each sample an episode of one turn."""
    made = []
    for episode, sample in enumerate(samples):
        name, length = f"g{group}e{episode}", len(sample.table)
        table = sample.table.without_columns("advantages")
        turn = Turn(0, 0, 3, length, float(episode % 2), "stop")
        made.append(Trajectory(name, group, episode, 0, "gen", "env_done", [turn], [Sample(f"{name}s0", table)]))
    return made


def test_the_actor_trains_around_a_poisoned_group_and_its_events_say_why(model_path, batches, tmp_path, monkeypatch):
    monkeypatch.setattr("r3async.actors.learner.prepare_process", lambda *args: None)  # or the suite would write there
    plain = config_to_dict(settings())
    plain["schedule"]["max_staleness"] = len(batches)  # all that is given was sampled by version 0
    actor = LearnerActor(REAL_WORLD, RunSetup("run", plain, str(tmp_path)), str(model_path))
    given = [batches[0], shifted(batches[1]), batches[1]]

    async def run() -> list[tuple[TrainStepResult, int]]:
        await actor.start()
        await actor.start_listening(None, "shared_memory")
        try:
            steps = []
            for index, samples in enumerate(given):
                for trajectory in trajectories(index, samples):
                    actor.components.inbox.buffer.add(trajectory, 100)
                step = await asyncio.wait_for(actor.run_step(), 120)
                assert step is not None
                await asyncio.wait_for(actor.write_version(), 60)  # as the conductor asks for, beside the next step
                assert isinstance(actor.model.ranks, LocalRank)
                steps.append((step, actor.model.ranks.backend.update_count))
            return steps
        finally:
            await actor.stop()

    steps = asyncio.run(run())
    assert [step.metrics["optimizer/broken"] for step, _ in steps] == [0, 1, 0]
    assert [updates for _, updates in steps] == [1, 1, 2]
    # A step without an update is published, and frees its slots.
    assert [step.version for step, _ in steps] == [1, 2, 3]
    broken, skipped = (
        [e for e in read_json_objects(tmp_path / "events.jsonl") if e["event"] == name]
        for name in ("trust_region_broke", "step_skipped")
    )
    assert [e["step"] for e in broken] == [e["step"] for e in skipped] == [2]
    assert broken[0]["level"] == "error"
    assert broken[0]["measured"] == pytest.approx(steps[1][0].metrics["rollout_kl/served_k3"])
    assert broken[0]["measured"] > broken[0]["allowed"] == LIMIT
    assert "algorithm.rollout_kl.max" in broken[0]["hint"]


def with_every_term(backend: str, **changes: Any) -> Config:
    """Every other term of the loss is on. `changes`: of `algorithm`, but for `dp`."""
    algorithm = {
        "rollout_kl": {"coef": 0.01, "target": 0.01},
        "reference_kl": {"coef": 0.1},
        "entropy_coef": 0.01,
        "router_aux": {"coef": 0.01},
    }
    return learner_settings(
        learner__backend=backend,
        learner__weight_decay=0.1,
        learner__parallel={"dp": changes.pop("dp", 1)},
        **{f"algorithm__{name}": value for name, value in (algorithm | changes).items()},
    )


def with_reference(sample: Sample) -> Sample:
    """As the step before would have measured it."""
    return replace_columns(sample, reference_logprobs=sample.table["rollout_logprobs"])


def contrast() -> list[Sample]:
    return [with_reference(s) for s in hm.make_samples(1, LENGTHS)]


def flat(seed: int = 2) -> list[Sample]:
    """Every advantage is 0."""
    return [
        replace_columns(with_reference(s), advantages=np.zeros(len(s.table), np.float32))
        for s in hm.make_samples(seed, LENGTHS)
    ]


def state_of(learner: Any) -> tuple[Any, ...]:
    return (
        optimizer_state(learner),
        learner.optimizer.update_count,
        learner.optimizer.lr,
        learner.trust_region.state_dict(),
    )


def unchanged(before: tuple[Any, ...], after: tuple[Any, ...]) -> bool:
    return same(before[0], after[0]) and before[1:] == after[1:]


@pytest.mark.parametrize("backend", BACKENDS)
def test_steps_with_zero_variance_leave_weights_moments_and_trust_region_bit_for_bit(model_path, backend):
    learner = build_learner(with_every_term(backend), model_path)
    loaded = {name: tensor.clone() for name, tensor in learner.export_weights().items()}
    train_minibatch(learner, pack_samples(flat(), BUDGET))
    assert all((loaded[name] == tensor).all() for name, tensor in learner.export_weights().items())
    assert not any("exp_avg" in state for state in learner.optimizer.iter_states()), (
        "the first update makes the moments"
    )

    train_minibatch(learner, pack_samples(contrast(), BUDGET))
    before = state_of(learner)
    for seed in range(4):
        metrics = train_minibatch(learner, pack_samples(flat(seed), BUDGET)).metrics
        assert (metrics["optimizer/updates"], metrics["optimizer/skipped"]) == (0, 1)
        assert (metrics["optimizer/zero_variance"], metrics["optimizer/broken"]) == (1, 0)
        assert metrics["rollout_kl/k3"] > 0  # what is measured is measured all the same
    assert unchanged(before, state_of(learner))
    assert learner.update_count == 1
    assert train_minibatch(learner, pack_samples(contrast(), BUDGET)).metrics["optimizer/updates"] == 1
    assert not same(before[0], optimizer_state(learner))
    learner.close()


@pytest.mark.parametrize("backend", BACKENDS)
def test_of_two_minibatches_the_one_with_zero_variance_makes_no_update(model_path, backend):
    config = with_every_term(backend)
    both, only = (LocalRank.load(config, model_path) for _ in range(2))
    good, bad = (pack_for_ranks(samples, BUDGET) for samples in (contrast(), flat()))
    results = both.run_minibatches([good, bad], version=0)
    only.run_minibatches([good], version=0)
    assert unchanged(state_of(only.backend), state_of(both.backend))
    metrics = combine_results(results).metrics
    assert (metrics["optimizer/updates"], metrics["optimizer/skipped"], metrics["optimizer/zero_variance"]) == (1, 1, 0)


def steps_on_rank(path: Path, config: Config, good: list[MicroBatch], then: list[list[MicroBatch]]) -> list[Any]:
    """Return, for each batch of `then`, the metrics of two steps and True if the state is still that before them."""
    import torch.distributed as dist

    rank = dist.get_rank()
    with contextlib.closing(build_learner(config, path)) as learner:
        train_minibatch(learner, of_rank(good, rank, 2))
        out = []
        for batch in then:
            before = state_of(learner)
            results = [train_minibatch(learner, of_rank(batch, rank, 2)).metrics for _ in range(2)]
            out.append((results, unchanged(before, state_of(learner))))
        return out


@pytest.mark.parametrize("backend", BACKENDS)
def test_ranks_agree_on_contrast_where_only_one_of_them_has_any(two_ranks, model_path, backend):
    good, none = pack_samples(contrast(), BUDGET), pack_samples(flat(), BUDGET)
    assert len(good) == len(none) > 1
    mixed = [g if i % 2 else n for i, (g, n) in enumerate(zip(good, none, strict=True))]  # rank 1 gets the odd ones
    first, second = two_ranks.call(steps_on_rank, model_path, with_every_term(backend, dp=2), good, [none, mixed])
    assert first == second
    updates = [([metrics["optimizer/updates"] for metrics in results], still) for results, still in first]
    assert updates == [([0, 0], True), ([1, 1], False)]


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_gradient_that_is_not_finite_leaves_weights_and_moments(model_path, backend):
    learner = build_learner(with_every_term(backend, rollout_kl={"coef": 0.01}), model_path)
    train_minibatch(learner, pack_samples(contrast(), BUDGET))
    before = state_of(learner)
    for bad in (np.nan, np.inf, 3e38):
        with np.errstate(all="ignore"):
            spoilt = [replace_columns(s, advantages=s.table["advantages"] * np.float32(bad)) for s in contrast()]
        metrics = train_minibatch(learner, pack_samples(spoilt, BUDGET)).metrics
        assert unchanged(before, state_of(learner)), bad
        assert (metrics["optimizer/skipped"], metrics["optimizer/zero_variance"]) == (1, 0)
        assert metrics["optimizer/broken"] == 0
    learner.close()


def tokens_where(samples: list[Sample], name: str) -> np.ndarray:
    return np.concatenate([s.table[name][s.table["loss_mask"]] for s in samples])


@pytest.mark.parametrize("credit", ["trajectory", "turn", "token"])
@pytest.mark.parametrize("advantage", ["grpo", "dr_grpo", "rloo", "reinforce_pp", "reinforce_pp_baseline", "maxrl"])
def test_groups_of_equal_rewards_have_advantages_of_exactly_zero(advantage, credit):
    for reward in (0.0, 1.0, 0.1, 1 / 3):
        groups = [[make_trajectory(g, e, reward=reward) for e in range(7)] for g in range(3)]
        samples, figures = assign_advantages(groups, AlgorithmConfig(advantage=advantage, credit=credit))
        assert not tokens_where(samples, "advantages").any()
        assert figures["advantage/zero_variance_groups"] == 3
        assert figures["advantage/zero_variance_share"] == 1


def test_reinforce_pp_finds_contrast_between_groups_that_have_none_within():
    groups = [[make_trajectory(g, e, reward=float(g)) for e in range(2)] for g in range(2)]
    for advantage, contrast_there in (("reinforce_pp", True), ("grpo", False), ("reinforce_pp_baseline", False)):
        samples, figures = assign_advantages(groups, AlgorithmConfig(advantage=advantage))
        assert bool(tokens_where(samples, "advantages").any()) == contrast_there
        assert figures["advantage/zero_variance_share"] == 1


@pytest.mark.parametrize(
    ("scores", "differ"),
    [
        ([], False),
        ([1.0], False),
        ([0.1 + 0.2, 0.3], False),
        ([float(np.float32(0.1)) + float(np.float32(0.2)), float(np.float32(0.3))], False),
        ([0.0, 0.0], False),
        ([0.0, 1e-30], True),
        ([1.0, 1.0 + 1e-5], True),
        ([-1.0, 1.0], True),
        ([1e6, 1e6 + 1], True),
    ],
)
def test_scores_that_differ_by_rounding_have_zero_variance(scores, differ):
    assert has_variance(scores) == differ


def test_a_step_counts_its_groups_with_zero_variance():
    groups = [[make_trajectory(g, e, reward=float(g == 2 and e)) for e in range(2)] for g in range(4)]
    _, metrics = prepare_minibatches(groups, config_from_dict({}))
    assert metrics["advantage/zero_variance_groups"] == 3
    assert metrics["advantage/zero_variance_share"] == 0.75


@pytest.mark.parametrize("advantage", ["grpo", "dr_grpo", "rloo", "reinforce_pp_baseline", "maxrl"])
def test_groups_of_one_are_refused_where_they_are_compared_with_nobody(advantage):
    data = {"schedule": {"group_size": 1}, "algorithm": {"advantage": advantage}}
    with pytest.raises(ConfigError, match=r"`schedule\.group_size` = 1 .*`algorithm\.advantage`.*set .*2 or more"):
        config_from_dict(data)
    data["algorithm"]["advantage"] = "reinforce_pp"
    assert config_from_dict(data).schedule.group_size == 1
