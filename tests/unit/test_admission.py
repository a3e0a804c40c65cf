"""Slots and leases: who gets what, what returns, and what is refused."""

import msgspec
import pytest

from r3async.config import ScheduleConfig
from r3async.schedule.admission import Admission, GroupLease, oldest_age


def make(max_staleness=1, groups_per_step=2, samples_per_group=2, steps=5, **settings):
    schedule = ScheduleConfig(
        max_staleness=max_staleness, groups_per_step=groups_per_step, samples_per_group=samples_per_group, **settings
    )
    total = steps * groups_per_step if steps else None
    return Admission(schedule, total_groups=total, task_seed=lambda g: 1000 + g)


def lease(admission, owner="a", free=100, **settings):
    got = admission.lease(owner, free=free, **settings)
    return got and (got.group_index, got.episode_indices)


def publish(admission, version, *groups):
    admission.trained(version, groups)
    admission.published(version)


def test_staleness_zero_waits_for_each_step_and_then_for_its_weights():
    admission = make(max_staleness=0)
    assert [lease(admission) for _ in range(3)] == [(0, (0, 1)), (1, (0, 1)), None]
    assert admission.full
    admission.trained(1, [0, 1])
    assert lease(admission) is None, "a slot is freed by the publication, not by the step"
    admission.published(1)
    assert not admission.full
    assert admission.lease("a", free=2) == GroupLease(2, 1002, (0, 1), version=1)


def test_an_overtaken_group_keeps_its_slot():
    admission = make(max_staleness=1, window=3)
    for _ in range(4):
        lease(admission)
    publish(admission, 1, 1, 2)
    assert admission.slots_taken == 2
    assert [lease(admission) for _ in range(3)] == [(4, (0, 1)), (5, (0, 1)), None]
    assert admission.leases("a") == [0, 3, 4, 5]


def test_what_was_not_leased_or_was_consumed_or_is_beyond_the_window_can_not_be_trained():
    admission = make(max_staleness=3, window=2)
    for _ in range(4):
        lease(admission)
    with pytest.raises(ValueError, match=r"group 2 may not overtake group 0: schedule\.window = 2 lets 1 younger"):
        admission.trained(1, [1, 2])
    admission.trained(1, [1, 0, 3])
    with pytest.raises(ValueError, match="group 1 was consumed already"):
        admission.trained(1, [2, 1])
    with pytest.raises(ValueError, match="group 4 was consumed, but only 4 groups were leased"):
        admission.trained(2, [4])


def test_a_lost_lease_is_given_again_for_the_missing_episodes_only_and_first():
    admission = make()
    for _ in range(3):
        lease(admission)
    assert admission.leases("a") == [0, 1, 2]
    assert admission.lose("a", lambda g: [1] if g == 1 else []) == [1]
    assert admission.leases("a") == []
    again = admission.lease("b", free=100)
    assert (again.group_index, again.episode_indices, again.task_seed) == (1, (1,), 1001)


def test_a_group_that_was_played_but_never_arrived_is_played_again():
    admission = make()
    lease(admission)  # played to its end, sent, and lost with its sender
    assert admission.lose("a", lambda g: [0, 1]) == [0]
    assert lease(admission, "b") == (0, (0, 1))


def test_what_was_lost_and_yet_arrived_is_not_played_again():
    admission = make()
    lease(admission)
    assert admission.lose("a", lambda g: [1]) == [0]
    admission.trained(1, [0])
    assert lease(admission) == (1, (0, 1))


def test_a_trained_group_is_nobodys():
    admission = make()
    lease(admission, "a")
    lease(admission, "b")
    admission.trained(1, [0, 1])
    assert admission.leases("a") == admission.leases("b") == []


def test_nothing_is_exhausted_before_the_last_group_is_trained():
    admission = make(max_staleness=4, steps=1)
    for _ in range(2):
        lease(admission)
    assert not admission.can_lease()
    assert not admission.exhausted  # "a" may still die, and its groups have to be played again
    admission.trained(1, [0, 1])
    assert admission.exhausted


# -- whole groups, and parts ------------------------------------------------------------------------------------------


def test_a_group_is_leased_whole_or_when_there_is_room_for_it():
    admission = make(samples_per_group=8)
    assert lease(admission, free=7, at_once=16) is None
    assert lease(admission, free=8, at_once=16) == (0, tuple(range(8)))


def test_a_group_larger_than_a_generator_is_leased_in_parts():
    admission = make(samples_per_group=8)
    assert lease(admission, "a", free=5, at_once=5) == (0, (0, 1, 2, 3, 4))
    assert lease(admission, "b", free=2, at_once=5) == (0, (5, 6)), "the rest of a torn group goes where there is room"
    assert lease(admission, "a", free=1, at_once=5) == (0, (7,))
    assert admission.leases("a") == admission.leases("b") == [0]
    assert admission.lose("a", lambda g: [0, 4, 5, 7]) == [0]
    assert lease(admission, "c", free=8) == (0, (0, 4, 7)), "what b plays stays with b"


