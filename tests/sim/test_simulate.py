"""The whole system in simulation: kept seeds, seeds from the first on, mutants, and the same events in every process."""

import os
import subprocess
import sys
from contextvars import Context
from pathlib import Path

import msgspec
import pytest
import ray

from dev.simulation.command import read_case, write_case
from dev.simulation.mutants import MUTANTS
from dev.simulation.run import SimulatedRun, draw_case, tiny_model_directory
from dev.simulation.search import quiet_logs, run_case, search_seeds
from dev.simulation.shrink import SimulationCase
from dev.simulation.workload import SimulatedWorkload
from r3async.actors.generator import GeneratorActor

KEPT = sorted((Path(__file__).parent / "seeds").glob("*.json"))
SEEDS = 10
"""Of ten virtual minutes each, at least. `python -m dev simulate --seeds 1000` runs more."""
QUICK = {
    "unlink_before_commit": 1,
    "version_counted_twice": 0,
    "recovery_forgets": 1,
    "failed_parent_given_again": 39,
    "given_up_at_once": 1,
}
"""Mutants, and the seed that is tried first: one that found it."""
WITHIN = 40
"""Seeds in which each of these is found."""


@pytest.fixture(scope="module", autouse=True)
def model():
    with quiet_logs(), tiny_model_directory():
        yield


@pytest.mark.long
@pytest.mark.parametrize("path", KEPT, ids=lambda path: path.stem)
def test_a_run_that_failed_once_keeps_every_invariant(path: Path):
    result, _ = run_case(read_case(path))
    assert not result.violated, f"{result.violated}: {result.reason}"


@pytest.mark.long
def test_the_first_seeds_keep_every_invariant():
    with search_seeds(range(SEEDS), jobs=2) as results:
        for result in results:
            assert not result.violated, f"seed {result.seed}: {result.violated}: {result.reason}"
            assert not result.unhandled, f"seed {result.seed}: {result.unhandled}"


@pytest.mark.parametrize("mutant", QUICK)
def test_a_defect_that_is_planted_is_found(mutant: str):
    first = QUICK[mutant]
    seeds = [*range(first, WITHIN), *range(first)]
    with search_seeds(seeds, jobs=1, mutant=mutant) as results:
        assert any(result.violated for result in results)


@pytest.mark.long
def test_every_mutant_says_what_is_wrong_and_takes_it_back():
    ray.remote(GeneratorActor)  # It changes the signatures of the methods, in other tests of this process too.
    for mutant in MUTANTS.values():
        assert mutant.what
        before = run_case(draw_case(14))[0] if mutant.name == next(iter(QUICK)) else None
        with mutant.plant():
            pass
        if before is not None:
            assert run_case(draw_case(14))[0].digest == before.digest
    assert len(MUTANTS) >= 20


DIGESTS = """
from dev.simulation.run import draw_case, tiny_model_directory
from dev.simulation.search import quiet_logs, run_case
with quiet_logs(), tiny_model_directory():
    found = [run_case(draw_case(seed))[0].digest for seed in (1, 4)]
print(" ".join(found))
"""


@pytest.mark.long
def test_a_seed_has_the_same_events_byte_for_byte_in_every_process():
    said = []
    for seed in ("1", "77"):
        environment = os.environ | {"PYTHONHASHSEED": seed}
        root = Path(__file__).parents[2]
        done = subprocess.run(
            [sys.executable, "-c", DIGESTS], cwd=root, env=environment, capture_output=True, text=True, timeout=300
        )
        assert done.returncode == 0, done.stderr
        said.append(done.stdout)
    assert said[0] == said[1]
    assert len(set(said[0].split())) == 2


def test_a_case_is_written_and_read(tmp_path: Path):
    case = msgspec.structs.replace(draw_case(3), mutant="lineage_ignored")
    write_case(tmp_path / "case.json", case)
    assert read_case(tmp_path / "case.json") == case
    assert isinstance(case, SimulationCase)


def test_a_run_with_zero_variance_in_any_step_ends_without_a_model_and_is_no_failure():
    result, _ = run_case(SimulationCase(SimulatedWorkload(3, steps=2, flat=1)))
    assert not result.violated, f"{result.violated}: {result.reason}"
    assert result.steps == 2


def test_a_run_in_which_something_is_left_unhandled_fails():
    simulated = SimulatedRun(SimulationCase(SimulatedWorkload(3, steps=2)))

    def fail() -> None:
        raise ValueError("nobody handles this")

    simulated.simulation.loop.call_at(1.0, fail, context=Context())
    result = simulated.run()
    assert result.violated == "unhandled"
    assert "ValueError: nobody handles this" in result.reason
