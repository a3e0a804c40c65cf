"""The bound on staleness, under any order of finishes, deaths and installations."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from r3async.scheduling.admission import Admission


def make(max_staleness=1, groups_per_step=2, samples_per_group=2, steps=5):
    return Admission(
        max_staleness=max_staleness,
        groups_per_step=groups_per_step,
        samples_per_group=samples_per_group,
        steps=steps,
        task_seed=lambda g: 1000 + g,
    )


@given(
    st.integers(0, 3),
    st.integers(1, 3),
    st.integers(1, 6),
    st.lists(
        st.tuples(st.sampled_from(["lease", "finish", "arrive", "die", "train", "install"]), st.integers(0, 7)),
        max_size=120,
    ),
)
def test_no_group_is_ever_older_than_the_bound_and_none_is_lost(staleness, per_step, steps, events):
    admission = make(staleness, per_step, 2, steps)
    leased_at, arrived, installed, trained_version = {}, {}, 0, 0
    holder, sent = {}, {}

    def try_lease(owner):
        if admission.can_lease():
            lease = admission.lease(owner)
            holder[lease.group_index] = (owner, lease.episode_indices)
            leased_at.setdefault(lease.group_index, installed)

    def finish(owner):
        mine = sorted(g for g, (who, _) in holder.items() if who == owner)
        if mine:
            _, episodes = holder.pop(mine[0])
            sent[mine[0]] = (owner, episodes)

    def arrive(owner):
        for g in [g for g, (who, _) in sent.items() if who == owner][:1]:
            arrived.setdefault(g, set()).update(sent.pop(g)[1])

    def train():
        nonlocal trained_version
        batch = range(trained_version * per_step, (trained_version + 1) * per_step)
        if trained_version < steps and all(arrived.get(g) == {0, 1} for g in batch):
            for g in batch:
                assert trained_version - leased_at[g] <= staleness
            trained_version += 1

    def install():
        nonlocal installed
        installed = trained_version
        admission.installed(installed)

    def die(owner, partly):
        mine = [g for g, (who, _) in holder.items() if who == owner]
        for g in mine:
            if partly:
                arrived.setdefault(g, set()).add(holder[g][1][0])
            del holder[g]
        for g in [g for g, (who, _) in sent.items() if who == owner]:
            del sent[g]  # finished, and lost with its sender before the learner had it
        admission.lose(owner, lambda g: [i for i in (0, 1) if i not in arrived.get(g, set())])

    for kind, number in events:
        owner = f"g{number % 2}"
        if kind == "lease":
            try_lease(owner)
        elif kind == "finish":
            finish(owner)
        elif kind == "arrive":
            arrive(owner)
        elif kind == "die":
            die(owner, number > 3)
        elif kind == "train":
            train()
        else:
            install()
        assert admission.slots_taken <= admission.slots
    for _ in range(10 * steps * per_step * (staleness + 1) + 10):  # from any state the run can end
        for owner in ("g0", "g1"):
            try_lease(owner)
            finish(owner)
            arrive(owner)
        train()
        install()
    assert trained_version == steps
    assert admission.exhausted


def test_staleness_zero_waits_for_the_installation_of_each_step():
    admission = make(max_staleness=0)
    groups = [admission.lease("g").group_index for _ in range(2)]
    assert groups == [0, 1]
    assert not admission.can_lease()
    assert not admission.can_lease()
    admission.installed(1)
    assert admission.lease("g").group_index == 2


def test_a_lost_lease_is_given_again_for_the_missing_episodes_only_and_first():
    admission = make()
    for _ in range(3):
        admission.lease("a")
    assert admission.leases("a") == [0, 1, 2]
    assert admission.lose("a", lambda g: [1] if g == 1 else []) == [1]
    assert admission.leases("a") == []
    again = admission.lease("b")
    assert (again.group_index, again.episode_indices, again.task_seed) == (1, (1,), 1001)


def test_a_version_can_not_be_uninstalled():
    admission = make()
    admission.installed(2)
    with pytest.raises(ValueError, match="after 2"):
        admission.installed(1)


def test_a_group_that_was_played_but_never_arrived_is_played_again():
    admission = make()
    admission.lease("a")  # played to its end, sent, and lost with its sender
    assert admission.lose("a", lambda g: [0, 1]) == [0]
    assert admission.lease("b").episode_indices == (0, 1)


def test_a_group_is_nobodys_once_weights_trained_from_it_are_installed():
    admission = make()
    admission.lease("a")
    admission.installed(1)
    assert admission.leases("a") == []


def test_nothing_is_exhausted_before_the_last_weights_are_installed():
    admission = make(max_staleness=4, steps=1)
    for _ in range(2):
        admission.lease("a")
    assert not admission.can_lease()
    assert not admission.exhausted  # "a" may still die, and its groups have to be played again
    admission.installed(1)
    assert admission.exhausted
