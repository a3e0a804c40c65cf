"""What `r3async chaos` says."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec

from r3async.config import ConfigError
from r3async.tools.chaos.actors import FAULTS
from r3async.tools.chaos.run import Report, chaos
from r3async.tools.chaos.scenarios import SCENARIOS

SHOWN = 10


def chaos_command(
    preset: str,
    overrides: Sequence[str],
    *,
    scenario: str,
    kills: int,
    seed: int,
    engine: str,
    fault: str,
    root: Path,
    json: bool,
) -> int:
    """Returns the exit status. Raises `ConfigError`, and what `train` raises where the run does not end well."""
    if scenario not in SCENARIOS:
        raise ConfigError(f"--scenario {scenario!r} must be one of {', '.join(SCENARIOS)}")
    if engine not in ("scripted", "vllm"):
        raise ConfigError(f"--engine {engine!r} must be scripted or vllm")
    if fault and fault not in FAULTS:
        raise ConfigError(f"--fault {fault!r} must be one of {', '.join(FAULTS)}")
    report = chaos(preset, overrides, scenario=scenario, kills=kills, seed=seed, engine=engine, fault=fault, root=root)
    print(describe(report), file=sys.stderr if json else sys.stdout)
    if json:
        print(msgspec.json.encode(report).decode())
    return 1 if report.problems else 0


def describe(report: Report) -> str:
    faults = ", ".join(f"{count} {what}" for what, count in sorted(report.faults.items())) or "none"
    lines = [
        f"{report.scenario}: {faults}; the run restarted {report.resumed} times",
        f"trained: {report.trajectories} trajectories in {report.steps} steps",
        f"on the way: {report.sent} sent, {report.acknowledged} acknowledgements, {report.damaged} came damaged and "
        f"{report.duplicates} came twice",
    ]
    if not report.problems:
        return "\n".join(
            [*lines, "everything is right: each trained once, as it was sent; nothing acknowledged was lost"]
        )
    more = len(report.problems) - SHOWN
    shown = [f"  {problem}" for problem in report.problems[:SHOWN]] + ([f"  and {more} more"] if more > 0 else [])
    return "\n".join([*lines, "something is WRONG:", *shown])
