"""Slots and leases: who gets what, what returns, and what is refused."""

import msgspec
import pytest

from r3async.config import ScheduleConfig
from r3async.schedule.run_ahead import AdmissionController, GroupLease, worst_case_staleness


def make(max_staleness=1, prompts_per_step=2, group_size=2, steps=5, **settings):
    schedule = ScheduleConfig(
        max_staleness=max_staleness, prompts_per_step=prompts_per_step, group_size=group_size, **settings
    )
    total = steps * prompts_per_step if steps else None
    return AdmissionController(schedule, total_groups=total, choose_task=lambda g: 1000 + g)


def lease(admission, owner="a", free=100, **settings):
    got = admission.lease_group(owner, free_episodes=free, **settings)
    return got and (got.group_index, got.episode_indices)


def lease_all(admission, count, owner="a"):
    return [lease(admission, owner) for _ in range(count)]


def publish(admission, version, *groups):
    admission.step_trained(version, groups)
    admission.version_published(version)


def test_staleness_zero_waits_for_each_step_and_then_for_its_weights():
    admission = make(max_staleness=0)
    assert lease_all(admission, 3) == [(0, (0, 1)), (1, (0, 1)), None]
    assert admission.is_full
    admission.step_trained(1, [0, 1])
    assert lease(admission) is None, "a slot is freed by the publication, not by the step"
    admission.version_published(1)
    assert not admission.is_full
    assert admission.lease_group("a", free_episodes=2) == GroupLease(2, 1002, (0, 1), version=1)


def test_an_overtaken_group_keeps_its_slot():
    admission = make(max_staleness=1, window=3)
    lease_all(admission, 4)
    publish(admission, 1, 1, 2)
    assert admission.slots_taken == 2
    assert lease_all(admission, 3) == [(4, (0, 1)), (5, (0, 1)), None]
    assert admission.list_leased_groups("a") == [0, 3, 4, 5]


def test_what_was_not_leased_or_was_consumed_or_is_beyond_the_window_can_not_be_trained():
    admission = make(max_staleness=3, window=2)
    lease_all(admission, 4)
    with pytest.raises(ValueError, match=r"group 2 may not overtake group 0: schedule\.window = 2 lets 1 younger"):
        admission.step_trained(1, [1, 2])
    admission.step_trained(1, [1, 0, 3])
    with pytest.raises(ValueError, match="group 1 was consumed already"):
        admission.step_trained(1, [2, 1])
    with pytest.raises(ValueError, match="group 4 was consumed, but only 4 groups were leased"):
        admission.step_trained(2, [4])


def test_a_lost_lease_is_given_again_for_the_missing_episodes_only_and_first():
    admission = make()
    lease_all(admission, 3)
    assert admission.list_leased_groups("a") == [0, 1, 2]
    assert admission.requeue_leases("a", lambda g: [1] if g == 1 else []) == [1]
    assert admission.list_leased_groups("a") == []
    again = admission.lease_group("b", free_episodes=100)
    assert (again.group_index, again.episode_indices, again.task_seed) == (1, (1,), 1001)


def test_what_was_lost_and_yet_arrived_is_not_played_again():
    admission = make()
    lease(admission)
    assert admission.requeue_leases("a", lambda g: [1]) == [0]
    admission.step_trained(1, [0])
    assert lease(admission) == (1, (0, 1))


def test_nothing_is_exhausted_before_the_last_group_is_trained():
    admission = make(max_staleness=4, steps=1)
    lease_all(admission, 2)
    assert not admission.can_lease()
    assert not admission.is_exhausted  # "a" may still die, and its groups have to be played again
    admission.step_trained(1, [0, 1])
    assert admission.is_exhausted


def test_a_group_is_leased_whole_or_when_there_is_room_for_it():
    admission = make(group_size=8)
    assert lease(admission, free=7, max_episodes=16) is None
    assert lease(admission, free=8, max_episodes=16) == (0, tuple(range(8)))


def test_a_group_larger_than_a_generator_is_leased_in_parts():
    admission = make(group_size=8)
    assert lease(admission, "a", free=5, max_episodes=5) == (0, (0, 1, 2, 3, 4))
    assert lease(admission, "b", free=2, max_episodes=5) == (0, (5, 6)), "the rest goes where there is room"
    assert lease(admission, "a", free=1, max_episodes=5) == (0, (7,))
    assert admission.list_leased_groups("a") == admission.list_leased_groups("b") == [0]
    assert admission.requeue_leases("a", lambda g: [0, 4, 5, 7]) == [0]
    assert lease(admission, "c", free=8) == (0, (0, 4, 7)), "what b plays stays with b"


def test_a_part_may_be_leased_into_any_room_if_so_configured():
    admission = make(group_size=8, split="capacity")
    assert lease(admission, free=3, max_episodes=16) == (0, (0, 1, 2))
    assert lease(admission, free=16) == (0, (3, 4, 5, 6, 7))


