"""Many seeds, beside each other: what became of each, in the order of the seeds."""

from __future__ import annotations

import contextlib
import gc
import io
import logging
import multiprocessing
import os
import warnings
from collections.abc import Iterator, Sequence
from functools import partial

from dev.simulation.mutants import MUTANTS
from dev.simulation.run import Result, Simulated, draw_case, model_here
from dev.simulation.shrink import Case, shrink


def run_case(case: Case, *, details: bool = False) -> tuple[Result, Simulated]:
    """One run; in a directory that has the model (`model_here`)."""
    planted = MUTANTS[case.mutant].plant() if case.mutant else contextlib.nullcontext()
    with planted:
        simulated = Simulated(case, details=details)
        return simulated.run(), simulated


def _run_seed(seed: int, mutant: str) -> Result:
    return run_case(draw_case(seed, mutant))[0]


@contextlib.contextmanager
def quiet_logs() -> Iterator[None]:
    """What the simulated processes would log, print and warn of is not for this one's person."""
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
    """Modules and the tokenizer are not looked through for garbage, nor what a run has made a thousand times: a tenth of the
    time. Processes that are forked meanwhile do so, too."""
    before = gc.get_threshold()
    gc.freeze()
    gc.set_threshold(20_000, 50, 100)
    try:
        yield
    finally:
        gc.set_threshold(*before)
        gc.unfreeze()


def search(seeds: Sequence[int], *, jobs: int = 0, mutant: str = "") -> Iterator[Result]:
    """Runs them in `jobs` processes (0: one a core). Whoever stops listening ends the search."""
    with quiet_logs(), model_here(), rare_collections():
        jobs = min(jobs or os.cpu_count() or 1, len(seeds))
        if jobs == 1:
            yield from (_run_seed(seed, mutant) for seed in seeds)
            return
        # What is imported here is not imported again in each of them.
        with multiprocessing.get_context("fork").Pool(jobs) as pool:
            yield from pool.imap(partial(_run_seed, mutant=mutant), seeds)


def shrunk(case: Case, violated: str, tries: int = 300) -> Case:
    """The smallest case that is found which violates the same invariant."""
    with quiet_logs(), model_here():
        return shrink(case, lambda smaller: run_case(smaller)[0].violated == violated, tries)
