"""Runner of `python -m dev simulate-tinker`: runs of the Tinker server with faults, one per seed, until
one fails."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial

from dev.simulation.search import quiet_logs
from dev.simulation.tinker.mutants import MUTANTS
from dev.simulation.tinker.run import TinkerResult, run_seed
from r3async.config import ConfigError


@contextlib.contextmanager
def search_seeds(
    seeds: Sequence[int], *, jobs: int = 0, mutant: str = ""
) -> Iterator[Iterator[TinkerResult]]:
    """Yield an iterator that simulates seeds in `jobs` processes (0 for one per core), in order.
    The search ends with the context, however far the iterator came."""
    with quiet_logs():
        jobs = min(jobs or os.cpu_count() or 1, len(seeds))
        if jobs == 1:
            yield (run_seed(seed, mutant) for seed in seeds)
            return
        with multiprocessing.get_context("fork").Pool(jobs) as pool:
            yield pool.imap(partial(run_seed, mutant=mutant), seeds)


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
