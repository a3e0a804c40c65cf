"""The presets on logical GPUs of a real Ray: each is where it was planned, or refused by name."""

import asyncio
import os
import time
from collections import Counter

import pytest

from r3async.actors.placement import PlacementError, ResourceDemand, plan_layout, reserve_placements
from r3async.actors.process import RunFailed
from r3async.config import Config, load_config
from r3async.tools.presets import list_preset_paths
from r3async.world import ActorOptions, World
from r3async.world.real import REAL_WORLD

pytestmark = [pytest.mark.ray, pytest.mark.timeout(400)]

PER_HOST = {"num_cpus": 64, "object_store_memory": 80 * 2**20, "include_dashboard": False}
SHAPES = ((8, 8), (2, 8), (1, 8), (1, 2), (1, 1))
"""Hosts, and GPUs of each. The first three are one cluster, from which hosts are taken away."""
EACH_TIME = ((2, 8), (1, 8), (1, 1))
"""The others have the same outcome; `unit/test_places.py` plans for any."""
SECONDS = ["cluster.wait_seconds=8"]


class Stub:
    """In the place of an engine or a rank."""

    def __init__(self, world: World):
        pass

    async def where(self) -> tuple[str, list[str]]:
        import ray

        found = os.environ.get("CUDA_VISIBLE_DEVICES", "")
        return ray.get_runtime_context().get_node_id(), [gpu for gpu in found.split(",") if gpu]


@pytest.fixture(scope="module")
def shapes():
    """Yields a function that makes the cluster of a shape, in the order of `SHAPES`."""
    import ray
    from ray.cluster_utils import Cluster

    hidden = os.environ.pop("CUDA_VISIBLE_DEVICES", None)  # Ray refuses logical GPUs where it names fewer

    clusters, workers = [], []

    def end():
        ray.shutdown()
        for cluster in clusters:
            cluster.shutdown()
        clusters.clear()
        workers.clear()

    def make(hosts, gpus):
        if gpus == 8 and workers:
            while len(workers) >= hosts:
                clusters[-1].remove_node(workers.pop())
        else:
            end()
            clusters.append(Cluster(initialize_head=True, head_node_args=PER_HOST | {"num_gpus": gpus}))
            workers.extend(clusters[-1].add_node(wait=False, num_gpus=gpus, **PER_HOST) for _ in range(hosts - 1))
            clusters[-1].wait_for_nodes()
            ray.init(address=clusters[-1].address, logging_level="error", log_to_driver=False)

    yield make
    end()
    if hidden is not None:
        os.environ["CUDA_VISIBLE_DEVICES"] = hidden


def presets() -> dict[str, Config]:
    return {path.stem: load_config(path.stem, SECONDS) for path in list_preset_paths()}


def planned(config: Config):
    try:
        return plan_layout(ResourceDemand.from_config(config), REAL_WORLD.actors.list_nodes())
    except PlacementError as error:
        return str(error)


async def until(look, wanted):
    """What the cluster says of itself is as old as the last report of its hosts."""
    deadline = time.monotonic() + 60
    while (seen := look()) != wanted:
        assert time.monotonic() < deadline, (seen, wanted)
        await asyncio.sleep(0.1)


async def held(wanted: Counter):
    await until(lambda: +Counter({n.node_id: n.gpus - n.free_gpus for n in REAL_WORLD.actors.list_nodes()}), wanted)


async def found(places: list[ActorOptions]) -> list[tuple[str, list[str]]]:
    actors = [
        REAL_WORLD.actors.spawn_actor(Stub, name=f"stub-{i}", actor_options=place) for i, place in enumerate(places)
    ]
    try:
        return [await actor.call("where", timeout=120) for actor in actors]
    finally:
        for actor in actors:
            REAL_WORLD.actors.kill_actor(actor)


@pytest.mark.parametrize(
    ("hosts", "gpus"), [s if s in EACH_TIME else pytest.param(*s, marks=pytest.mark.nightly) for s in SHAPES]
)
async def test_every_preset_is_placed_as_planned_or_refused_by_name(shapes, hosts, gpus):
    shapes(hosts, gpus)
    await until(lambda: [node.gpus for node in REAL_WORLD.actors.list_nodes()], [gpus] * hosts)
    outcome = {}
    for name, config in presets().items():
        plan = planned(config)
        if isinstance(plan, str):
            with pytest.raises(PlacementError) as refused:
                reserve_placements(REAL_WORLD, config)
            assert str(refused.value) == plan
            assert "`" in plan, "it names a setting"
            outcome[name] = "refused"
            continue
        places = reserve_placements(REAL_WORLD, config)  # within `cluster.wait_seconds`, or it raises
        try:
            assert places.layout == plan
            wanted = Counter()
            for bundle in plan.bundles:
                wanted[bundle.node_id] += bundle.gpus
            await held(+wanted)
            outcome[name] = "placed"
        finally:
            REAL_WORLD.actors.release_bundles(places.reservation)
            await held(Counter())
    assert outcome["quickstart"] == "placed"
    assert (outcome["moe_30b_r3"] == "placed") == (hosts > 1)
    assert outcome["moe_235b_r3"] == "refused"  # 12 hosts of 8
    assert (outcome["moe_30b_lora"] == "placed") == (gpus == 8)
    assert outcome["math_one_gpu"] == "placed"
    assert (outcome["dense_7b"] == "placed") == (gpus == 8)


async def test_stubs_of_ranks_and_engines_see_their_own_gpus(shapes):
    """On the last cluster, of one GPU: rank and engine share it. Who comes then is told what is free."""
    shapes(1, 1)
    config = load_config("quickstart", ["cluster.wait_seconds=1"])
    places = reserve_placements(REAL_WORLD, config)
    try:
        (node,) = REAL_WORLD.actors.list_nodes()
        assert await found([places.learner, *places.engines]) == [(node.node_id, ["0"])] * 2
        with pytest.raises(RunFailed, match=r"others use it: .*0 of 1 GPUs free.*waited 1 s, cluster.wait_seconds"):
            reserve_placements(REAL_WORLD, config)
    finally:
        REAL_WORLD.actors.release_bundles(places.reservation)
    wide = load_config("quickstart", ["cluster.wait_seconds=8", "generator.count=3", "learner.parallel={dp=2,ep=2}"])
    with pytest.raises(PlacementError, match="learner's 2 ranks need 2 GPUs"):
        reserve_placements(REAL_WORLD, wide)
