"""Who waits for whom is measured, and said once, with numbers; an engine under pressure plays less; a late loop is seen."""

import asyncio
import itertools
import time

import pytest

from r3async.config import ScheduleConfig
from r3async.record.process_time import LAG_WINDOW_SAMPLES, LagMeter
from r3async.schedule.concurrency import ConcurrencyLimiter, useful_concurrency
from r3async.schedule.pace import IdleShareMeter, PaceAnalyzer, StepPace
from r3async.schedule.tasks import TaskCursor


def steps(count, *, waited=0.0, idle=0.0, finished=8, trained=8, seconds=10.0):
    return [StepPace(seconds, waited, finished, trained, idle)] * count


def events(pace, observed):
    return [verdict.event for step in observed if (verdict := pace.observe_step(step)[1])]


def test_the_ratio_is_what_each_side_would_do_if_it_never_waited():
    pace = PaceAnalyzer(60)
    metrics, _ = pace.observe_step(
        StepPace(seconds=10, waited_seconds=5, finished_episodes=8, trained_episodes=8, idle_share=0.0)
    )
    assert metrics == {"pace/ratio": pytest.approx(0.5), "learner/idle_share": 0.5, "generator/idle_share": 0.0}
    pace = PaceAnalyzer(60)
    metrics, _ = pace.observe_step(
        StepPace(seconds=10, waited_seconds=0, finished_episodes=8, trained_episodes=4, idle_share=0.5)
    )
    assert metrics["pace/ratio"] == pytest.approx(4.0)


def test_a_dry_buffer_is_said_once_and_again_after_it_was_better():
    pace = PaceAnalyzer(60)
    assert events(pace, steps(7, waited=5)) == []  # 70 s, but few steps
    assert events(pace, steps(20, waited=5)) == ["pace_generation_bound"]
    assert events(pace, steps(20)) == []
    assert events(pace, steps(20, waited=5)) == ["pace_generation_bound"]


def test_a_full_buffer_asks_for_more_training_with_numbers():
    pace = PaceAnalyzer(60)
    said = [v for step in steps(20, idle=0.6) if (v := pace.observe_step(step)[1])]
    assert [v.event for v in said] == ["pace_training_bound"]
    assert said[0].facts["generator/idle_share"] == 0.6
    assert said[0].facts["pace/ratio"] == 2.5
    assert "about 2.5 times" in said[0].facts["hint"]
    assert "learner.parallel" in said[0].facts["hint"]


def test_where_both_wait_slots_are_what_is_missing():
    pace = PaceAnalyzer(60)
    said = [v for step in steps(20, idle=0.6, waited=5) if (v := pace.observe_step(step)[1])]
    assert [v.event for v in said] == ["pace_slots_bound"]
    assert "schedule.window" in said[0].facts["hint"]


def test_a_side_that_waits_far_longer_than_the_other_is_the_one_that_waits():
    assert events(PaceAnalyzer(60), steps(20, waited=9, idle=0.24)) == ["pace_generation_bound"]


def test_nothing_is_said_before_patience_is_over_nor_while_both_work():
    assert events(PaceAnalyzer(1000), steps(20, waited=5)) == []
    assert events(PaceAnalyzer(10), steps(50, waited=1, idle=0.2)) == []


def test_empty_places_are_summed_over_generators_and_their_restarts():
    places = IdleShareMeter()
    places.add_counters("a", idle=1.0, total=10.0)
    places.add_counters("b", idle=0.0, total=10.0)
    assert places.take_share() == pytest.approx(0.05)
    assert places.take_share() == 0.0
    places.add_counters("a", idle=2.0, total=14.0)
    places.add_counters("b", idle=3.0, total=6.0)  # a new process
    assert places.take_share() == pytest.approx(0.4)


def test_places_that_slots_could_never_fill_are_not_idle():
    schedule = ScheduleConfig(max_staleness=2, prompts_per_step=4, group_size=8)
    assert useful_concurrency(schedule, generators=2) == 32
    schedule.max_staleness = 0
    assert useful_concurrency(schedule, generators=1) == 32


def ticking():
    """A clock that is 3 s later at every look."""
    return itertools.count(3.0, 3.0).__next__


def test_without_figures_of_its_cache_an_engine_is_played_at_full_concurrency():
    limits = ConcurrencyLimiter(1, 64, ticking())
    assert [limits.update_limit({"generated_tokens": 5}, 64) for _ in range(5)] == [64] * 5


