"""`python -m dev bench packing`: its formulas by hand, and the report of a small run. Times are never judged."""

import json
import math
import os
import subprocess
import sys

import numpy as np
import pytest

from dev.bench.packing import (
    CAPS,
    apart,
    dealt,
    efficiency,
    fewest_bins,
    lengths_like,
    render,
    run,
    shape_of,
    sums,
)
from r3async.config import ConfigError
from r3async.learner.batch import CostModel


def test_efficiency_by_hand():
    """Two ranks, two rounds: the first takes 4, the second 2; 4 + 1 + 2 + 0 of 2 · 6 is useful."""
    planned = [[[0], [1]], [[2], []]]
    assert efficiency(planned, np.asarray([4.0, 2.0, 1.0])) == pytest.approx(7 / 12)
    assert sums(planned, np.asarray([4, 2, 1])).tolist() == [[4, 2], [1, 0]]


@pytest.mark.parametrize(
    ("lengths", "cap", "fewest"),
    [
        ([], 10, 0),
        ([10], 10, 1),
        ([1], 10, 1),
        ([5, 5], 10, 1),
        ([6, 6, 6], 10, 3),  # no two together
        ([6, 6, 6, 5], 10, 4),  # 5 goes beside none of them
        ([7, 7, 4, 4, 4], 10, 4),  # total 26; 7 leaves 3, and three times 4 needs two more
        ([7, 7, 3, 3], 10, 2),
        ([6, 4, 4, 4], 10, 2),  # one 4 beside the 6, 8 left
    ],
)
def test_the_bound_on_micro_batches_by_hand(lengths, cap, fewest):
    assert fewest_bins(np.asarray(lengths, np.int64), cap) == fewest


@pytest.mark.parametrize("kind", CAPS)
def test_lengths_are_in_their_range_and_the_same_every_time(kind):
    low = {"lognormal": 64, "bimodal": 200, "pareto": 100, "groups": 64, "cut": 64}[kind]
    lengths = lengths_like(kind, 8192, 0)
    assert low <= lengths.min() < lengths.max() <= CAPS[kind]
    assert np.array_equal(lengths, lengths_like(kind, 8192, 0))
    assert not np.array_equal(lengths, lengths_like(kind, 8192, 1))
    centre = {"cut": math.exp(8.6), "bimodal": 200 + 1300 * 0.5 / 0.7, "pareto": 500 * (2 ** (1 / 1.2) - 1)}
    assert np.median(lengths) == pytest.approx(centre.get(kind, math.exp(7)), rel=0.1)


def test_samples_of_a_group_are_alike():
    groups = np.log(lengths_like("groups", 8192, 0)).reshape(-1, 8)
    assert groups.std(1).mean() < 0.4 < groups.mean(1).std()


@pytest.mark.parametrize("divide", [dealt, apart])
def test_the_simpler_ways_lose_nothing_either(divide):
    lengths = lengths_like("lognormal", 100, 0)
    planned = divide(lengths, 32768, 8, CostModel(1, 1e-4))
    assert sorted(i for mine in planned for m in mine for i in m) == list(range(100))
    assert sums(planned, lengths).max() <= 32768
    assert len({len(mine) for mine in planned}) == 1


def test_what_can_not_be_measured_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="no model directory"):
        shape_of(str(tmp_path))
    with pytest.raises(ConfigError, match="names no seed"):
        run([])
    (tmp_path / "config.json").write_text('{"hidden_size": 4}')
    assert shape_of(str(tmp_path)) == {"hidden_size": 4}


def test_the_command_prints_one_object_and_a_table(tmp_path):
    command = [sys.executable, "-m", "dev", "bench", "packing", "--quick", "--seeds", "3", "--json"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=environment, check=True)
    report = json.loads(done.stdout.splitlines()[-1])
    summary, cases = report["summary"], report["cases"]
    assert report["by_seed"] == {"3": summary}
    assert summary["cases"] == len(cases) == 30
    assert summary["at_bound"] == sum(c["micro_batches"] == c["bound"] for c in cases) >= 23
    several = [c for c in cases if c["ranks"] > 1]
    for name in ("efficiency", "ceiling", "dealt", "apart"):
        mean = np.exp(np.mean([np.log(c[name]) for c in several]))
        assert summary[name] == pytest.approx(mean)
    assert summary["apart"] < summary["efficiency"] <= summary["ceiling"]
    for c in cases:
        assert c["fill"] == pytest.approx(c["tokens"] / (c["ranks"] * c["micro_batches"] * c["max_tokens"]))
        assert c["fill"] <= 1
        assert c["micro_batches"] >= c["bound"]
        assert c["efficiency"] <= c["ceiling"] + 1e-9
        assert c["efficiency"] * c["cost_imbalance"] <= 1 + 1e-9  # a rank never waits less than for the busiest
        assert min(c["token_imbalance"], c["cost_imbalance"]) >= 1 - 1e-9
        assert c["wall_ms"] > 0
    assert set(summary["cpu_ms"]) == {"256", "1024"}


def test_the_table_has_a_row_for_every_case():
    text = render(run([0], quick=True))
    assert (
        sum(line.startswith(("| lognormal", "| bimodal", "| pareto", "| groups")) for line in text.splitlines()) == 24
    )
    assert text.splitlines()[-1].startswith("all seeds: lockstep 0.")
