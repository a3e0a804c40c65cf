"""Which task a group poses, by what tasks scored: rarely the settled ones, and with a curriculum those near the target."""

from collections import Counter
from itertools import chain, repeat

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from r3async.config import ConfigError, load_config
from r3async.config.schedule import DifficultyConfig
from r3async.data.mixed import split_seed
from r3async.rollout.episode import EpisodeTask, build_failed_trajectory
from r3async.schedule.difficulty import TaskHistory, score_groups
from r3async.schedule.environment_mix import MixedTaskCursor
from r3async.schedule.tasks import TaskCursor
from tests.unit.test_buffer import make_trajectory

FILTER = DifficultyConfig(groups=2, settled_share=0.1)


def posed(history: TaskHistory, cursor: TaskCursor, groups: range, score) -> list[int]:
    """The tasks of these groups, each trained before the next is leased."""
    out = []
    for group in groups:
        out.append(task := history.choose_task(group, cursor.iter_tasks(group)))
        history.record_scores([group], [(task, score(task))])
    return out


def test_without_a_setting_every_task_has_its_turn_and_nothing_is_held():
    cursor, history = TaskCursor(0, 10), TaskHistory(DifficultyConfig(), 0)
    assert posed(history, cursor, range(50), lambda task: 1.0) == [cursor.pick_task(g) for g in range(50)]
    assert (history.state_dict(), history.collect_metrics()) == ({}, {})


def test_tasks_that_are_always_or_never_solved_are_posed_rarely_and_the_others_instead():
    """Tasks 0 to 5 are easy, 6 to 8 too hard; 9 to 19 score between."""
    cursor, history = TaskCursor(0, 20), TaskHistory(FILTER, 0)
    tasks = posed(history, cursor, range(2000), lambda task: 1.0 if task < 6 else 0.0 if task < 9 else 0.5)
    first, late = Counter(tasks[:40]), Counter(tasks[400:])
    assert set(first.values()) == {2}  # everything is known after two epochs
    settled = sum(late[task] for task in range(9)) / 1600
    assert 0.03 < settled < 0.12  # 45 % of the turns, a tenth of each, and as much again from draws
    assert all(late[task] > 0 for task in range(20))
    assert min(late[task] for task in range(9, 20)) > 5 * max(late[task] for task in range(9))
    figures = history.collect_metrics()
    assert (figures["data/easy_tasks"], figures["data/hard_tasks"]) == (6, 3)
    assert figures["data/replaced_tasks"] == sum(task != cursor.pick_task(g) for g, task in enumerate(tasks))


def test_a_task_that_scores_otherwise_again_is_no_longer_settled():
    cursor, history = TaskCursor(0, 4), TaskHistory(FILTER, 0)
    history.record_scores([], [(2, 1.0), (2, 1.0)])
    assert history.collect_metrics()["data/easy_tasks"] == 1
    history.record_scores([], [(2, 0.5)])
    assert history.collect_metrics()["data/easy_tasks"] == 0
    assert all(history.choose_task(g, cursor.iter_tasks(g)) == cursor.pick_task(g) for g in range(8))


def test_where_all_are_settled_one_is_posed_all_the_same():
    history = TaskHistory(DifficultyConfig(groups=1, settled_share=0.0), 0)
    history.record_scores([], [(task, 0.0) for task in range(5)])
    assert history.choose_task(0, TaskCursor(0, 5).iter_tasks(0)) == TaskCursor(0, 5).pick_task(0)


def test_a_curriculum_takes_new_tasks_first_and_then_those_near_its_target():
    settings = DifficultyConfig(groups=1, target=0.5)
    cursor, history = TaskCursor(0, 11), TaskHistory(settings, 0)
    history.record_scores([], [(task, task / 10) for task in range(11) if task != 3])
    order = chain([0, 10, 3, 5], repeat(7))
    assert history.choose_task(0, order) == 3  # nothing is known of it
    history.record_scores([0], [(3, 0.3)])
    assert history.choose_task(1, chain([0, 10, 3, 6, 5], repeat(7))) == 6  # 5 is nearer, and the fifth
    tasks = Counter(posed(history, cursor, range(2, 1500), lambda task: task / 10))
    assert tasks[5] > tasks[4] > tasks[2] > tasks[1]
    assert tasks[5] > tasks[6] > tasks[8] > tasks[9]


@given(
    st.lists(st.tuples(st.integers(0, 7), st.sampled_from([0.0, 0.5, 1.0])), max_size=60),
    st.integers(1, 3),
    st.sampled_from([None, 0.4]),
    st.integers(0, 60),
)
def test_a_group_keeps_its_task_and_a_restored_history_goes_on_with_the_same(scores, groups, target, at):
    settings = DifficultyConfig(groups=groups, settled_share=0.2, target=target)
    cursor, history = TaskCursor(1, 8), TaskHistory(settings, 1)
    restored = TaskHistory(settings, 1)
    for group, score in enumerate(scores):
        if group == at:
            restored.load_state_dict(msgspec.json.decode(msgspec.json.encode(history.state_dict())), {})
        task = history.choose_task(group, cursor.iter_tasks(group))
        if group >= at:
            assert restored.choose_task(group, cursor.iter_tasks(group)) == task
            restored.record_scores([group - 3], [score])
        history.record_scores([group - 3], [score])
        assert history.choose_task(group, cursor.iter_tasks(group)) == task
    if len(scores) > at:
        assert restored.state_dict() == history.state_dict()
        assert restored.collect_metrics() == history.collect_metrics()


def test_what_the_learner_kept_of_a_group_says_its_task():
    history = TaskHistory(FILTER, 0)
    history.load_state_dict({"scores": [], "posed": [(4, 1), (5, 2)], "replaced": 0}, {5: 3, 6: 0})
    assert [history.choose_task(group, repeat(9)) for group in (4, 5, 6, 7)] == [1, 3, 0, 9]


def test_others_are_never_quarantined_and_of_the_same_environment():
    tasks = TaskCursor(0, 5, {1: 0, 2: 0}).iter_tasks(0)
    assert {next(tasks) for _ in range(100)} == {0, 3, 4}
    mixed = MixedTaskCursor(0, [1, 1], [4, 6])
    for group in range(4):
        tasks = mixed.iter_tasks(group)
        drawn = [next(tasks) for _ in range(60)]
        assert drawn[0] == mixed.pick_task(group)
        entries = {split_seed(task, 2)[0] for task in drawn}
        assert len(entries) == 1
        assert len(set(drawn)) == [4, 6][entries.pop()]


def test_failed_episodes_count_for_nothing():
    group = [make_trajectory(3, e, reward=float(e)) for e in range(2)]
    failed = build_failed_trajectory(EpisodeTask(3, 2, group[0].task_seed), None, 0, generator_id="g", at=0.0)
    assert score_groups([[*group, failed], [failed]]) == [(group[0].task_seed, 0.5)]


def test_bounds_that_no_task_can_be_between_are_refused():
    with pytest.raises(ConfigError, match="`hard` = 1 must be less than `easy` = 1"):
        load_config("quickstart", ["schedule.difficulty.hard=1"])