def test_a_preemption_lowers_the_limit_and_room_in_the_cache_raises_it_slowly():
    limits = ConcurrencyLimiter(4, 64, ticking())
    assert limits.update_limit({"kv_cache_usage": 0.5, "preemptions": 0}, 64) == 64
    assert limits.update_limit({"kv_cache_usage": 0.9, "preemptions": 2}, 64) == 48
    assert limits.update_limit({"kv_cache_usage": 0.9, "preemptions": 3}, 60) == 48  # what was cut has yet to end
    assert limits.update_limit({"kv_cache_usage": 0.9, "preemptions": 3}, 48) == 48
    assert limits.update_limit({"kv_cache_usage": 0.5, "preemptions": 3}, 20) == 48  # nothing speaks for more
    assert limits.update_limit({"kv_cache_usage": 0.5, "preemptions": 3}, 48) == 52


def test_the_limit_stays_between_least_and_most():
    limits = ConcurrencyLimiter(4, 8, ticking())
    counter = 0
    for _ in range(20):
        counter += 1
        limits.update_limit({"kv_cache_usage": 1.0, "preemptions": counter}, limits.limit)
    assert limits.limit == 4
    for _ in range(50):
        limits.update_limit({"kv_cache_usage": 0.1, "preemptions": counter}, limits.limit)
    assert limits.limit == 8


def test_an_engine_that_carries_so_many_is_found_and_held():
    """An engine whose cache is full at 40 episodes: the limit ends near it, and preemptions become rare."""
    limits, counter, late = ConcurrencyLimiter(1, 256, ticking()), 0, 0
    for look in range(200):
        playing = limits.limit
        preempts = playing > 40
        counter += preempts
        late += preempts and look >= 100
        limits.update_limit({"kv_cache_usage": min(1.0, playing / 40), "preemptions": counter}, playing)
    assert 24 <= limits.limit <= 50
    assert late <= 25


def test_every_epoch_poses_every_task_once_in_an_order_of_its_own():
    cursor = TaskCursor(7, size=50)
    epochs = [[cursor.pick_task(g) for g in range(50 * e, 50 * e + 50)] for e in range(3)]
    assert all(sorted(epoch) == list(range(50)) for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2]
    assert [TaskCursor(7, size=50).pick_task(g) for g in (149, 0)] == [epochs[2][49], epochs[0][0]]  # in any order
    assert [TaskCursor(8, size=50).pick_task(g) for g in range(50)] != epochs[0]
    assert cursor.count_epochs(75) == 1.5


def test_without_a_size_every_group_has_a_task_of_its_own():
    cursor = TaskCursor(7)
    assert len({cursor.pick_task(g) for g in range(1000)}) == 1000
    assert cursor.pick_task(3) == TaskCursor(7).pick_task(3) != TaskCursor(8).pick_task(3)
    assert cursor.count_epochs(75) == 0
    with pytest.raises(ValueError, match="has no task"):
        TaskCursor(7, size=0)


async def test_a_blocked_event_loop_is_late():
    meter = LagMeter()
    assert meter.collect_metrics() == dict.fromkeys(LagMeter.METRIC_NAMES, 0.0)
    meter.start()
    meter.start()
    for _ in range(6):
        await asyncio.sleep(0.06)
    time.sleep(0.2)  # noqa: ASYNC251 - the point
    await asyncio.sleep(0.1)
    figures = meter.collect_metrics()
    meter.stop()
    assert 100 <= figures["max_ms"] < 5000
    assert figures["p50_ms"] < figures["max_ms"]
    assert figures["own_max_ms"] <= figures["max_ms"]


async def test_own_lag_is_what_the_loop_computed_and_not_what_it_waited_for():
    meter = LagMeter()
    meter.start()
    await asyncio.sleep(0.06)
    time.sleep(0.3)  # noqa: ASYNC251 - the point
    await asyncio.sleep(0.06)
    assert meter.collect_metrics()["own_max_ms"] < meter.collect_metrics()["max_ms"]
    began = time.thread_time()
    while time.thread_time() - began < 0.3:
        pass
    await asyncio.sleep(0.06)
    meter.stop()
    assert meter.collect_metrics()["own_max_ms"] >= 100


def test_figures_are_of_the_last_minute():
    meter = LagMeter()
    for lag in [5.0, *(number / 1000 for number in range(LAG_WINDOW_SAMPLES))]:
        meter.add(lag, lag / 2)
    made = {"p50_ms": 600.0, "p99_ms": 1187.0, "max_ms": 1199.0, "own_p99_ms": 593.5, "own_max_ms": 599.5}
    assert meter.collect_metrics() == made
    meter.add(-1.0)
    assert meter.collect_metrics()["p50_ms"] == 600.0
    for _ in range(LAG_WINDOW_SAMPLES):
        meter.add(0.002)
    steady = {"p50_ms": 2.0, "p99_ms": 2.0, "max_ms": 2.0, "own_p99_ms": 0.0, "own_max_ms": 0.0}
    assert meter.collect_metrics() == steady