def test_a_part_may_be_leased_into_any_room_if_so_configured():
    admission = make(samples_per_group=8, split="capacity")
    assert lease(admission, free=3, at_once=16) == (0, (0, 1, 2))
    assert lease(admission, free=16) == (0, (3, 4, 5, 6, 7))


def test_idle_generators_share_a_group_where_there_are_fewer_groups_than_generators():
    admission = make(max_staleness=0, groups_per_step=1, samples_per_group=8)
    assert lease(admission, "a", among=3) == (0, (0, 1, 2))
    assert lease(admission, "b", among=2) == (0, (3, 4, 5))
    assert lease(admission, "c", among=1) == (0, (6, 7))
    assert lease(admission, "d", among=1) is None
    many = make(max_staleness=0, groups_per_step=3, samples_per_group=8)
    assert lease(many, "a", among=3) == (0, tuple(range(8))), "one whole group for each"


# -- versions ---------------------------------------------------------------------------------------------------------


def test_a_lease_names_the_oldest_weights_whose_tokens_cannot_become_too_old():
    admission = make(max_staleness=1, groups_per_step=2)
    named = {}
    for version in range(1, 5):
        while got := admission.lease("a", free=2):
            named[got.group_index] = got.version
        publish(admission, version, 2 * version - 2, 2 * version - 1)
    assert named == {g: max(0, g // 2 - 1) for g in range(10)}, "trained by the step after the next"


def test_what_is_leased_again_may_be_played_by_the_weights_that_it_could_be_played_by_before():
    admission = make(max_staleness=2, groups_per_step=1, window=3, steps=9)
    first = [admission.lease("a", free=2).version for _ in range(3)]
    publish(admission, 1, 1)
    assert admission.lease("a", free=2).version == 1
    publish(admission, 2, 2)
    assert admission.lose("a", lambda g: [0, 1]) == [0, 3]
    assert first == [0, 0, 0]
    assert [admission.lease("b", free=2).version for _ in range(3)] == [0, 1, 2]


def test_a_version_counter_never_goes_backwards_across_restarts():
    admission = make(max_staleness=3)
    for _ in range(6):
        lease(admission)
    publish(admission, 1, 0, 1)
    old = admission.snapshot()
    publish(admission, 2, 2, 3)
    with pytest.raises(ValueError, match="version 1 was published after version 2"):
        admission.published(1)
    with pytest.raises(ValueError, match="version 3 was published, but no step has made it"):
        admission.published(3)
    with pytest.raises(ValueError, match="a step made version 2 after version 2"):
        admission.trained(2, [4])
    with pytest.raises(ValueError, match="a snapshot of version 1 cannot follow version 2"):
        admission.restore(old, 0)
    restarted = make(max_staleness=3)
    restarted.restore(msgspec.json.decode(msgspec.json.encode(admission.snapshot())), 4)
    assert restarted.version == 2
    with pytest.raises(ValueError, match="version 1 was published after version 2"):
        restarted.published(1)
    assert restarted.snapshot() == admission.snapshot()
    assert restarted.leases("a") == [4, 5]


@pytest.mark.parametrize(
    ("staleness", "window", "per_version", "bound"),
    [(0, 1, 4, 0), (0, 9, 4, 0), (1, 1, 4, 1), (1, 2, 4, 2), (1, 5, 4, 2), (1, 6, 4, 3), (2, 4, 1, 5), (3, 4, 2, 5)],
)
def test_the_bound_in_closed_form(staleness, window, per_version, bound):
    assert oldest_age(staleness, window, per_version) == bound


def test_a_resumed_run_plays_what_the_learner_lacks_and_nothing_else():
    """Groups 0 and 1 are trained. Of 2 one episode is here; 3 is whole; 4 and 5, leased after the checkpoint, in part."""
    admission = make(max_staleness=3, groups_per_step=1, samples_per_group=2, window=4, steps=9)
    for _ in range(4):
        lease(admission, "dead")
    publish(admission, 1, 0)
    publish(admission, 2, 1)
    resumed = make(max_staleness=3, groups_per_step=1, samples_per_group=2, window=4, steps=9)
    resumed.restore(msgspec.json.decode(msgspec.json.encode(admission.snapshot())), 2)
    here = {2: [1], 3: [0, 1], 5: [0]}
    back = resumed.adopt(5, lambda g: [i for i in range(2) if i not in here.get(g, [])])
    assert back == [2, 4, 5]
    assert resumed.slots_taken == 4
    assert [lease(resumed) for _ in range(4)] == [(2, (0,)), (4, (0, 1)), (5, (1,)), None]
    assert resumed.leases("dead") == []


def test_a_resumed_run_never_has_more_slots_than_it_was_given():
    admission = make(max_staleness=1, groups_per_step=2)
    back = admission.adopt(100, lambda g: [0])
    assert back == [0, 1, 2, 3]
    assert admission.slots_taken == admission.slots == 4
    assert admission.adopt(-1, lambda g: []) == []  # All of them are here, and wait to be trained.
    assert admission.full
