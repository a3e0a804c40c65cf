"""What a step says of its episodes, and how rates are divided among devices."""

import itertools

import numpy as np
import pytest

from r3async.config import config_from_dict
from r3async.data.tokens import Sample, TokenTable, Trajectory, Turn
from r3async.record.step_writer import DeviceCounts, StepWriter
from r3async.record.trained_trajectories import compute_episode_metrics


def played(group: int, lengths: list[int], reward: float, *, cut: bool = False, ended: str = "env_done") -> Trajectory:
    """An episode with answers of so many tokens, one after the other; the last is `cut`."""
    edges = np.cumsum([0, *lengths])
    turns = [
        Turn(i, 0, int(start), int(stop), reward / len(lengths), "length" if cut and i == len(lengths) - 1 else "stop")
        for i, (start, stop) in enumerate(itertools.pairwise(edges))
    ]
    name = f"g{group:08d}e0000"
    samples = [Sample(f"{name}/0", TokenTable.from_tokens(np.arange(max(sum(lengths), 1))))]
    return Trajectory(name, group, 0, group, "", ended, turns, samples)


def test_lengths_and_spreads_are_over_the_episodes_that_were_played():
    episodes = [played(0, [10, 10], 1.0), played(0, [30], 0.0, cut=True), played(1, [40], 0.5)]
    episodes += [played(1, [50], 0.5, ended="length"), played(1, [], 0.0, ended="error")]
    row = compute_episode_metrics(episodes)
    assert row["response_length/mean"] == 35
    assert row["response_length/p95"] == pytest.approx(np.percentile([20, 30, 40, 50], 95))
    assert row["response_length/max"] == 50
    assert row["response_length/clip_ratio"] == 0.5
    assert row["reward/mean"] == 0.5
    assert row["reward/std"] == pytest.approx(np.std([1, 0, 0.5, 0.5]))
    assert row["reward/std_in_group"] == 0.25  # 0.5 in the first, nothing in the second
    assert row["episode/ended_error"] == 1


def test_a_step_in_which_everything_failed_rewards_nobody_and_counts_its_endings():
    row = compute_episode_metrics([played(0, [], 0.0, ended="error")])
    assert all(np.isnan(row[name]) for name in row if "/ended_" not in name)  # not 0, which would be a reward
    assert row["episode/ended_error"] == 1


def test_rates_of_a_device_are_of_the_side_that_it_is_on(tmp_path):
    parallel = {"dp": 2, "tp": 2, "ep": 4}
    config = config_from_dict(
        {"generator": {"count": 3, "engine_args": {"tensor_parallel_size": 2}}, "learner": {"parallel": parallel}}
    )
    devices = DeviceCounts.from_config(config)
    assert devices == (6, 4)
    rows = StepWriter(tmp_path, lambda event, **fields: None, devices, clock=iter([0.0, 10.0]).__next__)
    rows.write_step(1, 1, {"batch/trained_tokens": 80}, generated_tokens=600)
    (row,) = rows.rows_after(0)
    assert row["throughput/generated_tokens_per_second"] == 60.0
    assert row["throughput/generated_tokens_per_second_per_device"] == 10.0
    assert row["throughput/trained_tokens_per_second_per_device"] == 2.0
