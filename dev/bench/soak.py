"""The benchmark `bench soak`: growth of resident memory, open files and the spool over minutes or
hours of a real run."""

from __future__ import annotations

import itertools
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

import msgspec
import psutil

from dev.bench.jobs import BenchError, PrintLine, start_process
from dev.bench.report import Measurements
from r3async.config import load_config
from r3async.record.reading import read_json_objects

SAMPLE_SECONDS = 5.0
WARM = 0.25
"""Share of the time after which growth counts: pools, caches and logs of a fixed length
have filled by then."""
NOISE = 3.0
"""Smallest growth that is more than noise, as a multiple of the scatter of a process's memory
around its trend line."""
STOP_SECONDS = 120.0
MIB = 2**20


class ResourceSample(msgspec.Struct, frozen=True):
    """A reading of one process: seconds since the first sample, resident bytes, open
    file descriptors."""

    at: float
    resident: int
    files: int


def find_growth(samples: Sequence[ResourceSample]) -> tuple[dict[str, float], bool]:
    """Return the figures of one process after the warm-up, and whether it grows. Raises
    `BenchError` for fewer than ten samples.

    The slope is Theil and Sen's, the median of all pairs' slopes; growth is what it amounts to in
    the measured time, and scatter the median distance from the line. A process grows if its growth
    is above `NOISE` times the scatter and above 1 % of its memory, or if it has more open files.
    """
    last = samples[-1].at
    warm = [s for s in samples if s.at >= WARM * last]
    if len(warm) < 10:
        raise BenchError(f"{len(warm)} samples after the warm-up are too few: measure for longer")
    every = warm[:: max(1, len(warm) // 300)]  # pairs grow with the square
    slopes = [
        (b.resident - a.resident) / (b.at - a.at)
        for a, b in itertools.combinations(every, 2)
        if b.at - a.at > 0
    ]
    slope = statistics.median(slopes)
    middle = statistics.median(s.resident - slope * s.at for s in warm)
    scatter = statistics.median(abs(s.resident - slope * s.at - middle) for s in warm)
    grown = slope * (warm[-1].at - warm[0].at)
    resident = statistics.median(s.resident for s in warm)
    files = [s.files for s in warm]
    # A reconnection, or a file that is being written, is open only for a moment: the trend counts.
    third = max(1, len(files) // 3)
    files_grow = statistics.median(files[-third:]) > statistics.median(files[:third])
    figures = {
        "resident MiB": resident / MIB,
        "MiB/h": slope * 3600 / MIB,
        "growth MiB": grown / MIB,
        "scatter MiB": scatter / MIB,
        "open files, first": files[0],
        "open files, last": files[-1],
    }
    return figures, grown > max(NOISE * scatter, 0.01 * resident) or files_grow


def run_soak(
    minutes: float, overrides: Sequence[str], directory: Path, print_line: PrintLine
) -> Measurements:
    """Run with the scripted engine for `minutes`. Raises `BenchError` if the run
    ends before that."""
    from dev.chaos.run import chaos_overrides, make_model
    from dev.chaos.scenarios import SpreadKills

    chosen = [
        *chaos_overrides(SpreadKills, 0, "scripted"),
        "steps=1000000",
        "name=soak",
        "resume=none",
        "checkpoint.every_steps=20",
        "supervise.max_run_restarts=0",
        "generator.max_restarts=0",
        *overrides,
    ]
    model = make_model("quickstart", chosen, directory / "init", print_line)
    chosen = [*(each for each in chosen if not each.startswith("model.init.")), model]
    config = load_config("quickstart", chosen)
    run_dir = directory / "soak"
    log = directory / "soak.log"
    command = [
        sys.executable,
        "-m",
        "r3async",
        "train",
        "quickstart",
        "--runs",
        str(directory),
        *chosen,
    ]
    watched = ResourceMonitor(run_dir)
    with start_process(command, log, patience=STOP_SECONDS) as driver:
        began = 0.0
        minute = -1
        while not began or time.monotonic() - began < minutes * 60:
            if driver.poll() is not None:
                raise BenchError(f"the run ended too early (exit {driver.returncode}): see {log}")
            time.sleep(SAMPLE_SECONDS)
            if not began and not read_json_objects(run_dir / "metrics.jsonl"):
                continue
            began = began or time.monotonic()
            at = time.monotonic() - began
            watched.take_sample(at, driver.pid)
            if int(at / 60) > minute:
                minute = int(at / 60)
                print_line(f"soak: minute {minute} of {minutes:g}")
    rows = read_json_objects(run_dir / "metrics.jsonl")
    steps = len(rows)
    group = config.schedule.prompts_per_step * config.schedule.group_size
    measured = Measurements()
    measured.facts = {"run": f"{minutes:g} minutes, {steps} steps, {steps * group} trajectories"}
    measured.facts["spool"] = (
        f"at most {watched.spool_most / MIB:.2f} MiB of {config.buffer.disk_bytes / MIB:.0f}"
    )
    for name, samples in sorted(watched.samples.items()):
        if len(samples) > 1:
            figures, grows = find_growth(samples)
            measured.add_figures(name, figures)
            measured.problems += [f"{name} grows"] * grows
    return measured


class ResourceMonitor:
    """A monitor of the resources that the processes of the run in `run_dir`, and
    its spool, take."""

    def __init__(self, run_dir: Path):
        self._run_dir = run_dir
        self.samples: dict[str, list[ResourceSample]] = defaultdict(list)
        self.spool_most = 0

    def take_sample(self, at: float, driver: int) -> None:
        """Take a sample now, `at` seconds after the first one."""
        for name, process in find_processes(self._run_dir, driver).items():
            try:
                with process.oneshot():
                    self.samples[name].append(
                        ResourceSample(at, process.memory_info().rss, process.num_fds())
                    )
            except psutil.Error:
                continue
        spool_bytes = sum(path.stat().st_size for path in (self._run_dir / "spool").glob("*.spool"))
        self.spool_most = max(self.spool_most, spool_bytes)


def find_processes(run_dir: Path, driver: int) -> dict[str, psutil.Process]:
    """Return the processes by role: the driver, the actors that have started and still run, and
    environments' processes."""
    from dev.chaos.scenario import actor_process, environment_workers

    processes = {"driver": psutil.Process(driver)}
    for event in read_json_objects(run_dir / "events.jsonl"):
        if event["event"].endswith("_started") and "pid" in event:
            process = actor_process(event["pid"])
            if process:
                processes[event["role"]] = process
                for i, worker in enumerate(environment_workers(process)):
                    processes[f"{event['role']} environment {i}"] = worker
    return processes
