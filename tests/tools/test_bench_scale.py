"""`python -m dev bench scale`: the exponent by hand, and what a small run reports. Times are never judged."""

import json
import subprocess
import sys

import pytest

from dev.bench.scale import AXES, Axis, Point, Report, exponent, render, run
from r3async.config import ConfigError


@pytest.mark.parametrize("power", [0.5, 1.0, 2.0])
def test_the_exponent_is_that_of_the_power_law_the_points_are_of(power):
    points = [Point(size, 10.0 * size, 3e-6 * (10.0 * size) ** power) for size in (10, 25, 50, 400)]
    assert exponent(points) == pytest.approx(power)


@pytest.mark.parametrize(("exponents", "steep"), [((1.0, 1.1), []), ((1.2, 1.0), ["a"]), ((0.9, 1.2), ["a"])])
def test_an_axis_is_steep_where_all_points_or_the_larger_half_are(exponents, steep):
    report = Report("scale", [Axis("a", "token", [Point(1, 2.0, 1e-6, counts={"calls": 4.0})], *exponents)])
    assert report.steep == steep
    assert ("more than 1.1" in render(report)) == bool(steep)


def test_an_axis_that_there_is_not_is_named():
    with pytest.raises(ConfigError, match="did you mean 'turns'"):
        run(["turn"], quick=True, say=print)


@pytest.mark.nightly
def test_a_small_run_measures_every_axis(tmp_path):
    command = [sys.executable, "-m", "dev", "bench", "scale", "--quick", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=tmp_path, check=True)
    report = json.loads(done.stdout.splitlines()[-1])
    assert [axis["name"] for axis in report["axes"]] == list(AXES)
    for axis in report["axes"]:
        assert all(point["cpu_seconds"] > 0 for point in axis["points"])
        work = [point["work"] for point in axis["points"]]
        assert work == sorted(set(work))


@pytest.mark.long
def test_short_episodes_encode_as_much_a_turn_as_long_ones():
    points = next(axis for axis in run(["turns"], quick=False, say=lambda _: None).axes if axis.name == "turns").points
    by_turn = [point.counts["characters"] / point.size for point in points]
    assert max(by_turn) / min(by_turn) < 1.1, "what was known already was not encoded"
