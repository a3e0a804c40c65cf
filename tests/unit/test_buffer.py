"""Groups leave in lease order and complete; what cannot be trained on is refused with the reason."""

import numpy as np
import pytest

from r3async.data.model_shape import RoutingShape
from r3async.data.tokens import Sample, TokenTable, Trajectory, Turn
from r3async.schedule.groups import GroupBuffer
from r3async.schedule.validation import InvalidTrajectory, validate_trajectories

ROUTING = RoutingShape(layers=2, top_k=2, num_experts=8)


def make_trajectory(group=0, episode=0, reward=1.0, **columns):
    n = 4
    table = {
        "token_ids": np.arange(n, dtype=np.int32),
        "loss_mask": np.array([False, False, True, True]),
        "rollout_logprobs": np.full(n, -1.0, np.float32),
        "policy_version": np.array([-1, -1, 3, 3], np.int32),
        "turn": np.array([-1, -1, 0, 0], np.int32),
        "rewards": np.array([0, 0, 0, reward], np.float32),
        "routed_experts": np.tile(np.array([3, 1], np.uint8), (n, 2, 1)),
        "routing_recorded": np.array([True, True, True, False]),
    }
    sample = Sample(f"g{group}e{episode}s0", TokenTable({**table, **columns}))
    return Trajectory(
        f"g{group}e{episode}", group, episode, 0, "gen", "env_done", [Turn(0, 0, 2, 4, reward, "stop")], [sample]
    )


def test_groups_leave_in_lease_order_whatever_order_they_arrive_in():
    buffer = GroupBuffer(2)
    for group, episode in [(1, 1), (1, 0), (0, 1), (2, 0)]:
        assert buffer.add(make_trajectory(group, episode), 10)
    assert not buffer.choose_groups(1, 1, 0)
    assert buffer.missing_in_group(0) == [0]
    assert buffer.missing_episodes(3) == {0: [0], 2: [1]}
    buffer.add(make_trajectory(0, 0), 10)
    assert buffer.choose_groups(2, 2, 0) == [0, 1]
    assert not buffer.choose_groups(3, 3, 0)
    groups = buffer.take_groups([0, 1])
    assert [[t.trajectory_id for t in g] for g in groups] == [["g0e0", "g0e1"], ["g1e0", "g1e1"]]
    assert buffer.oldest_group == 2


def test_an_episode_that_is_here_or_was_trained_is_not_added_again():
    buffer = GroupBuffer(1)
    assert buffer.add(make_trajectory(0), 1)
    assert not buffer.add(make_trajectory(0), 1)
    buffer.take_groups([0])
    assert not buffer.add(make_trajectory(0), 1)
    assert buffer.missing_in_group(0) == []


def test_incomplete_groups_can_not_be_taken():
    with pytest.raises(ValueError, match="not complete"):
        GroupBuffer(1).take_groups([0])


def test_a_window_lets_complete_groups_overtake_a_late_one_by_so_many_places():
    buffer = GroupBuffer(1, window=3)
    for group in (1, 3, 4, 2):
        buffer.add(make_trajectory(group), 1)
    assert buffer.choose_groups(2, 2, 0) == [1, 2]
    assert buffer.choose_groups(3, 3, 0) == []  # group 3 is three places behind group 0
    with pytest.raises(ValueError, match=r"may not overtake group 0: schedule\.window = 3 lets 2 younger groups"):
        buffer.take_groups([1, 3])
    assert buffer.count_ready_groups() == 4  # nothing was taken
    buffer.take_groups([1, 2])
    assert (buffer.oldest_group, buffer.missing_in_group(1), buffer.missing_in_group(0)) == (0, [], [0])
    assert not buffer.add(make_trajectory(2), 1)
    assert buffer.missing_episodes(3) == {0: [0]}
    buffer.add(make_trajectory(0), 1)
    assert buffer.choose_groups(1, 3, 100) == [0, 3, 4]  # the window moves on within a batch
    groups = buffer.take_groups([0, 3, 4])
    assert [g[0].group_index for g in groups] == [0, 3, 4]
    assert buffer.oldest_group == 5


def check(trajectory, **changes):
    limits = {"vocab_size": 10, "learner_version": 3, "max_tokens": 8, "routing": ROUTING, **changes}
    validate_trajectories([trajectory], **limits)


def test_a_sound_trajectory_passes_also_with_a_log_prob_that_is_not_finite():
    check(make_trajectory())
    check(make_trajectory(rollout_logprobs=np.array([0, 0, np.nan, -1], np.float32)))


@pytest.mark.parametrize(
    ("trajectory", "limits", "message"),
    [
        (make_trajectory(), {"vocab_size": 3}, "token id outside 0..2"),
        (make_trajectory(), {"learner_version": 2}, "versions 3..3, the learner is at 2"),
        (make_trajectory(), {"max_tokens": 3}, "learner.max_tokens_per_micro_batch = 3"),
        (make_trajectory(reward=float("nan")), {}, "reward that is not finite"),
        (make_trajectory(policy_version=np.full(4, -1, np.int32)), {}, "versions -1"),
        (make_trajectory(loss_mask=np.ones(4, bool)), {}, "first token"),
        (make_trajectory(routed_experts=np.zeros((4, 2, 2), np.uint8)), {}, "zero"),
        (make_trajectory(routed_experts=np.full((4, 2, 2), 5, np.uint8)), {}, "twice"),
        (make_trajectory(routed_experts=np.tile(np.array([8, 1], np.uint8), (4, 2, 1))), {}, "outside 0..7"),
        (make_trajectory(routed_experts=np.zeros((4, 3, 2), np.uint8)), {}, "shape"),
    ],
)
def test_what_can_not_be_trained_on_is_refused_with_sample_and_reason(trajectory, limits, message):
    with pytest.raises(InvalidTrajectory, match=message) as caught:
        check(trajectory, **limits)
    assert "g0e0" in str(caught.value)


def test_a_mixture_of_experts_without_routes_is_refused():
    trajectory = make_trajectory()
    trajectory.samples[0].table = trajectory.samples[0].table.without_columns("routed_experts", "routing_recorded")
    with pytest.raises(InvalidTrajectory, match="no routes"):
        check(trajectory)
    check(trajectory, routing=None)


def test_a_batch_is_enough_with_its_groups_or_with_its_tokens():
    buffer = GroupBuffer(1)
    for group, tokens in enumerate([3, 4, 5, 6]):
        t = make_trajectory(group, 0)
        t.samples[0] = Sample(
            "s", TokenTable.from_tokens(np.arange(8)).with_columns(loss_mask=np.arange(8) >= 8 - tokens)
        )
        buffer.add(t, 1)
    assert buffer.choose_groups(2, 2, 0) == [0, 1]
    assert buffer.choose_groups(1, 4, 0) == [0]
    assert buffer.choose_groups(1, 4, 7) == [0, 1]
    assert buffer.choose_groups(1, 4, 8) == [0, 1, 2]
    assert buffer.choose_groups(3, 4, 8) == [0, 1, 2]
    assert buffer.choose_groups(1, 3, 100) == [0, 1, 2]  # no more may be in flight
    assert buffer.choose_groups(1, 5, 100) == []  # the fifth is still to come
    assert buffer.choose_groups(1, 5, 12) == [0, 1, 2]
