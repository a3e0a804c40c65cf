"""Runner of `python -m dev simulate-tinker`: runs of the Tinker server with faults, one per seed, until
one fails."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from functools import partial

from dev.simulation.search import run_seeds
from dev.simulation.tinker.mutants import MUTANTS
from dev.simulation.tinker.run import TinkerResult, run_seed
from r3async.config import ConfigError


def search_seeds(
    seeds: Sequence[int], *, jobs: int = 0, mutant: str = ""
) -> AbstractContextManager[Iterator[TinkerResult]]:
    """Simulate seeds; see `run_seeds`."""
    return run_seeds(partial(run_seed, mutant=mutant), seeds, jobs)


def simulate_tinker_command(
    *,
    seeds: int,
    first: int,
    jobs: int,
    mutant: str,
    print_line: Callable[[str], object] = print,
) -> int:
    """Run the simulations until one fails. Returns the exit status: 0 if every run kept every
    invariant, or, with a mutant, if one did not."""
    if mutant and mutant not in MUTANTS:
        raise ConfigError(f"--mutant {mutant!r} must be one of {', '.join(sorted(MUTANTS))}")
    began = time.perf_counter()
    counts: Counter[str] = Counter()
    results = []
    with search_seeds(range(first, first + seeds), jobs=jobs, mutant=mutant) as simulated:
        for result in simulated:
            results.append(result)
            counts.update(result.counts)
            if result.violated:
                break
    print_line(
        f"{len(results)} runs, {sum(result.steps for result in results)} steps, "
        f"{sum(result.virtual_seconds for result in results) / 3600:.0f} virtual hours, in "
        f"{time.perf_counter() - began:.0f} s"
    )
    print_line(", ".join(f"{name} {count}" for name, count in counts.most_common()))
    failed = results[-1] if results and results[-1].violated else None
    if failed is not None:
        print_line(f"seed {failed.seed} violates {failed.violated}: {failed.reason}")
    return int((failed is None) if mutant else (failed is not None))
