"""Drift by age, turn and position: every trained token counts once in each, whatever the minibatch and micro-batch."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from r3async.data.metrics import find_metric
from r3async.learner import MinibatchResult
from r3async.learner.drift_metrics import POSITION_BINS, STALENESS_BINS, TURN_BINS, compute_drift_metrics, sum_drift
from r3async.learner.metrics import combine_results
from r3async.learner.results import DriftSums, GapMoments

TOKENS = st.lists(
    st.tuples(st.floats(-2, 0), st.floats(-2, 0), st.integers(0, 12), st.integers(0, 20), st.integers(0, 20000)),
    min_size=1,
    max_size=30,
)


def sums_of(tokens) -> np.ndarray:
    logprobs, rollout, ages, turns, positions = zip(*tokens, strict=True) if tokens else ((), (), (), (), ())
    columns = [torch.tensor(x, dtype=torch.float32) for x in (logprobs, rollout)]
    return sum_drift(*columns, *(torch.tensor(x, dtype=torch.int64) for x in (ages, turns, positions))).numpy()


@settings(max_examples=60)
@given(TOKENS, st.integers(0, 30))
def test_means_are_those_of_single_tokens_however_they_are_divided(tokens, cut):
    def result(part):
        sums = DriftSums(sums_of(part), sums_of([]), sums_of([]))
        found = {"rollout_kl/k3": 0.0, "batch/trained_tokens": float(len(part))}
        found |= compute_drift_metrics(sums, GapMoments())
        return MinibatchResult(found, np.zeros(0, np.float32), np.zeros((0, 0), np.int64), [], sums)

    got = combine_results([result(tokens[:cut]), result(tokens[cut:])]).metrics
    want: dict[str, list[float]] = {}
    for logprob, rollout, age, turn, position in tokens:
        delta = float(np.float32(logprob)) - float(np.float32(rollout))
        place = max(0, (position // 64).bit_length())
        parts = (
            f"staleness_{min(age, STALENESS_BINS - 1)}",
            f"turn_{min(turn, TURN_BINS - 1)}",
            f"position_{min(place, POSITION_BINS - 1)}",
        )
        for name in (f"rollout_kl/k3_{part}" for part in parts):
            want.setdefault(name, []).append(np.expm1(delta) - delta)
    means = {name: np.mean(values) for name, values in want.items()}
    assert {n: v for n, v in got.items() if n.startswith("rollout_kl/k3_")} == pytest.approx(means, rel=1e-5, abs=1e-12)


def test_served_drift_is_the_replayed_one_and_what_the_probed_tokens_differ_by():
    everything = [(-0.5, -0.2, 1, 0, 5), (-0.1, -0.4, 2, 1, 100), (-0.3, -0.3, 2, 0, 7)]
    probed, served = everything[:1], [(-0.9, -0.2, 1, 0, 5)]
    found = compute_drift_metrics(DriftSums(sums_of(everything), sums_of(probed), sums_of(served)), GapMoments())
    k3 = [np.expm1(a - b) - (a - b) for a, b, *_ in (*everything, *served)]
    assert found["rollout_kl/served_k3"] == pytest.approx(np.mean(k3[:3]) + k3[3] - k3[0], rel=1e-5)
    # Every token of that age was probed.
    assert found["rollout_kl/served_k3_staleness_1"] == pytest.approx(k3[3], rel=1e-5)
    assert found["rollout_kl/served_tokens"] == 1
    assert "rollout_kl/served_k3_staleness_2" not in found
    unmeasured = DriftSums(sums_of(everything), sums_of([]), sums_of([]))
    assert "rollout_kl/served_k3" not in compute_drift_metrics(unmeasured, GapMoments())


def test_each_is_told_apart_by_name():
    assert find_metric("rollout_kl/served_k3_staleness_3").label == "served drift at staleness 3"
    names = [f"rollout_kl/{k3}_{by}_3" for k3 in ("k3", "served_k3") for by in ("staleness", "turn", "position")]
    assert len({find_metric(name).label for name in names}) == len(names)
    assert not {find_metric(name).description for name in names} & {*names}
