"""One seed, one story: streams, clocks, processes, and the log that is the same in every Python process."""

from pathlib import Path

import pytest
import torch

from dev.simulation.world import Simulation, SimulationLog
from r3async.learner import build_learner
from r3async.weights.version_store import VersionStore
from r3async.world.files import replace_file
from tests.helpers.models import make_hf_model
from tests.helpers.parity import config


def test_streams_do_not_shift_each_other():
    one, two = Simulation(7), Simulation(7)
    one.rng_for("another").random()
    assert [one.rng_for("a").random(), one.rng_for("b").random()] == [
        two.rng_for("a").random(),
        two.rng_for("b").random(),
    ]
    assert one.rng_for("a").random() != one.rng_for("b").random()
    assert one.rng_for("a").random() != Simulation(8).rng_for("a").random()


def test_clocks_of_hosts():
    simulation = Simulation(1, hosts=("a", "b"))
    a, b = (simulation.begin_process(name, simulation.hosts[name]).world for name in "ab")
    assert a.clock.time() == b.clock.time()
    assert a.clock.monotonic() != b.clock.monotonic()  # nobody may compare them
    before = a.clock.monotonic()
    simulation.step_clock(simulation.hosts["a"], -3600.0)
    assert a.clock.time() == b.clock.time() - 3600.0
    assert a.clock.monotonic() == before
    simulation.close()


def test_unique_names_are_unique_and_come_from_the_seed():
    def names(seed: int) -> list[str]:
        simulation = Simulation(seed)
        worlds = [simulation.begin_process(name, simulation.hosts["host-0"]).world for name in ("a", "b", "a")]
        found = [world.unique_id() for world in worlds for _ in range(3)]
        simulation.close()
        return found

    assert names(1) == names(1)
    assert len(set(names(1) + names(2))) == 18
    assert {len(name) for name in names(1)} == {32}


def test_a_line_is_stable_and_the_hash_is_of_all_lines():
    log, heard = SimulationLog(lambda: 1.5), []
    log.listeners.append(lambda *event: heard.append(event))
    log.log_event("learner", "step", number=3, seconds=0.1 + 0.2, groups=[1, 2], text="two words", empty="")
    assert log.lines == ['1.500000 learner step number=3 seconds=0.3 groups=[1,2] text="two words" empty=""']
    assert heard[0][1:3] == ("learner", "step")
    before = log.compute_digest()
    log.log_detail("a calls b")
    assert len(log.lines) == 1
    assert log.compute_digest() != before
    again = SimulationLog(lambda: 1.5, keep_details=True)
    again.log_event("learner", "step", number=3, seconds=0.3, groups=[1, 2], text="two words", empty="")
    again.log_detail("a calls b")
    assert again.compute_digest() == log.compute_digest()
    assert len(again.lines) == 2


def test_a_world_is_not_sent():
    simulation = Simulation(1)
    world = simulation.begin_process("a", simulation.hosts["host-0"]).world
    with pytest.raises(TypeError, match="belongs to its process"):
        simulation.run(world.process, spawn_with(world))
    simulation.close()


async def spawn_with(world):
    world.actors.spawn_actor(list, world, name="x")


def test_weights_are_published_on_the_disk_of_their_host_and_go_with_a_killed_process():
    simulation = Simulation(1)
    host, folder = simulation.hosts["host-0"], Path("/weights")
    first, second = (simulation.begin_process(name, host) for name in ("first", "second"))
    weights = {"a": torch.ones(3)}
    published = [
        VersionStore(folder, world=process.world).write_tensors(1, weights, torch.float32)
        for process in (first, second)
    ]
    files = second.world.files
    assert len(files.list_names(folder)) == 2
    assert {files.stat(Path(manifest.path)).size for manifest in published} == {108}
    simulation.end_process(first, "a test")
    third = simulation.begin_process("third", host)
    VersionStore(folder, world=third.world).close()
    assert files.list_names(folder) == [Path(published[1].path).parent.name]
    simulation.close()


def test_the_scripted_learner_lives_on_the_disk_of_its_host(tmp_path):
    model, saved = Path("/model"), Path("/run/model")
    there = make_hf_model(tmp_path / "model")
    simulation = Simulation(1)
    files = simulation.begin_process("learner", simulation.hosts["host-0"]).world.files
    for directory in (model, saved.parent):
        files.create_directory(directory)
    replace_file(model / "config.json", (there / "config.json").read_bytes(), files=files)
    settings = config()
    settings.learner.backend = "scripted"
    learner = build_learner(settings, model, files)
    for _ in range(2):
        learner.save_pretrained(saved)
        assert files.list_names(saved) == ["config.json", "model.safetensors"]
        assert files.list_names(saved.parent) == ["model"]
    simulation.close()
