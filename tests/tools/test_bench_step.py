"""`bench step`: ratios of what each way spent, and one small measurement with a real engine and learner."""

from __future__ import annotations

import subprocess
import sys

import msgspec
import pytest

from dev.bench.step import BLOCK, WAYS, Report, Spent, configure, ratio_of, render, summarize


def test_a_ratio_is_of_sums_and_its_error_of_blocks_that_are_left_out():
    same = ratio_of([2.0] * 3 * BLOCK, [1.0] * 3 * BLOCK)
    assert (same.ratio, same.error) == (2.0, 0.0)
    # Every fourth step costs 5 more: a block has one of them, so no block is unlike another.
    periodic = [1.0 + 4 * (i % BLOCK == 0) for i in range(3 * BLOCK)]
    assert ratio_of(periodic, [1.0] * len(periodic)).ratio == 2.0
    assert ratio_of(periodic, [1.0] * len(periodic)).error == 0.0
    uneven = ratio_of([*[1.0] * BLOCK, *[3.0] * BLOCK], [1.0] * 2 * BLOCK)
    assert (uneven.ratio, uneven.error) == (2.0, pytest.approx(1.0))


def test_what_is_written_counts_as_part_of_the_step():
    zero = {"plain": [0.0] * 4, "recorded": [0.0] * 4}
    some = {"plain": [1.0] * 4, "recorded": [1.0] * 4}
    plain, recorded = summarize(Spent(some, some, zero | {"recorded": [0.5] * 4}, zero | {"recorded": [2.0] * 4}))
    assert (plain.cpu.ratio, plain.added_ms) == (1.0, 0.0)
    assert (recorded.cpu.ratio, recorded.wall.ratio) == (1.5, 3.0)
    assert (recorded.cpu_ms, recorded.added_ms) == (1500.0, 500.0)


def test_ways_differ_in_what_their_names_say():
    made = {name: configure(0, more, quick=False) for name, more in WAYS.items()}
    region = {name: config.algorithm.rollout_kl for name, config in made.items()}
    assert [name for name, one in region.items() if not one.probe_share] == ["plain", "recorded"]
    assert {name: one.measurement_interval for name, one in region.items() if one.probe_share} == {
        "served": BLOCK, "served, every step": 1, "limit": BLOCK,
    }  # fmt: skip
    assert [name for name, one in region.items() if one.update_limit is not None] == ["limit"]
    assert [name for name, config in made.items() if config.observe.record == "full"] == ["recorded"]


@pytest.mark.nightly
@pytest.mark.engine
@pytest.mark.timeout(600)
def test_a_small_measurement(tmp_path):
    words = ["bench", "step", "--quick", "--json"]
    done = subprocess.run(
        [sys.executable, "-m", "dev", *words],
        capture_output=True,
        text=True,
        timeout=580,
        cwd=tmp_path,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    report = msgspec.json.decode(done.stdout.splitlines()[-1], type=Report)
    assert (report.benchmark, report.steps) == ("step", BLOCK)
    assert [way.name for way in report.ways] == list(WAYS)
    assert report.ways[0].cpu.ratio == 1
    assert all(way.cpu_ms > 0 for way in report.ways)
    assert "CPU / plain" in render(report)
