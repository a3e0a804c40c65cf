"""Search over many seeds in parallel. Results come in the order of the seeds."""

from __future__ import annotations

import contextlib
import gc
import io
import logging
import multiprocessing
import os
import warnings
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TypeVar

from dev.simulation.mutants import MUTANTS
from dev.simulation.run import SimulatedRun, SimulationResult, draw_case, tiny_model_directory
from dev.simulation.shrink import SimulationCase, shrink_case

R = TypeVar("R")


def run_case(
    case: SimulationCase, *, details: bool = False
) -> tuple[SimulationResult, SimulatedRun]:
    """Simulate one case. The working directory must contain the model (`tiny_model_directory`)."""
    planted = MUTANTS[case.mutant].plant() if case.mutant else contextlib.nullcontext()
    with planted:
        simulated = SimulatedRun(case, details=details)
        return simulated.run(), simulated


def _run_seed(seed: int, mutant: str) -> SimulationResult:
    return run_case(draw_case(seed, mutant))[0]


@contextlib.contextmanager
def quiet_logs() -> Iterator[None]:
    """Suppress what the simulated processes log, warn of and print to standard error."""
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        with warnings.catch_warnings(), contextlib.redirect_stderr(io.StringIO()):
            warnings.simplefilter("ignore")  # coroutines of processes that ended are never awaited
            yield
    finally:
        logging.disable(before)


@contextlib.contextmanager
def rare_collections() -> Iterator[None]:
    """Exclude modules and the tokenizer from garbage collection, and collect a run's objects less
    often. This saves a tenth of the time. Processes that are forked inside inherit it."""
    before = gc.get_threshold()
    gc.freeze()
    gc.set_threshold(20_000, 50, 100)
    try:
        yield
    finally:
        gc.set_threshold(*before)
        gc.unfreeze()


@contextlib.contextmanager
def run_seeds(run: Callable[[int], R], seeds: Sequence[int], jobs: int) -> Iterator[Iterator[R]]:
    """Yield an iterator over what `run` returns for each seed, in order, run without logs in `jobs`
    processes (0 for one per core). They end with the context, however far the iterator came."""
    jobs = min(jobs or os.cpu_count() or 1, len(seeds))
    with quiet_logs():
        if jobs == 1:
            yield map(run, seeds)
            return
        # Forked processes need not import again what is imported here.
        with multiprocessing.get_context("fork").Pool(jobs) as pool:
            yield pool.imap(run, seeds)


@contextlib.contextmanager
def search_seeds(
    seeds: Sequence[int], *, jobs: int = 0, mutant: str = ""
) -> Iterator[Iterator[SimulationResult]]:
    """Yield an iterator that simulates seeds; see `run_seeds`."""
    run = partial(_run_seed, mutant=mutant)
    with tiny_model_directory(), rare_collections(), run_seeds(run, seeds, jobs) as results:
        yield results


def shrink_violation(case: SimulationCase, violated: str, tries: int = 300) -> SimulationCase:
    """Return the smallest case found, in at most `tries` runs, that violates the same invariant."""
    with quiet_logs(), tiny_model_directory():
        return shrink_case(case, lambda smaller: run_case(smaller)[0].violated == violated, tries)
