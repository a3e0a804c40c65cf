"""What counts as growth in `python -m dev bench soak`."""

import random

import pytest

from dev.bench.jobs import BenchError
from dev.bench.soak import MIB, Growth, Sample, growth, render
from dev.bench.soak import Report as SoakReport


def samples(*, slope=0.0, noise=0.5, warm_up=0.0, files=lambda i: 40, count=360):
    """Of half an hour, one every five seconds: memory of 300 MiB and `slope` MiB an hour, `warm_up` MiB in the first minutes."""
    rng = random.Random(0)
    made = []
    for i in range(count):
        at = 5.0 * i
        mib = 300 + slope * at / 3600 + min(warm_up, warm_up * at / 300) + rng.gauss(0, noise)
        made.append(Sample(at, int(mib * MIB), files(i)))
    return made


def test_noise_and_what_warms_up_is_flat():
    found = growth(samples(warm_up=50))
    assert found.flat
    assert abs(found.growth_mib) < 0.5
    assert 0.2 < found.scatter_mib < 0.6


@pytest.mark.parametrize("slope", [20.0, 60.0])
def test_a_leak_is_found_beside_the_noise(slope):
    found = growth(samples(slope=slope))
    assert not found.flat
    assert found.slope_mib_per_hour == pytest.approx(slope, rel=0.1)


def test_memory_that_jumps_about_is_not_a_leak():
    assert growth(samples(noise=8.0)).flat


def test_files_that_stay_open_are_found_and_those_that_come_and_go_are_not():
    assert growth(samples(files=lambda i: 40 + i % 3)).flat
    found = growth(samples(files=lambda i: 40 + i // 60))
    assert not found.flat
    assert found.files_last > found.files_first


def test_too_short_a_run_shows_nothing():
    with pytest.raises(BenchError, match="measure for longer"):
        growth(samples(count=11))


def test_the_table_names_who_grows():
    flat, leak = growth(samples()), growth(samples(slope=60))
    report = SoakReport(30, 100, 800, MIB, 10 * MIB, {"conductor": flat, "learner": leak}, False)
    (grows,) = [line for line in render(report).splitlines() if "GROWS" in line]
    assert grows.startswith("| learner")
    assert isinstance(flat, Growth)