def test_idle_generators_share_a_group_where_there_are_fewer_groups_than_generators():
    admission = make(max_staleness=0, prompts_per_step=1, group_size=8)
    assert lease(admission, "a", idle_owners=3) == (0, (0, 1, 2))
    assert lease(admission, "b", idle_owners=2) == (0, (3, 4, 5))
    assert lease(admission, "c", idle_owners=1) == (0, (6, 7))
    assert lease(admission, "d", idle_owners=1) is None
    many = make(max_staleness=0, prompts_per_step=3, group_size=8)
    assert lease(many, "a", idle_owners=3) == (0, tuple(range(8))), "one whole group for each"


def test_a_lease_names_the_oldest_weights_whose_tokens_cannot_become_too_old():
    admission = make(max_staleness=1, prompts_per_step=2)
    named = {}
    for version in range(1, 5):
        while got := admission.lease_group("a", free_episodes=2):
            named[got.group_index] = got.version
        publish(admission, version, 2 * version - 2, 2 * version - 1)
    assert named == {g: max(0, g // 2 - 1) for g in range(10)}, "trained by the step after the next"


def test_what_is_leased_again_may_be_played_by_the_weights_that_it_could_be_played_by_before():
    admission = make(max_staleness=2, prompts_per_step=1, window=3, steps=9)
    first = [admission.lease_group("a", free_episodes=2).version for _ in range(3)]
    publish(admission, 1, 1)
    assert admission.lease_group("a", free_episodes=2).version == 1
    publish(admission, 2, 2)
    assert admission.requeue_leases("a", lambda g: [0, 1]) == [0, 3]
    assert first == [0, 0, 0]
    assert [admission.lease_group("b", free_episodes=2).version for _ in range(3)] == [0, 1, 2]


def test_a_version_counter_never_goes_backwards_across_restarts():
    admission = make(max_staleness=3)
    lease_all(admission, 6)
    publish(admission, 1, 0, 1)
    old = admission.state_dict()
    publish(admission, 2, 2, 3)
    with pytest.raises(ValueError, match="version 1 was published after version 2"):
        admission.version_published(1)
    with pytest.raises(ValueError, match="version 3 was published, but no step has made it"):
        admission.version_published(3)
    with pytest.raises(ValueError, match="a step made version 2 after version 2"):
        admission.step_trained(2, [4])
    with pytest.raises(ValueError, match="a snapshot of version 1 cannot follow version 2"):
        admission.load_state_dict(old, 0)
    restarted = make(max_staleness=3)
    restarted.load_state_dict(msgspec.json.decode(msgspec.json.encode(admission.state_dict())), 4)
    assert restarted.version == 2
    with pytest.raises(ValueError, match="version 1 was published after version 2"):
        restarted.version_published(1)
    assert restarted.state_dict() == admission.state_dict()
    assert restarted.list_leased_groups("a") == [4, 5]


@pytest.mark.parametrize(
    ("staleness", "window", "per_version", "bound"),
    [(0, 1, 4, 0), (0, 9, 4, 0), (1, 1, 4, 1), (1, 2, 4, 2), (1, 5, 4, 2), (1, 6, 4, 3), (2, 4, 1, 5), (3, 4, 2, 5)],
)
def test_the_bound_in_closed_form(staleness, window, per_version, bound):
    assert worst_case_staleness(staleness, window, per_version) == bound


def test_a_resumed_run_plays_what_the_learner_lacks_and_nothing_else():
    """Groups 0 and 1 are trained. Of 2 one episode is here; 3 is whole; 4 and 5, leased after the checkpoint, in part."""
    admission = make(max_staleness=3, prompts_per_step=1, group_size=2, window=4, steps=9)
    lease_all(admission, 4, "dead")
    publish(admission, 1, 0)
    publish(admission, 2, 1)
    resumed = make(max_staleness=3, prompts_per_step=1, group_size=2, window=4, steps=9)
    resumed.load_state_dict(msgspec.json.decode(msgspec.json.encode(admission.state_dict())), 2)
    here = {2: [1], 3: [0, 1], 5: [0]}
    assert resumed.requeue_after_resume(5, lambda g: [i for i in range(2) if i not in here.get(g, [])]) == [2, 4, 5]
    assert resumed.slots_taken == 4
    assert lease_all(resumed, 4) == [(2, (0,)), (4, (0, 1)), (5, (1,)), None]
    assert resumed.list_leased_groups("dead") == []


def test_a_resumed_run_never_has_more_slots_than_it_was_given():
    admission = make(max_staleness=1, prompts_per_step=2)
    assert admission.requeue_after_resume(100, lambda g: [0]) == [0, 1, 2, 3]
    assert admission.slots_taken == admission.slots == 4
    assert admission.requeue_after_resume(-1, lambda g: []) == []  # All of them are here, and wait to be trained.
    assert admission.is_full
