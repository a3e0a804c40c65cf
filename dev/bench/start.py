"""The benchmark `bench start`: from the command to the first trained step, in wall and CPU seconds, by stage and by
process.

Cases: `model`, with `model.path`; `none`, without it and with an empty cache; `help`, `r3async --help` alone. Events of
the run mark the end of each stage; CPU seconds are those of all processes below this one. Wall time is meaningful only
on a quiet machine: `others` is the number of cores that other processes kept busy meanwhile.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec

from dev.bench.jobs import BenchError, Say, started, table
from dev.bench.tree_cpu import TreeCpu
from r3async.config import ConfigError
from r3async.record.reading import read_json_objects

CASES = ("model", "none", "help")
PRESET = "quickstart"
NAME = "run"
TIMEOUT = 600.0
SMALL = ["model.init.max_warm_steps=2", "model.init.hidden_size=64", "generator.engine=scripted", "weights.probe=false"]
"""Overrides of a small run that exercises the code path; its figures mean nothing."""


class Start(msgspec.Struct, frozen=True):
    """The figures of one start.

    Attributes:
        stages: seconds from the command to the end of each stage.
        cpu: CPU seconds by role until the end of the last stage; Ray and our other processes are `ray` and `driver`.
    """

    seconds: float
    stages: dict[str, float]
    cpu: dict[str, float]
    cpu_seconds: float
    others: float


class Report(msgspec.Struct, frozen=True):
    bench: str
    preset: str
    cases: dict[str, list[Start]]


def run(cases: Sequence[str], repeats: int, say: Say, *, quick: bool = False) -> Report:
    """Measure each case `repeats` times, in turns. Raises `BenchError`, and `ConfigError` for an unknown case."""
    if unknown := [case for case in cases if case not in CASES]:
        raise ConfigError(f"--cases {unknown[0]!r}: there are {', '.join(CASES)}")
    words = SMALL if quick else []
    starts: dict[str, list[Start]] = {case: [] for case in cases}
    with tempfile.TemporaryDirectory(prefix="r3async-start-") as scratch:
        model = Path(scratch, "model")
        if "model" in cases:
            say("making the model of case `model`")
            command(["init-model", str(model), *words], Path(scratch, "init.txt"))
        for repeat in range(repeats):
            for case in cases:
                place = Path(scratch, f"{case}-{repeat}")
                place.mkdir()
                say(f"{case}: {repeat + 1} of {repeats}")
                given = words
                if case == "model":
                    given = [f"model.path={model}", *(word for word in words if not word.startswith("model.init."))]
                starts[case].append(helped(place) if case == "help" else trained(given, place))
    return Report("start", PRESET, starts)


def trained(words: Sequence[str], place: Path) -> Start:
    """Measure a run of one step with a separate, empty cache."""
    run_dir = place / NAME
    given = ["train", PRESET, f"name={NAME}", "steps=1", "--runs", str(place), *words]
    began, cpu = command(given, place / "screen.txt")
    events = {event["event"]: event["time"] for event in read_json_objects(run_dir / "events.jsonl")}
    rows = read_json_objects(run_dir / "metrics.jsonl")
    if not rows:
        raise BenchError(f"the run made no step; it ended with:\n{(place / 'screen.txt').read_text()[-2000:]}")
    ends = {
        "model": events["lineage_began"],
        "ray": events["conductor_started"],
        "learner": events["learner_started"],
        "generator": events["generator_started"],
        "step": rows[0]["time"],
    }
    return start_of(began, ends, cpu)


def helped(place: Path) -> Start:
    """Measure `--help` alone. Its CPU seconds are those of a child that has ended, since it is too short to be read
    while it runs."""
    before, children = time.time(), os.times()
    with TreeCpu() as cpu:
        command(["--help"], place / "screen.txt")
    after, ended = os.times(), time.time()
    seconds = after.children_user + after.children_system - children.children_user - children.children_system
    return Start(ended - before, {"help": ended - before}, {"driver": seconds}, seconds, cpu.others(before, ended))


def start_of(began: float, ends: dict[str, float], cpu: TreeCpu) -> Start:
    last = max(ends.values())
    by_role = {role: round(seconds, 2) for role, seconds in cpu.between(began, last).items()}
    stages = {stage: round(end - began, 2) for stage, end in ends.items()}
    return Start(
        round(last - began, 2), stages, by_role, round(sum(by_role.values()), 2), round(cpu.others(began, last), 2)
    )


def command(words: Sequence[str], screen: Path) -> tuple[float, TreeCpu]:
    """Run a command of r3async to its end, with an empty cache of models.

    Returns the unix time at which it began, and what was read meanwhile. Raises `BenchError`.
    """
    cache = str(screen.parent / "cache")
    # Without its cache of model classes, vLLM starts one more process of eight CPU seconds; that happens only the first
    # time on a machine.
    known = os.environ.get("VLLM_CACHE_ROOT") or str(Path.home() / ".cache" / "vllm")
    with TreeCpu() as cpu:
        began = time.time()
        with started(
            [sys.executable, "-P", "-m", "r3async", *words], screen, XDG_CACHE_HOME=cache, VLLM_CACHE_ROOT=known
        ) as process:
            try:
                code = process.wait(TIMEOUT)
            except subprocess.TimeoutExpired as error:
                raise BenchError(f"{words[0]} took longer than {TIMEOUT:g} s") from error
    if code:
        raise BenchError(f"{words[0]} failed with exit code {code}:\n{screen.read_text()[-2000:]}")
    return began, cpu


def render(report: Report) -> str:
    """Format the report as a table of starts."""
    heads = ["case", "seconds", *(stages := ("model", "ray", "learner", "generator", "step")), "CPU s", "others"]
    rows = [
        [case, f"{start.seconds:.1f}"]
        + [f"{start.stages[stage]:.1f}" if stage in start.stages else "" for stage in stages]
        + [f"{start.cpu_seconds:.2f}", f"{start.others:.1f}"]
        for case, starts in report.cases.items()
        for start in starts
    ]
    lines = table(heads, rows)
    lines += ["", "Stages: seconds from the command to the end of each. CPU s: of all processes until then, by role:"]
    for case, starts in report.cases.items():
        for start in starts:
            roles = ", ".join(f"{role} {seconds:.1f}" for role, seconds in start.cpu.items() if seconds >= 0.05)
            lines.append(f"{case}: {roles}")
    return "\n".join(lines)
