"""Where a run's processes go: the rules of `placement_plan.py` on any hosts, and what is refused, with the fix."""

import itertools
from collections import Counter

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from r3async.actors.placement_plan import (
    PlacementError,
    ResourceDemand,
    find_smallest_layout,
    make_supposed_hosts,
    plan_free_layout,
    plan_layout,
)
from r3async.config import ConfigError, load_config
from r3async.world import ClusterNode, InsufficientResourcesError

COLOCATE = st.sampled_from(["off", "share"])


def host(name, gpus, free=None, cpus=32, free_cpus=None):
    return ClusterNode(
        name, name, cpus, gpus, cpus if free_cpus is None else free_cpus, gpus if free is None else free, 2.0**40
    )


@st.composite
def clusters(draw):
    out = []
    for index in range(draw(st.integers(1, 6))):
        gpus, cpus = draw(st.integers(0, 8)), draw(st.integers(1, 20))
        out.append(host(f"h{index}", gpus, draw(st.integers(0, gpus)), cpus, draw(st.integers(0, cpus))))
    return out


@st.composite
def demands(draw):
    together = draw(st.sampled_from([1, 2, 4]))
    ranks, engines = together * draw(st.integers(1, 6)), draw(st.integers(0, 9))
    return ResourceDemand(ranks, together, engines, draw(st.sampled_from([1, 2, 4])), draw(COLOCATE))


@given(demands(), clusters())
def test_every_process_has_its_devices_and_no_host_gives_more_than_it_has(demand, nodes):
    try:
        layout = plan_layout(demand, nodes)
    except PlacementError:
        return
    on_gpus = any(node.gpus for node in nodes)
    for node in nodes:
        here = [bundle for bundle in layout.bundles if bundle.node_id == node.node_id]
        assert sum(bundle.gpus for bundle in here) <= node.free_gpus
        assert sum(bundle.cpus for bundle in here) <= node.free_cpus
    at = layout.rank_hosts()
    assert len(at) == demand.ranks
    assert len(layout.engines) == demand.engines
    assert bool(layout.ranks) == (demand.ranks > 1)
    assert layout.host_of(layout.learner) == at[0]  # it publishes what the first rank writes
    for first in range(0, demand.ranks, demand.ranks_per_host):
        assert len(set(at[first : first + demand.ranks_per_host])) == 1
    assert len([1 for one, other in itertools.pairwise(at) if one != other]) == len(set(at)) - 1  # in one run each
    given_away = Counter()
    for seat in (layout.ranks or [layout.learner]) + layout.engines:
        given_away[seat.bundle] += seat.gpus
    for index, gpus in given_away.items():
        assert gpus <= layout.bundles[index].gpus + 1e-9
        assert gpus > 0.9 * layout.bundles[index].gpus or not on_gpus
    for seat in layout.engines:
        assert seat.gpus == demand.devices_per_engine * on_gpus or (demand.colocate == "share" and seat.gpus < 1)
        bundle = layout.bundles[seat.bundle]
        assert bundle.can_move == (seat.gpus == demand.devices_per_engine * on_gpus)


