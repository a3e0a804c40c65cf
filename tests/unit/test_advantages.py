"""Advantages: every estimator against a scalar formula, credit, filters, penalties, and groups with nothing to compare."""

import itertools
import math
import statistics

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from r3async.config import BUILTIN_ADVANTAGES, AlgorithmConfig, ConfigError, OverlongPenaltyConfig, config_from_dict
from r3async.data.tokens import Sample, TokenTable, Trajectory, Turn
from r3async.learner.advantages import (
    AdvantageInputs,
    assign_advantages,
    check_custom_advantage,
    compute_overlong_penalty,
    group_has_variance,
)
from r3async.learner.prepare import prepare_minibatches
from tests.helpers.algorithms import algorithm

ESTIMATORS = list(BUILTIN_ADVANTAGES)
NAMES = "zero_variance_groups zero_variance_share overlong_samples filtered_tokens overlong_penalty mean std abs_max"
FIGURES = {f"advantage/{name}" for name in NAMES.split()}


def episode(
    index: int,
    rewards: list[float],
    *,
    group: int = 0,
    stepwise: bool = False,
    lengths: list[int] | None = None,
    token_rewards: list[float] | None = None,
    stop_reason: str = "env_done",
    cut: bool = False,
) -> Trajectory:
    """Each turn: two observed tokens, then sampled ones (two, or `lengths`). `stepwise`: one sample a turn."""
    lengths = lengths or [2] * len(rewards)
    turn = [t for j, n in enumerate(lengths) for t in [-1, -1, *[j] * n]]
    column = np.zeros(len(turn), np.float32)
    turns, stop = [], 0
    for j, (reward, n) in enumerate(zip(rewards, lengths, strict=True)):
        stop += 2 + n
        reason = "length" if cut and j == len(rewards) - 1 else "stop"
        end = 2 + n if stepwise else stop
        turns.append(Turn(j, j if stepwise else 0, end - n, end, reward, reason))
        column[stop - 1] = reward
    if token_rewards is not None:
        column[:] = token_rewards
    sampled = np.asarray(turn, np.int32) >= 0
    table = TokenTable.from_tokens(np.zeros(len(turn), np.int32)).with_columns(
        turn=np.asarray(turn, np.int32), rewards=column, loss_mask=sampled
    )
    edges = np.cumsum([0, *(2 + n for n in lengths)]).tolist() if stepwise else [0, len(turn)]
    samples = [Sample(f"t{index}/{k}", table.slice_rows(a, b)) for k, (a, b) in enumerate(itertools.pairwise(edges))]
    return Trajectory(f"t{index}", group, index, 0, "g", stop_reason, turns, samples)


def by_hand(name: str, scores: list[float]) -> list[float]:
    """Advantages of one group, before anything over the batch."""
    n, total = len(scores), sum(scores)
    if name == "reinforce_pp":
        return list(scores)
    if n < 2 or len(set(scores)) == 1:
        return [0.0] * n
    mean = total / n
    if name == "grpo":
        return [(r - mean) / (statistics.stdev(scores) + 1e-3 * max(map(abs, scores))) for r in scores]
    if name == "rloo":
        return [r - (total - r) / (n - 1) for r in scores]
    if name == "maxrl":
        return [r / mean - 1 for r in scores]
    return [r - mean for r in scores]


def advantages(groups, config: AlgorithmConfig, **options) -> list[list[float]]:
    """Of the sampled tokens, sample by sample."""
    samples, figures = assign_advantages(groups, config, **options)
    assert set(figures) == FIGURES
    for sample in samples:
        column = sample.table["advantages"]
        assert column.dtype == np.float32
        assert not column[sample.table["turn"] < 0].any()
    return [s.table["advantages"][s.table["turn"] >= 0].tolist() for s in samples]


def standardized(values: list[list[float]]) -> list[list[float]]:
    flat = [x for v in values for x in v]
    mean, std = statistics.fmean(flat), statistics.pstdev(flat)
    return [[(x - mean) / std if std else 0.0 for x in v] for v in values]


@pytest.mark.parametrize("stepwise", [False, True])
@pytest.mark.parametrize("name", ESTIMATORS)
def test_credit_by_trajectory(name, stepwise):
    rewards = [[[1, 0.5], [0, 0], [0.5]], [[0.2], [0.9, 0.7, 0.5]]]
    groups = [
        [episode(i, r, group=g, stepwise=stepwise) for i, r in enumerate(members)] for g, members in enumerate(rewards)
    ]
    config = algorithm(advantage=name, credit="trajectory")
    want = []
    for members in rewards:
        values = by_hand(name, [sum(r) for r in members])
        for r, value in zip(members, values, strict=True):
            want += [[value] * 2] * len(r) if stepwise else [[value] * 2 * len(r)]
    want = standardized(want) if name.startswith("reinforce") else want
    for got, expected in zip(advantages(groups, config), want, strict=True):
        assert got == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("stepwise", [False, True])
