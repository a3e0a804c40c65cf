"""The bound on staleness, under any order of finishes, deaths and installations."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from r3async.scheduling.admission import Admission, most_groups


def make(max_staleness=1, groups_per_step=2, samples_per_group=2, steps=5, steps_per_publication=1):
    return Admission(
        max_staleness=max_staleness,
        groups_per_step=groups_per_step,
        samples_per_group=samples_per_group,
        steps_per_publication=steps_per_publication,
        total_groups=steps * groups_per_step if steps else None,
        task_seed=lambda g: 1000 + g,
    )


@given(
    st.integers(0, 3),
    st.integers(1, 3),
    st.integers(1, 3),
    st.integers(1, 6),
    st.booleans(),
    st.lists(
        st.tuples(st.sampled_from(["lease", "finish", "arrive", "die", "train", "install"]), st.integers(0, 7)),
        max_size=120,
    ),
)
def test_no_group_is_ever_older_than_the_bound_and_none_is_lost(
    staleness, per_step, per_version, versions, by_tokens, events
):
    steps = versions * per_version
    admission = make(staleness, per_step, 2, None if by_tokens else steps, per_version)
    leased_at, arrived = {}, {}
    made, consumed, published, installed = 0, 0, [0], 0
    """Steps made, groups they consumed, groups consumed by each published version, version installed."""
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

    def train(wanted):
        """As many groups as have enough tokens: any number from the smallest to the largest that may be in flight."""
        nonlocal made, consumed
        most = per_step
        if by_tokens:
            most = most_groups(
                slots=admission.slots,
                groups_per_step=per_step,
                steps_left=per_version - made % per_version,
                consumed_since=consumed - published[-1],
            )
            assert most >= per_step
        batch = range(consumed, consumed + min(per_step + wanted, most))
        if made < steps and all(arrived.get(g) == {0, 1} for g in batch):
            for g in batch:
                assert len(published) - 1 - leased_at[g] <= staleness
            made, consumed = made + 1, batch.stop
            if made % per_version == 0:
                published.append(consumed)

    def install():
        nonlocal installed
        installed = len(published) - 1
        admission.installed(installed, published[-1])

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
            train(number)
        else:
            install()
        assert admission.slots_taken <= admission.slots
    for _ in range(30 * steps * per_step * (staleness + 1) + 10):  # from any state the run can end
        for owner in ("g0", "g1"):
            try_lease(owner)
            finish(owner)
            arrive(owner)
        train(7)
        install()
        if made == steps:
            break
    assert made == steps
    assert installed == versions
    assert admission.exhausted is not by_tokens


def test_staleness_zero_waits_for_the_installation_of_each_step():
    admission = make(max_staleness=0)
    groups = [admission.lease("g").group_index for _ in range(2)]
    assert groups == [0, 1]
    assert not admission.can_lease()
    assert not admission.can_lease()
    admission.installed(1, 2)
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
    admission = make(max_staleness=3)
    for _ in range(4):
        admission.lease("a")
    admission.installed(2, 4)
    for version, consumed in [(1, 4), (2, 2)]:
        with pytest.raises(ValueError, match="after version 2 of 4"):
            admission.installed(version, consumed)
    with pytest.raises(ValueError, match="5 groups were consumed, but only 4 leased"):
        admission.installed(3, 5)


def test_a_group_that_was_played_but_never_arrived_is_played_again():
    admission = make()
    admission.lease("a")  # played to its end, sent, and lost with its sender
    assert admission.lose("a", lambda g: [0, 1]) == [0]
    assert admission.lease("b").episode_indices == (0, 1)


def test_a_group_is_nobodys_once_weights_trained_from_it_are_installed():
    admission = make()
    admission.lease("a")
    admission.lease("b")
    admission.installed(1, 2)
    assert admission.leases("a") == admission.leases("b") == []


def test_nothing_is_exhausted_before_the_last_weights_are_installed():
    admission = make(max_staleness=4, steps=1)
    for _ in range(2):
        admission.lease("a")
    assert not admission.can_lease()
    assert not admission.exhausted  # "a" may still die, and its groups have to be played again
    admission.installed(1, 2)
    assert admission.exhausted
