"""The benchmark `bench start`: from the command to the first trained step, in wall and CPU seconds,
by stage and by process.

Cases: `model`, with `model.path` and the cache of the starts before; `none`, without it and with an
empty cache; `help`, `r3async --help` alone. Events of the run mark the end of each stage; CPU
seconds are those of all processes below this one. Wall time is meaningful only on a quiet machine:
`cores of others` is the number of cores that other processes kept busy meanwhile.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from dev.bench.jobs import BenchError, PrintLine, start_process
from dev.bench.report import Measurements
from dev.bench.tree_cpu import TreeCpu
from r3async.config import ConfigError, load_config
from r3async.record.reading import read_json_objects

START_CASES = ("model", "none", "help")
PRESET = "quickstart"
RUN_NAME = "run"
TIMEOUT_SECONDS = 600.0
SMALL_OVERRIDES = [
    "model.init.max_warm_steps=2",
    "model.init.size=tiny",
    "generator.engine=scripted",
    "weights.probe=false",
]
"""Overrides of a small run that exercises the code path; its figures mean nothing."""


def measure_start(
    cases: Sequence[str], repeats: int, print_line: PrintLine, *, quick: bool = False
) -> Measurements:
    """Measure each case `repeats` times, in turns. Raises `BenchError`, and `ConfigError` for
    an unknown case."""
    unknown = [case for case in cases if case not in START_CASES]
    if unknown:
        raise ConfigError(f"--cases {unknown[0]!r}: there are {', '.join(START_CASES)}")
    words = SMALL_OVERRIDES if quick else []
    measured = Measurements()
    with tempfile.TemporaryDirectory(prefix="r3async-start-") as scratch:
        model = Path(scratch, "model")
        if "model" in cases:
            from r3async.tools.init_model import init_model

            print_line("making the model of case `model`")
            init_model(model, load_config("quickstart", words, None), progress=print_line)
        for repeat in range(repeats):
            for case in cases:
                place = Path(scratch, f"{case}-{repeat}")
                place.mkdir()
                print_line(f"{case}: {repeat + 1} of {repeats}")
                arguments = words
                if case == "model":
                    arguments = [
                        f"model.path={model}",
                        *(word for word in words if not word.startswith("model.init.")),
                    ]
                cache = Path(scratch, "cache") if case == "model" else place / "cache"
                measured.add_figures(
                    case,
                    measure_help(place)
                    if case == "help"
                    else measure_first_step(arguments, place, cache),
                )
    return measured


def measure_first_step(words: Sequence[str], place: Path, cache: Path) -> dict[str, float]:
    """Measure a run of one step with this cache of models."""
    run_dir = place / RUN_NAME
    arguments = ["train", PRESET, f"name={RUN_NAME}", "steps=1", "--runs", str(place), *words]
    began, cpu = run_measured(arguments, place / "screen.txt", cache)
    events = {
        event["event"]: event["time"] for event in read_json_objects(run_dir / "events.jsonl")
    }
    rows = read_json_objects(run_dir / "metrics.jsonl")
    if not rows:
        raise BenchError(
            f"the run made no step; it ended with:\n{(place / 'screen.txt').read_text()[-2000:]}"
        )
    ends = {
        "model": events["lineage_began"],
        "ray": events["conductor_started"],
        "learner": events["learner_started"],
        "generator": events["generator_started"],
        "step": rows[0]["time"],
    }
    return stage_figures(began, ends, cpu)


def measure_help(place: Path) -> dict[str, float]:
    """Measure `--help` alone. Its CPU seconds are those of a child that has ended, since it is too
    short to be read while it runs."""
    before = time.time()
    children = os.times()
    with TreeCpu() as cpu:
        run_measured(["--help"], place / "screen.txt", place / "cache")
    after = os.times()
    ended = time.time()
    seconds = (
        after.children_user
        + after.children_system
        - children.children_user
        - children.children_system
    )
    return {
        "seconds": ended - before,
        "CPU s": seconds,
        "cores of others": cpu.cores_of_others(before, ended),
    }


def stage_figures(began: float, ends: dict[str, float], cpu: TreeCpu) -> dict[str, float]:
    """Return the seconds from the command to the end of each stage, and the CPU seconds
    until then, by role."""
    last = max(ends.values())
    roles = cpu.seconds_between(began, last)
    return {
        "seconds": last - began,
        **{f"until {stage}": end - began for stage, end in ends.items()},
        "CPU s": sum(roles.values()),
        "cores of others": cpu.cores_of_others(began, last),
        **{f"CPU s, {role}": seconds for role, seconds in roles.items()},
    }


def run_measured(words: Sequence[str], screen: Path, cache: Path) -> tuple[float, TreeCpu]:
    """Run a command of r3async to its end, with this cache of models.

    Returns the unix time at which it began, and what was read meanwhile. Raises `BenchError`.
    """
    # Without its cache of model classes, vLLM starts one more process of eight CPU seconds; that
    # happens only the first time on a machine.
    vllm_cache = os.environ.get("VLLM_CACHE_ROOT") or str(Path.home() / ".cache" / "vllm")
    with TreeCpu() as cpu:
        began = time.time()
        with start_process(
            [sys.executable, "-P", "-m", "r3async", *words],
            screen,
            XDG_CACHE_HOME=str(cache),
            VLLM_CACHE_ROOT=vllm_cache,
        ) as process:
            try:
                code = process.wait(TIMEOUT_SECONDS)
            except subprocess.TimeoutExpired as error:
                raise BenchError(f"{words[0]} took longer than {TIMEOUT_SECONDS:g} s") from error
    if code:
        raise BenchError(f"{words[0]} failed with exit code {code}:\n{screen.read_text()[-2000:]}")
    return began, cpu