@pytest.mark.parametrize("name", ESTIMATORS)
def test_credit_by_turn_with_episodes_of_different_length(name, stepwise):
    group = [episode(i, r, stepwise=stepwise) for i, r in enumerate([[1, 0.5], [0, 0.7], [0.5]])]
    first, second = by_hand(name, [1, 0, 0.5]), by_hand(name, [0.5, 0.7])
    want = [[first[0]] * 2 + [second[0]] * 2, [first[1]] * 2 + [second[1]] * 2, [first[2]] * 2]
    want = standardized(want) if name.startswith("reinforce") else want
    got = [x for sample in advantages([group], algorithm(advantage=name, credit="turn")) for x in sample]
    assert got == pytest.approx([x for v in want for x in v], abs=1e-6)


@pytest.mark.parametrize("stepwise", [False, True])
@pytest.mark.parametrize("name", ESTIMATORS)
def test_credit_by_token_is_the_reward_from_there_on(name, stepwise):
    a = episode(0, [0, 0], token_rewards=[0, 0, 1, 0, 0, 0, 0.5, 2], stepwise=stepwise)
    b = episode(1, [0, 0], token_rewards=[0, 0, 0, 1, 0, 0, 0, 0.25], stepwise=stepwise)
    to_go = [[3.5, 2.5, 2.5, 2], [1.25, 1.25, 0.25, 0.25]]
    want = []
    for i in range(2):
        row = []
        for t in range(4):
            start = 2 * (t // 2)
            other, own, earned = to_go[1 - i][start], to_go[i][start], to_go[i][t]
            mean = (own + other) / 2
            base = {"rloo": other, "reinforce_pp": 0}.get(name, mean)
            eps = 1e-3 * max(own, other)
            scale = {"grpo": statistics.stdev([own, other]) + eps, "maxrl": mean}.get(name, 1)
            row.append((earned - base) / scale)
        want.append(row)
    want = standardized(want) if name.startswith("reinforce") else want
    got = [x for s in advantages([[a, b]], algorithm(advantage=name, credit="token")) for x in s]
    assert got == pytest.approx([x for v in want for x in v], abs=1e-6)


@pytest.mark.parametrize("name", ["grpo", "maxrl", "reinforce_pp", "reinforce_pp_baseline"])
def test_advantages_that_are_scaled_do_not_depend_on_the_scale_of_rewards(name):
    def of(scale: float) -> list[float]:
        group = [episode(i, [scale * reward]) for i, reward in enumerate([0.25, 0.5, 0.75, 1.0])]
        return [x for sample in advantages([group], algorithm(advantage=name)) for x in sample]

    for scale in (1e-6, 1e-3, 1e3):
        assert of(scale) == pytest.approx(of(1.0), rel=1e-5)


def test_near_ties_are_damped_at_any_scale():
    for largest in (1e-3, 1.0, 1e3):
        group = [episode(0, [largest]), episode(1, [largest * (1 - 1e-5)])]
        first, *_ = advantages([group], algorithm())[0]
        assert 0 < first < 0.01


@pytest.mark.parametrize("credit", ["turn", "trajectory", "token"])
@pytest.mark.parametrize("name", ESTIMATORS)
def test_groups_with_zero_variance(name, credit):
    config = algorithm(advantage=name, credit=credit)
    for group in ([episode(0, [0.3, 0.9])], *([episode(i, [r]) for i in range(3)] for r in (0.1, 0.0))):
        values = [x for s in advantages([group], config) for x in s]
        if name == "reinforce_pp" and len(group) == 1 and credit != "trajectory":
            assert any(values), "compared with the batch"
        else:
            assert not any(values)
    assert advantages([], config) == []
    assert advantages([[]], config) == []
    assert advantages([[episode(0, [])]], config) == [[]]
    # An episode without turns is compared with nobody.
    three = advantages([[episode(0, [1.0]), episode(1, []), episode(2, [0.5])]], config)
    two = advantages([[episode(0, [1.0]), episode(2, [0.5])]], config)
    assert three == [two[0], [], two[1]]


def test_reinforce_pp_normalises_over_the_tokens_that_are_trained():
    long = episode(0, [1.0], lengths=[5])
    short = episode(1, [0.0], lengths=[1])
    lost = episode(2, [40.0], lengths=[3], stop_reason="length")
    config = algorithm(advantage="reinforce_pp", overlong_filter=True)
    samples, figures = assign_advantages([[long, short, lost]], config)
    mean, std = 5 / 6, math.sqrt(5 / 6 * 1 / 6)
    assert samples[0].table["advantages"][2:].tolist() == pytest.approx([(1 - mean) / std] * 5)
    assert samples[1].table["advantages"][2:].tolist() == pytest.approx([-mean / std])
    assert not samples[2].table["advantages"].any()
    assert figures["advantage/mean"] == pytest.approx(0, abs=1e-6)
    assert figures["advantage/std"] == pytest.approx(1)


@pytest.mark.parametrize("stepwise", [False, True])
def test_the_zero_variance_filter_sees_what_credit_compares(stepwise):
    def filtered(credit: str, *members: Trajectory) -> bool:
        samples, figures = assign_advantages([list(members)], algorithm(credit=credit, filter_zero_variance=True))
        dropped = not any(s.table["loss_mask"].any() for s in samples)
        assert figures["advantage/zero_variance_groups"] == dropped
        sampled = sum(int((s.table["turn"] >= 0).sum()) for s in samples)
        assert figures["advantage/filtered_tokens"] == (sampled if dropped else 0)
        return dropped

    crossed = [episode(i, r, stepwise=stepwise) for i, r in enumerate(([1, 0], [0, 1]))]
    assert filtered("trajectory", *crossed), "both have half"
    assert not filtered("turn", *crossed)
    assert not filtered("token", *crossed)
    same_totals = [
        episode(i, [0, 0], token_rewards=r, stepwise=stepwise)
        for i, r in enumerate(([0, 0, 0, 1, 0, 0, 0, 0], [0, 0, 0, 0, 0, 0, 0, 1]))
    ]
    assert filtered("turn", *same_totals)
    assert not filtered("token", *same_totals), "the second turn has all of it still to come, or nothing"
    for credit in ("turn", "trajectory", "token"):
        assert filtered(credit, *[episode(i, [0.5, 0.1], stepwise=stepwise) for i in range(3)])
        assert filtered(credit, episode(0, [0.5], stepwise=stepwise))


def test_without_the_filter_groups_with_zero_variance_are_counted_and_trained():
    group = [episode(i, [0.5]) for i in range(2)]
    samples, figures = assign_advantages([group, [episode(i, [i / 2], group=1) for i in range(2)]], algorithm())
    assert figures["advantage/zero_variance_groups"] == 1
    assert figures["advantage/filtered_tokens"] == 0
    assert all(s.table["loss_mask"].sum() == 2 for s in samples)


@pytest.mark.parametrize("how", [{"stop_reason": "length"}, {"cut": True}])
def test_the_overlong_filter_drops_episodes_that_still_count_as_scores(how):
    members = [episode(0, [1.0, 0.0]), episode(1, [0.0, 1.0], stepwise=True, **how)]
    plain, figures = assign_advantages([members], algorithm())
    assert figures["advantage/overlong_samples"] == 1, "an episode, whatever its rows"
    assert figures["advantage/filtered_tokens"] == 0
    samples, figures = assign_advantages([members], algorithm(overlong_filter=True))
    assert figures["advantage/overlong_samples"] == 1
    assert figures["advantage/filtered_tokens"] == 4
    assert [int(s.table["loss_mask"].sum()) for s in samples] == [4, 0, 0]
    assert np.array_equal(samples[0].table["advantages"], plain[0].table["advantages"])
    assert members[1].samples[0].table["loss_mask"].any(), "the trajectory itself is not changed"


def test_soft_overlong_penalty_against_its_cases():
    settings = OverlongPenaltyConfig(buffer=4, factor=0.5)
    want = {0: 0, 6: 0, 7: -0.125, 8: -0.25, 10: -0.5, 11: -0.5}
    assert {n: compute_overlong_penalty(n, 10, settings) for n in want} == pytest.approx(want)
    assert compute_overlong_penalty(100, 10, OverlongPenaltyConfig()) == 0


@pytest.mark.parametrize("credit", ["turn", "trajectory", "token"])
def test_soft_overlong_penalty_is_part_of_the_score(credit):
    group = [episode(0, [1.0], lengths=[9]), episode(1, [1.0], lengths=[3])]
    config = algorithm(advantage="dr_grpo", credit=credit, overlong_penalty={"buffer": 4})
    samples, figures = assign_advantages([group], config, max_new_tokens=10)
    assert samples[0].table["advantages"][2:].tolist() == pytest.approx([-0.375] * 9)
    assert samples[1].table["advantages"][2:].tolist() == pytest.approx([0.375] * 3)
    assert figures["advantage/overlong_penalty"] == pytest.approx(-0.375)
    with pytest.raises(ValueError, match="needs `max_new_tokens`"):
        assign_advantages([group], config)


def test_other_columns_and_samples_stay_as_they_are():
    sample = episode(0, [1.0]).samples[0]
    (out, _), _ = assign_advantages([[episode(0, [1.0]), episode(1, [0.0])]], algorithm())
    assert out.sample_id == sample.sample_id
    assert out.temperature == sample.temperature
    assert out.table.without_columns("advantages") == sample.table


def test_inconsistent_groups_are_refused():
    with pytest.raises(ValueError, match=r"groups \[0, 1\]"):
        assign_advantages([[episode(0, [1]), episode(1, [0], group=1)]], algorithm())
    with pytest.raises(ValueError, match=r"'maxrl' is for rewards >= 0, and there is one of -1"):
        assign_advantages([[episode(0, [-1]), episode(1, [1])]], algorithm(advantage="maxrl"))


def measured(index: int, tokens: int, reward: float, without: tuple[int, ...] = ()) -> Trajectory:
    """An episode of one turn behind a prompt of two tokens; the tokens at `without` have a log-prob that is not finite."""
    made = episode(index, [reward], lengths=[tokens])
    table = made.samples[0].table
    logprobs = np.where(table["loss_mask"], -0.5, 0).astype(np.float32)
    logprobs[list(without)] = np.nan
    made.samples[0].table = table.with_columns(rollout_logprobs=logprobs, policy_version=table["turn"])
    return made


@pytest.mark.parametrize("estimator", ["reinforce_pp", "reinforce_pp_baseline"])
@pytest.mark.parametrize("without", [(), (2,), (2, 3, 4)])
def test_the_batch_is_whitened_over_the_tokens_that_are_trained(estimator, without):
    group = [measured(0, 4, 1.0, without), measured(1, 2, 0.0)]
    (samples,), figures = prepare_minibatches([group], config_from_dict({"algorithm": {"advantage": estimator}}))
    trained = np.concatenate([s.table["advantages"][s.table["loss_weights"] > 0] for s in samples])
    assert len(trained) == 6 - len(without)
    assert trained.mean() == pytest.approx(0, abs=1e-5)
    assert trained.std() == pytest.approx(1, abs=1e-5)
    assert figures["advantage/mean"] == pytest.approx(trained.mean(), abs=1e-5)
    assert figures["advantage/filtered_tokens"] == 0, "they are counted as dropped for their log-prob"


@pytest.mark.parametrize("credit", ["trajectory", "turn", "token"])
def test_equal_answers_of_different_lengths_have_zero_variance(credit):
    config = algorithm(credit=credit, filter_zero_variance=True, overlong_penalty={"buffer": 8})
    wrong = [episode(i, [0.0], lengths=[n]) for i, n in enumerate((4, 8, 14, 16))]
    assert not group_has_variance(wrong, config, 16)
    samples, figures = assign_advantages([wrong], config, max_new_tokens=16)
    assert figures["advantage/zero_variance_groups"] == 1
    assert not any(sample.table["loss_mask"].any() for sample in samples), "the filter drops them"

    differing = [episode(0, [0.0], lengths=[4]), episode(1, [1.0], lengths=[12])]
    assert group_has_variance(differing, config, 16)
    _, figures = assign_advantages([differing], config, max_new_tokens=16)
    assert figures["advantage/zero_variance_groups"] == 0


@pytest.mark.parametrize("credit", ["trajectory", "turn", "token"])
def test_equal_answers_that_are_kept_have_advantages_by_length(credit):
    config = algorithm(advantage="dr_grpo", credit=credit, overlong_penalty={"buffer": 8})
    wrong = [episode(i, [0.0], lengths=[n]) for i, n in enumerate((4, 16))]
    short, long = advantages([wrong], config, max_new_tokens=16)
    assert (short, long) == ([0.5] * 4, [-0.5] * 16)


def test_a_reward_between_turns_counts_for_the_turns_before_it_in_any_sample():
    """By token, where the second sample of an episode has two turns, and the reward is at what comes between them."""

    def made(index: int, reward: float) -> Trajectory:
        turns = [Turn(0, 0, 1, 2, 0.0, "stop"), Turn(1, 1, 1, 2, 0.0, "stop"), Turn(2, 1, 3, 4, 0.0, "stop")]
        samples = []
        for turn, rewards in (([-1, 0], [0.0, 0.0]), ([-1, 1, -1, 2], [0.0, 0.0, reward, 0.0])):
            column = np.asarray(turn, np.int32)
            table = TokenTable.from_tokens(np.zeros(len(turn), np.int32)).with_columns(
                turn=column, rewards=np.asarray(rewards, np.float32), loss_mask=column >= 0
            )
            samples.append(Sample(f"t{index}/{len(samples)}", table))
        return Trajectory(f"t{index}", 0, index, 0, "g", "env_done", turns, samples)

    config = algorithm(advantage="dr_grpo", credit="token")
    assert advantages([[made(0, 1.0), made(1, 0.0)]], config) == [[0.5], [0.5, 0.0], [-0.5], [-0.5, 0.0]]


def minus_mean(inputs: AdvantageInputs) -> np.ndarray:
    scores = inputs.scores
    scores -= scores.mean()  # its own to change
    scores *= inputs.config.loss_args.get("scale", 1.0)
    return scores


def by_length(inputs: AdvantageInputs) -> np.ndarray:
    return inputs.lengths


def too_few(inputs: AdvantageInputs) -> np.ndarray:
    return inputs.scores[:1]


def not_finite(inputs: AdvantageInputs) -> np.ndarray:
    return inputs.scores / 0


def unexpected(inputs: AdvantageInputs) -> np.ndarray:
    raise AssertionError("there is nothing to compare")


def own(function) -> dict:
    return {"advantage": f"{__name__}:{function.__name__}"}


@given(
    st.lists(st.lists(st.floats(-9, 9, width=32), min_size=1, max_size=3), min_size=1, max_size=4),
    st.sampled_from(["trajectory", "turn", "token"]),
    st.floats(0.1, 10.0),
)
def test_an_advantage_of_ones_own_is_that_of_its_formula(rewards, credit, scale):
    group = [episode(i, each) for i, each in enumerate(rewards)]
    got = advantages([group], algorithm(**own(minus_mean), credit=credit, loss_args={"scale": scale}))
    want = advantages([group], algorithm(advantage="dr_grpo", credit=credit))
    if credit == "token":  # the baseline is that of the turn's first token
        scale = 1.0
        got = advantages([group], algorithm(**own(minus_mean), credit=credit))
    for mine, other in zip(got, want, strict=True):
        assert mine == pytest.approx([scale * x for x in other], rel=1e-5, abs=1e-6)


def test_an_advantage_of_ones_own_knows_the_lengths_of_what_is_compared():
    group = [episode(i, [float(i), 2.0 * i], lengths=lengths) for i, lengths in enumerate(([3, 1], [2, 5]))]
    assert advantages([group], algorithm(**own(by_length))) == [[4.0] * 4, [7.0] * 7]
    assert advantages([group], algorithm(**own(by_length), credit="turn")) == [[3.0] * 3 + [1.0], [2.0] * 2 + [5.0] * 5]


def test_an_advantage_of_ones_own_is_not_called_where_nothing_differs():
    same = [[episode(0, [0.3]), episode(1, [0.1 + 0.2])], [episode(0, [1.0], group=1)]]
    assert advantages(same, algorithm(**own(unexpected))) == [[0.0, 0.0]] * 3


@pytest.mark.parametrize("function", [too_few, not_finite])
@pytest.mark.filterwarnings("ignore:divide by zero", "ignore:invalid value")
def test_an_advantage_that_is_no_number_a_score_is_refused(function):
    says = "must return one finite number a score, here 2, and returned"
    with pytest.raises(ValueError, match=says):
        advantages([[episode(0, [0.0]), episode(1, [1.0])]], algorithm(**own(function)))
    with pytest.raises(ConfigError, match=f"`algorithm.advantage` = .* fails with two made up samples: .*{says}"):
        check_custom_advantage(algorithm(**own(function)))


def test_an_advantage_of_ones_own_is_checked_before_the_start():
    check_custom_advantage(algorithm(**own(minus_mean)))
    with pytest.raises(ConfigError, match=r"\[algorithm\] `advantage` = .* cannot be loaded"):
        check_custom_advantage(algorithm(advantage="nowhere:function"))
    with pytest.raises(ConfigError, match="must be a function of one argument, the scores of a group"):
        check_custom_advantage(algorithm(advantage=f"{__name__}:by_hand"))
    with pytest.raises(ConfigError, match=r"`advantage` = 'grpoo': there is none of that name; did you mean 'grpo'"):
        algorithm(advantage="grpoo")
