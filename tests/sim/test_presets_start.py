"""Every preset is planned, and starts on hosts as its plan names them, simulated: each process at its place, weights and
trajectories over whatever lies between. On one host less, and with settings that cannot work there, it is refused by name
before anything is reserved. On a real Ray: `ray/test_placement.py`."""

import time
from collections import Counter

import pytest

from r3async.actors.placement_plan import PlacementError, ResourceDemand, find_smallest_layout, with_transport_host
from r3async.config import ConfigError, load_config
from r3async.rollout.scripted import build_scripted_engine
from r3async.tools.plan import make_run_plan
from r3async.tools.presets import list_preset_paths
from tests.helpers.starts import SHORT, PlacedLauncher, ScriptedPlayer, make_described_model
from tests.sim.test_presets_run import CHANCE, rows_for
from tests.sim.whole import Machine, renderer

NAMES = [path.stem for path in list_preset_paths()]
IN_MEMORY = ["weights.directory=/memory"]
ON_SEVERAL_HOSTS = ["moe_30b_r3", "moe_235b_r3", "qwen3_5_35b_r3"]


@pytest.fixture
def cluster(tmp_path, monkeypatch):
    """Return a function that makes a cluster. Engines read the preset's model on the real disk."""
    machines = []

    def make(config, hosts, gpus):
        model = make_described_model(tmp_path / "model", config)
        monkeypatch.setattr(
            ScriptedPlayer, "make_engine", lambda self, path, seed: build_scripted_engine(str(model), self.world)
        )
        monkeypatch.setattr(
            ScriptedPlayer, "make_renderer", lambda self, path: renderer(str(model), self.config.episode.template_args)
        )
        names = tuple(f"host-{index:02}" for index in range(hosts))
        machines.append(Machine(tmp_path / "runs", model, hosts=names, gpus=gpus))
        return machines[-1]

    yield make
    for machine in machines:
        machine.close()


def hosts_of_the_plan(config):
    """Return how many hosts, with how many GPUs each, the plan of a preset is for."""
    plan = make_run_plan(config)
    return (len(plan.hosts), config.cluster.gpus_per_node) if plan.gpus else (1, 0)


def start(machine, name, *overrides):
    machine.run_dir.mkdir(parents=True, exist_ok=True)
    with CHANCE:
        machine.train(*overrides, preset=name, settings=[*SHORT, *IN_MEMORY], pipeline=PlacedLauncher)


@pytest.mark.long
@pytest.mark.parametrize("name", NAMES)
def test_a_preset_starts_on_the_hosts_that_its_plan_names(name, cluster, tmp_path):
    rows = rows_for(name, tmp_path)
    config = load_config(name, rows)
    hosts, gpus = hosts_of_the_plan(config)
    machine = cluster(config, hosts, gpus)
    start(machine, name, *rows)
    assert len(machine.rows()) == 1, "a step was trained"

    (placed,) = machine.events("placed")
    (ranks,) = machine.events("ranks_placed")
    assert ranks["hosts"] == (placed["ranks"] if config.learner.parallel.world_size > 1 else [])
    began = {event["role"]: event["host"] for event in machine.events("generator_started")}
    assert [began[f"generator-{index}"] for index in range(config.generator.count)] == placed["engines"]
    if gpus:
        layout, _ = find_smallest_layout(ResourceDemand.from_config(config), gpus)
        assert Counter(placed["ranks"]) == Counter(f"host-{int(n.split('-')[1]):02}" for n in layout.rank_hosts())
        assert (with_transport_host(config, layout).transport.host == "") == (name in ON_SEVERAL_HOSTS)
    assert not machine.events("generator_lost")


@pytest.mark.parametrize("name", ["math_1b", "dense_7b", "moe_30b_lora", *ON_SEVERAL_HOSTS])
def test_on_less_it_is_refused_by_name_before_anything_is_reserved(name, cluster, tmp_path):
    rows = rows_for(name, tmp_path)
    config = load_config(name, rows)
    hosts, gpus = hosts_of_the_plan(config)
    less = (hosts - 1, gpus) if hosts > 1 else (1, make_run_plan(config).gpus - 1)
    machine, began = cluster(config, *less), time.monotonic()
    with pytest.raises(PlacementError, match=r"`learner\.parallel`|`generator\.count`") as refused:
        start(machine, name, *rows)
    print(f"{name}: refused on {less[0]} x {less[1]} GPUs in {time.monotonic() - began:.2f} s: {refused.value}")
    assert machine.simulation.reservations == []


@pytest.mark.long
@pytest.mark.parametrize("name", ON_SEVERAL_HOSTS)
@pytest.mark.parametrize(
    ("setting", "reason"),
    [
        ("transport.host=127.0.0.1", "`transport.host`.*leave it out"),
        ("weights.backend=shared_memory", 'weights.backend="tcp"'),
        (
            "weights.backend=nccl",
            'transport.trusted_network=true|the learner.s ranks are on .* set weights.backend="tcp"',
        ),
    ],
)
def test_a_setting_that_cannot_work_there_is_refused_by_the_plan_and_by_the_start(name, setting, reason, cluster):
    with pytest.raises(ConfigError, match=reason):
        make_run_plan(load_config(name, [setting]))
    config = load_config(name)
    machine, began = cluster(config, *hosts_of_the_plan(config)), time.monotonic()
    with pytest.raises(ConfigError, match=reason) as refused:
        start(machine, name, setting)
    print(f"{name} {setting}: refused in {time.monotonic() - began:.2f} s: {refused.value}")
    assert machine.simulation.reservations == []
