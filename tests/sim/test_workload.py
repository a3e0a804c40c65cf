"""Workloads and faults are drawn from a seed alone, and are plain data."""

import asyncio
from collections import Counter
from pathlib import Path

import msgspec

from dev.simulation.faults import FAULT_DISTRIBUTIONS, PlannedFault, draw_faults, faults_end
from dev.simulation.workload import SimulatedWorkload, draw_workload
from r3async.config import config_from_dict, config_to_dict
from r3async.envs import Action
from r3async.envs.factory import build_environment_factory

SEEDS = range(300)


def test_every_workload_is_a_configuration_that_a_run_takes_and_survives_json():
    for seed in SEEDS:
        workload = draw_workload(seed)
        config = workload.build_config(Path("model"))
        assert config_from_dict(config_to_dict(config)) == config
        assert (
            msgspec.json.decode(msgspec.json.encode(workload), type=SimulatedWorkload)
            == workload
            == draw_workload(seed)
        )
        assert workload.derive_guarantees().slots >= workload.prompts_per_step


def test_workloads_differ_in_what_matters():
    drawn = [draw_workload(seed) for seed in SEEDS]
    for name, least in {"generators": 4, "max_staleness": 4, "window": 4, "durability": 2, "credit_bytes": 3}.items():
        assert len({getattr(workload, name) for workload in drawn}) >= least, name
    assert {workload.derive_guarantees().durable for workload in drawn} == {"nothing", "process", "power"}


def test_a_run_without_faults_takes_ten_minutes_at_least_and_not_much_more():
    drawn = [draw_workload(seed) for seed in SEEDS]
    assert min(workload.steps * workload.least_train_seconds for workload in drawn) >= 599.999
    assert max(workload.expected_seconds for workload in drawn) < 1800


def test_faults_of_every_kind_are_drawn_in_order_and_end():
    kinds: Counter[str] = Counter()
    none = 0
    for seed in SEEDS:
        workload = draw_workload(seed)
        faults = draw_faults(workload)
        assert faults == draw_faults(workload) == sorted(faults, key=lambda fault: fault.at)
        assert msgspec.json.decode(msgspec.json.encode(faults), type=list[PlannedFault]) == faults
        assert all(fault.target in ["", *workload.process_names, *workload.host_names] for fault in faults)
        assert faults_end(faults) <= workload.expected_seconds + 300
        kinds.update(fault.kind for fault in faults)
        none += not faults
    assert set(kinds) == set(FAULT_DISTRIBUTIONS)
    assert 0 < none < len(SEEDS) / 8
    assert all(fault.to_text() for fault in faults)


def test_an_errand_poses_the_task_of_its_seed_and_rewards_the_answers():
    factory = build_environment_factory(
        config_from_dict(
            {"env": {"name": "dev.simulation.environment:LetterTask", "args": {"turns": 2, "seconds": 0.0}}}
        ).env
    )

    async def play(answer: str) -> tuple[object, float]:
        errand = factory()
        asked = await errand.reset(7)
        assert not (await errand.step(Action("a"))).done
        last = await errand.step(Action(answer))
        assert last.done
        return asked, last.reward

    first, again, other = (asyncio.run(play(answer)) for answer in "bbc")
    assert first == again
    assert first[0] == other[0]
    assert first[1] != other[1]
