"""The Tinker server in simulation: seeds from the first on, planted defects, and the same events in every process."""

import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest

from dev.simulation.tinker.command import search_seeds, simulate_tinker_command
from dev.simulation.tinker.mutants import MUTANTS
from dev.simulation.tinker.run import TinkerRun, draw_plan, run_seed
from r3async.config import ConfigError

SEEDS = 10
QUICK = {
    "number_is_no_identity": 0,
    "only_the_state_restored": 0,
    "first_come_first_served": 0,
    "kept_sequences_forgotten": 0,
}
"""Mutants, and the first seed that is tried."""
WITHIN = 30


@pytest.mark.long
def test_the_first_seeds_keep_every_invariant():
    with search_seeds(range(SEEDS), jobs=1) as results:
        for result in results:
            assert not result.violated, f"seed {result.seed}: {result.violated}: {result.reason}"
            assert result.steps > 0


def test_a_search_that_ends_early_turns_logs_on_again():
    with search_seeds(range(9), jobs=1) as results:
        assert not next(results).violated
        assert not logging.getLogger("r3async").isEnabledFor(logging.ERROR)
    assert logging.getLogger("r3async").isEnabledFor(logging.ERROR)


def test_seeds_have_every_kind_of_fault():
    plans = [draw_plan(seed) for seed in range(50)]
    for kind in ("kills", "operations", "learner_losses", "engine_losses", "failures"):
        assert any(getattr(plan, kind) for plan in plans)
    assert any(not plan.line.lost for plan in plans)  # and some have none
    assert any(client.vanishes_in >= 0 for plan in plans for client in plan.clients)


def assert_found(mutant, seeds):
    """A seed finds the mutant, and nothing without it."""
    with search_seeds(seeds, jobs=1, mutant=mutant) as results:
        found = next((one for one in results if one.violated), None)
    assert found is not None
    assert not run_seed(found.seed).violated


@pytest.mark.long
@pytest.mark.parametrize("mutant", QUICK)
def test_a_defect_that_is_planted_is_found(mutant):
    first = QUICK[mutant]
    assert_found(mutant, [*range(first, WITHIN), *range(first)])


@pytest.mark.long
@pytest.mark.parametrize("mutant", sorted(set(MUTANTS) - set(QUICK)))
def test_every_defect_that_is_planted_is_found(mutant):
    assert MUTANTS[mutant].what
    assert_found(mutant, range(100))


def test_a_mutant_is_taken_back():
    before = run_seed(5)
    assert run_seed(5, "snapshots_stay").violated == "snapshots"
    assert run_seed(5).digest == before.digest


DIGESTS = """
from dev.simulation.tinker.run import run_seed
print(" ".join(run_seed(seed).digest for seed in (1, 4)))
"""


@pytest.mark.long
def test_a_seed_has_the_same_events_in_every_process():
    said = []
    for seed in ("1", "77"):
        environment = os.environ | {"PYTHONHASHSEED": seed}
        root = Path(__file__).parents[2]
        done = subprocess.run(
            [sys.executable, "-c", DIGESTS], cwd=root, env=environment, capture_output=True, text=True, timeout=120
        )
        assert done.returncode == 0, done.stderr
        said.append(done.stdout)
    assert said[0] == said[1]


def test_what_nobody_handles_is_a_violation():
    run = TinkerRun(3)

    def fail():
        raise ValueError("nobody handles this")

    run.simulation.loop.call_at(1.0, fail)
    assert run.run().violated == "unhandled"


def test_the_command_says_what_it_ran_and_what_failed():
    lines = []
    options = {"jobs": 1, "print_line": lines.append}
    assert simulate_tinker_command(seeds=1, first=3, mutant="", **options) == 0
    assert lines[0].startswith("1 runs, ")
    assert simulate_tinker_command(seeds=1, first=5, mutant="snapshots_stay", **options) == 0
    assert lines[-1].startswith("seed 5 violates snapshots: ")
    with pytest.raises(ConfigError, match="must be one of"):
        simulate_tinker_command(seeds=1, first=3, mutant="none", **options)