@given(st.integers(1, 40), st.integers(0, 40), st.integers(1, 8), st.integers(1, 8))
def test_on_hosts_that_are_alike_everything_is_placed_that_has_a_gpu(ranks, engines, hosts, gpus):
    demand, nodes = ResourceDemand(ranks, 1, engines, 1), make_supposed_hosts(hosts, gpus)
    if ranks + engines <= hosts * gpus:
        assert len(set(plan_layout(demand, nodes).rank_hosts())) == -(-ranks // gpus)
    else:
        with pytest.raises(PlacementError):
            plan_layout(demand, nodes)


@given(demands(), st.sampled_from([1, 2, 4, 8]))
def test_the_hosts_that_a_plan_supposes_are_as_few_as_will_do(demand, gpus):
    try:
        _, nodes = find_smallest_layout(demand, gpus)
    except PlacementError:
        with pytest.raises(PlacementError):
            plan_layout(demand, make_supposed_hosts(50, gpus))
        return
    assume(len(nodes) > 1)
    with pytest.raises(PlacementError):
        plan_layout(demand, make_supposed_hosts(len(nodes) - 1, gpus))


def test_ranks_leave_room_for_wide_engines():
    """On the host of 8 they would fit as well, and then no engine of 8 would."""
    nodes = [host("wide", 8), host("narrow", 4)]
    layout = plan_layout(ResourceDemand(4, 4, 1, 8), nodes)
    assert set(layout.rank_hosts()) == {"narrow"}
    assert layout.describe_hosts(nodes) == ["wide: engine 0", "narrow: ranks 0-3 of the learner"]


def test_engines_are_where_the_weights_are_and_on_cpus_where_nobody_is():
    nodes = [host("a", 8), host("b", 8), host("c", 8)]
    layout = plan_layout(ResourceDemand(4, 1, 8, 1), nodes)
    assert Counter(map(layout.host_of, layout.engines)) == {"a": 4, "b": 4}
    bare = [host("a", 0, cpus=8), host("b", 0, cpus=8)]
    layout = plan_layout(ResourceDemand(2, 1, 4, 1), bare)
    assert layout.rank_hosts() == ["a", "a"]
    assert Counter(map(layout.host_of, layout.engines)) == {"b": 3, "a": 1}
    assert not layout.gpu_count


def test_engines_share_a_gpu_with_a_rank_only_where_that_is_asked_for_and_needed():
    one, two = [host("a", 1)], [host("a", 2)]
    with pytest.raises(PlacementError, match=r'place for 0 of 1 engines .*`generator.colocate` = "share"'):
        plan_layout(ResourceDemand(1, 1, 1, 1), one)
    shared = plan_layout(ResourceDemand(1, 1, 2, 1, "share"), one)
    assert [shared.learner.gpus, *(seat.gpus for seat in shared.engines)] == [0.3333] * 3
    assert [seat.bundle for seat in shared.engines] == [0, 0]
    assert [(b.cpus, b.gpus) for b in shared.bundles] == [(3, 1)]
    assert shared.describe_hosts(one) == ["a: rank 0 of the learner; engines 0-1 on the ranks' GPUs"]
    apart = plan_layout(ResourceDemand(1, 1, 1, 1, "share"), two)
    assert (apart.learner.gpus, apart.engines[0].gpus, apart.gpu_count) == (1, 1, 2)
    with pytest.raises(PlacementError, match="tensor_parallel_size` = 1"):
        plan_layout(ResourceDemand(4, 1, 1, 4, "share"), [host("a", 4)])


REFUSED = [
    ("moe_30b_r3", 1, 8, ("0 of 8 engines", "host 1: 8 GPUs", "generator.count")),
    ("moe_30b_r3", 1, 2, ("8 ranks need 8 GPUs", "learner.parallel")),
    ("moe_30b_r3", 1, 1, ("2 tensor-parallel ranks", "learner.parallel.tp")),
    ("moe_235b_r3", 2, 8, ("64 ranks need 64 GPUs", "host 1, host 2: 8 GPUs", "learner.parallel")),
    ("moe_235b_r3", 8, 8, ("0 of 4 engines of 8 GPUs on one host", "and 5 more: 8 GPUs", "tensor_parallel_size")),
    ("dense_7b", 1, 2, ("4 ranks need 4 GPUs", "learner.parallel")),
]


@pytest.mark.parametrize(("preset", "hosts", "gpus", "parts"), REFUSED)
def test_a_preset_on_a_cluster_that_cannot_hold_it_is_refused_with_what_is_there(preset, hosts, gpus, parts):
    with pytest.raises(ConfigError) as caught:
        plan_free_layout(ResourceDemand.from_config(load_config(preset)), make_supposed_hosts(hosts, gpus))
    for part in parts:
        assert part in str(caught.value)


def test_what_others_use_is_another_refusal_and_names_what_is_free():
    demand = ResourceDemand(4, 4, 2, 1)
    nodes = [host("a", 8, free=3), host("b", 4, free=4, free_cpus=2)]
    with pytest.raises(
        InsufficientResourcesError, match=r"others use it: .*a: 3 of 8 GPUs free, 32 CPUs; b: 4 GPUs, 2 of 32 CPUs free"
    ):
        plan_free_layout(demand, nodes)
    with pytest.raises(PlacementError):
        plan_free_layout(ResourceDemand(16, 1, 0, 1), nodes)


def test_without_hosts_nothing_is_placed():
    with pytest.raises(PlacementError, match="there is no host"):
        plan_layout(ResourceDemand(1, 1, 1, 1), [])
