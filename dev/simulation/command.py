"""Runner of `python -m dev simulate`: small runs of the whole system with faults, one per seed,
until one fails."""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from dev.simulation.mutants import MUTANTS
from dev.simulation.run import SimulationResult, draw_case, tiny_model_directory
from dev.simulation.search import quiet_logs, run_case, search_seeds, shrink_violation
from dev.simulation.shrink import SimulationCase
from dev.simulation.story import write_story, write_trace
from dev.simulation.world import START_TIME
from r3async.config import ConfigError
from r3async.untrusted import MalformedError, decode_json

STORY_LINES = 80

PrintLine = Callable[[str], object]


def simulate_command(
    *,
    seeds: int,
    first: int,
    jobs: int,
    mutant: str,
    case: Path | None,
    trace: Path | None,
    keep: Path | None,
    shrinking: bool,
    json: bool,
    print_line: PrintLine = print,
) -> int:
    """Run the simulations, and describe the first that fails. Returns the exit status: 0 if every
    run kept every invariant, or, with a mutant, if one did not."""
    if mutant and mutant not in MUTANTS:
        raise ConfigError(f"--mutant {mutant!r} must be one of {', '.join(sorted(MUTANTS))}")
    if case is not None:
        return _run_one_case(read_case(case), trace, json, print_line)
    began = time.perf_counter()
    results: list[SimulationResult] = []
    with search_seeds(range(first, first + seeds), jobs=jobs, mutant=mutant) as simulated:
        for result in simulated:
            results.append(result)
            _show_progress(results, seeds, began)
            if result.violated:
                break
    failed = next((result for result in results if result.violated), None)
    print_line(summarize_results(results, time.perf_counter() - began))
    if failed is not None:
        failing = draw_case(failed.seed, mutant)
        print_line(f"seed {failed.seed} violates {failed.violated}: {failed.reason}")
        if shrinking:
            print_line("shrinking it (--no-shrink leaves it as it is)")
            failing = shrink_violation(failing, failed.violated)
        if keep is not None:
            write_case(keep, failing)
            print_line(f"kept as {keep}; to run it again: python -m dev simulate --case {keep}")
        _run_one_case(failing, trace, False, print_line)
    elif trace is not None and results:
        _run_one_case(draw_case(results[-1].seed, mutant), trace, False, lambda line: None)
    if json:
        print_line(msgspec.json.encode(_summary_object(results, failed, mutant)).decode())
    return int((failed is None) if mutant else (failed is not None))


def _run_one_case(
    case: SimulationCase, trace: Path | None, json: bool, print_line: PrintLine
) -> int:
    """Run one case, and print what happened. Returns the exit status."""
    with quiet_logs(), tiny_model_directory():
        result, simulated = run_case(case)
    verdict = (
        f"{result.violated}: {result.reason}" if result.violated else "every invariant was kept"
    )
    print_line(write_story(case, simulated.history, verdict, last=STORY_LINES))
    if trace is not None:
        write_trace(trace, simulated.spans, simulated.history, START_TIME)
        print_line(f"trace: {trace}")
    if json:
        print_line(msgspec.json.encode(result).decode())
    return int(bool(result.violated) != bool(case.mutant))


def _show_progress(results: list[SimulationResult], seeds: int, began: float) -> None:
    if sys.stderr.isatty():
        virtual = sum(result.virtual_seconds for result in results) / 60
        sys.stderr.write(
            f"\r{len(results)} of {seeds} seeds, {virtual:.0f} virtual minutes, "
            f"{time.perf_counter() - began:.0f} s"
        )
        sys.stderr.write("\n" if len(results) == seeds or results[-1].violated else "")
        sys.stderr.flush()


def summarize_results(results: list[SimulationResult], seconds: float) -> str:
    """Return a summary of the runs and their faults."""
    faults: Counter[str] = Counter()
    gave_up: Counter[str] = Counter()
    for result in results:
        faults.update(result.faults)
        gave_up.update(reason.split(":")[0] for reason in result.gave_up)
    virtual = sum(result.virtual_seconds for result in results)
    lines = [
        f"{len(results)} runs, {virtual / 60:.0f} virtual minutes, in {seconds:.0f} s: "
        f"{sum(r.steps for r in results)} steps, {sum(r.lineages for r in results)} starts, "
        f"{sum(r.events for r in results)} events",
        f"{faults.total()} faults: "
        + ", ".join(f"{kind} {count}" for kind, count in faults.most_common()),
    ]
    durations = [result.virtual_seconds for result in results if not result.violated]
    if durations:
        lines.append(
            f"the shortest run took {min(durations) / 60:.1f} virtual minutes, the longest "
            f"{max(durations) / 60:.1f}"
        )
    if gave_up:
        lines.append(
            "the command failed, and was given again: "
            + ", ".join(f"{k} {n}" for k, n in gave_up.most_common())
        )
    return "\n".join(lines)


def _summary_object(
    results: list[SimulationResult], failed: SimulationResult | None, mutant: str
) -> dict[str, Any]:
    faults: Counter[str] = Counter()
    for result in results:
        faults.update(result.faults)
    return {
        "seeds": len(results),
        "mutant": mutant,
        "violated": failed.violated if failed is not None else "",
        "seed": failed.seed if failed is not None else None,
        "reason": failed.reason if failed is not None else "",
        "virtual_seconds": round(sum(result.virtual_seconds for result in results), 3),
        "seconds": round(sum(result.seconds for result in results), 3),
        "steps": sum(result.steps for result in results),
        "starts": sum(result.lineages for result in results),
        "faults": dict(sorted(faults.items())),
    }


def read_case(path: Path) -> SimulationCase:
    """Read a case that `write_case` wrote. Raises `ConfigError` if it cannot be read."""
    try:
        return decode_json(path.read_bytes(), SimulationCase)
    except (OSError, MalformedError) as error:
        raise ConfigError(f"--case {path} cannot be read: {error}") from error


def write_case(path: Path, case: SimulationCase) -> None:
    """Write a case to a file, in the format of `tests/sim/seeds/`."""
    path.write_bytes(msgspec.json.format(msgspec.json.encode(case), indent=1) + b"\n")
