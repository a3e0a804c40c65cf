"""The presets on logical GPUs of a real Ray: each is where it was planned, or refused by name, and starts on a cluster of the
size that its plan says. All presets start simulated, too: `sim/test_presets_start.py`."""

import asyncio
import io
import os
import time
from collections import Counter
from pathlib import Path

import pytest
from rich.console import Console

from r3async.actors.placement_plan import PlacementError, ResourceDemand, plan_layout
from r3async.actors.process import RunFailed
from r3async.actors.run_placements import reserve_placements
from r3async.config import Config, ConfigError, load_config
from r3async.record.reading import read_json_objects
from r3async.tools.plan import make_run_plan
from r3async.tools.presets import list_preset_paths
from r3async.tools.training_session import train
from r3async.world import ActorOptions, World
from r3async.world.real import REAL_WORLD
from tests.helpers.starts import SHORT, PlacedLauncherOnRay, make_described_model
from tests.sim.test_presets_run import CHANCE, rows_for

pytestmark = [pytest.mark.ray, pytest.mark.timeout(400)]

PER_HOST = {"num_cpus": 64, "object_store_memory": 80 * 2**20, "include_dashboard": False}
SHAPES = ((12, 8), (2, 8), (1, 8), (1, 2), (1, 1))
"""Hosts, and GPUs of each. The first three are one cluster, from which hosts are taken away."""
EACH_TIME = ((2, 8), (1, 8), (1, 1))
"""The others take longer; `unit/test_placement_plan.py` plans for any."""
STARTED = {
    (12, 8): ["moe_235b_r3"],
    (2, 8): ["moe_30b_r3", "qwen3_5_35b_r3"],
    (1, 8): ["moe_30b_lora", "dense_7b", "math_1b"],
    (1, 1): ["math_one_gpu"],
}
"""Presets by the cluster that their plan is for."""
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
    """Yield a function that makes the cluster of a shape, in the order of `SHAPES`."""
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
        if gpus == 8 and workers:  # of the shape before
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


@pytest.fixture(
    scope="module",
    params=[s if s in EACH_TIME else pytest.param(s, marks=pytest.mark.nightly) for s in SHAPES],
    ids=str,
)
def shape(request, shapes):
    """Make a cluster, and return its hosts and the GPUs of each."""
    shapes(*request.param)
    return request.param


def presets() -> dict[str, Config]:
    return {path.stem: load_config(path.stem, SECONDS) for path in list_preset_paths()}


def planned(config: Config):
    try:
        return plan_layout(ResourceDemand.from_config(config), REAL_WORLD.actors.list_nodes())
    except PlacementError as error:
        return str(error)


async def until(look, wanted):
    """What the cluster says of itself is as old as the last report of its hosts."""
    deadline = time.monotonic() + 240
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


async def test_every_preset_is_placed_as_planned_or_refused_by_name(shape):
    hosts, gpus = shape
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
    assert (outcome["moe_235b_r3"] == "placed") == (hosts == 12)
    assert (outcome["moe_30b_lora"] == "placed") == (gpus == 8)
    assert outcome["math_one_gpu"] == "placed"
    assert (outcome["dense_7b"] == "placed") == (gpus == 8)


def test_a_preset_for_two_hosts_starts_there(shape, tmp_path, monkeypatch):
    if shape == (2, 8):
        check_starts(shape, STARTED[shape][:1], tmp_path, monkeypatch)


@pytest.mark.nightly
def test_the_other_presets_for_gpus_start_on_the_cluster_of_their_plan(shape, tmp_path, monkeypatch):
    check_starts(shape, STARTED.get(shape, [])[shape == (2, 8) :], tmp_path, monkeypatch)


def check_starts(shape, names, tmp_path, monkeypatch):
    """Real actors and sockets, over the address that the learner chose; ranks that hold their GPUs, and engines from a
    script. A setting with which engines would not reach the learner is refused, and nothing stays reserved."""
    monkeypatch.setenv("RAY_ADDRESS", ray_address())
    monkeypatch.setattr("r3async.tools.preflight.check_buildable", lambda config: None)  # the models have no weights
    for name in names:
        rows = [*rows_for(name, tmp_path), f"weights.directory={tmp_path / 'weights'}"]
        config = load_config(name, rows)
        assert len(make_run_plan(config).hosts) == shape[0]
        model = make_described_model(tmp_path / Path(config.model.path).name, config)
        words = [*rows, *SHORT, f"model.path={model}", f"name={name}"]
        if shape[0] > 1:
            before = time.monotonic()
            with pytest.raises(ConfigError, match=r"`transport\.host`") as refused:
                start(load_config(name, [*words, "transport.host=127.0.0.1"]), name, tmp_path / "refused")
            print(f"{name}: refused in {time.monotonic() - before:.1f} s: {refused.value}")
        run_dir = start(load_config(name, words), name, tmp_path)
        assert [row["step"] for row in read_json_objects(run_dir / "metrics.jsonl")] == [1]
        events = read_json_objects(run_dir / "events.jsonl")
        (placed,), (ranks,) = ([e for e in events if e["event"] == what] for what in ("placed", "ranks_placed"))
        if ranks["hosts"]:
            assert ranks["hosts"] == placed["ranks"]
            seen = [(host, *gpus) for host, gpus in zip(ranks["hosts"], ranks["gpus"], strict=True)]
            assert len(set(seen)) == len(seen), "each rank has one GPU, and no other has it"
            assert all(len(each) == 2 for each in seen)


def ray_address() -> str:
    import ray

    return ray.get_runtime_context().gcs_address


def start(config: Config, name: str, root):
    """Make a run whose ranks and engines need no GPU, and return its directory."""
    screen, began = io.StringIO(), time.monotonic()
    with CHANCE:
        train(config, name, Console(file=screen, width=160), root, PlacedLauncherOnRay)
    print(f"{name}: started, and trained a step, in {time.monotonic() - began:.1f} s")
    return root / name


async def test_stubs_of_ranks_and_engines_see_their_own_gpus(shape):
    """On the last cluster, of one GPU: rank and engine share it. Who comes then is told what is free."""
    if shape != (1, 1):
        return
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
