"""Read trajectories for `r3async inspect`.

Unreadable data is reported to `report_problem(text)`, and the rest is still read.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from r3async.checkpoint.directory import STATE_FILE
from r3async.checkpoint.manifest import CheckpointError
from r3async.checkpoint.state import decode_state
from r3async.data.container import TornRecord, map_file
from r3async.data.tokens import SCHEMA
from r3async.data.wire_frames import WireError
from r3async.record.reading import (
    LINE_TYPES,
    QUARANTINE_FILE,
    make_config_events,
    read_json_lines,
    read_json_objects,
    read_quarantine,
    read_run_config,
)
from r3async.record.route_verification import find_engine_routes
from r3async.record.routes import RouteFileError, RouteIndex, TrainedRoutes
from r3async.record.routes import load_route_record as load_route
from r3async.transport.spool import SPOOL_FORMAT, load_record
from r3async.world.files import read_file

from .run import fit_to_cells, is_run
from .trajectories import (
    InspectedTrajectory,
    convert_episode_line,
    convert_trained_routes,
    convert_trajectory,
)

ReportProblem = Callable[[str], object]


def list_spool_files(path: Path) -> list[Path]:
    """Return the files of a spool; `path` itself if it is a file."""
    return sorted(path.glob("*.spool")) if path.is_dir() else [path]


def read_spool(path: Path, report_problem: ReportProblem) -> Iterator[InspectedTrajectory]:
    """Yield the trajectories of a spool file, or of all files of a directory. One that was written
    twice comes once."""
    known: set[tuple[int, str]] = set()
    for file in list_spool_files(path):
        try:
            view = map_file(file)
        except OSError as error:
            report_problem(f"{file}: {error.strerror or error}")
            continue
        for record in SPOOL_FORMAT.iter_records(view):
            if isinstance(record, TornRecord):
                report_problem(
                    f"{file}: from byte {record.offset} on there is no record: {record.reason}"
                )
                continue
            try:
                trajectory = load_record(record, SCHEMA).trajectory
            except WireError as error:
                report_problem(
                    f"{file}: the record at byte {record.offset} cannot be read: {error}"
                )
                continue
            name = (trajectory.group_index, trajectory.trajectory_id)
            if name not in known:
                known.add(name)
                yield convert_trajectory(trajectory, str(file))


def read_traces(run_dir: Path, report_problem: ReportProblem) -> Iterator[InspectedTrajectory]:
    """Yield the trajectories of the samples that `routing.trace` kept, in the
    order of their steps."""
    index = RouteIndex(run_dir)
    for text in index.problems:
        report_problem(text)
    # A step's row has the version that the step produced; ages count from the version before it.
    before = {
        row.get("step"): version - 1
        for row in read_json_objects(run_dir / "metrics.jsonl")
        if (version := row.get("version")) is not None
    }
    for (step, _), entries in itertools.groupby(
        index.trained_entries, lambda e: (e.facts["step"], e.facts["trajectory_id"])
    ):
        kept = list(entries)
        try:
            trained = [load_route(entry, TrainedRoutes) for entry in kept]
            calls = index.load_calls(trained[0].trajectory_id)
            pairs = [(one, find_engine_routes(one, calls)) for one in trained]
        except RouteFileError as error:
            report_problem(str(error))
            continue
        yield convert_trained_routes(pairs, str(kept[0].path), before.get(step))


def read_episodes(run_dir: Path) -> Iterator[InspectedTrajectory]:
    """Yield the conversations that the conductor kept, the first two of each step."""
    path = run_dir / "episodes.jsonl"
    return (
        seen
        for line in read_json_objects(path)
        if (seen := convert_episode_line(line, str(path))) is not None
    )


def read_run_trajectories(
    run_dir: Path, report_problem: ReportProblem
) -> Iterator[InspectedTrajectory]:
    """Yield all trajectories that the run holds: waiting ones, then trained ones,
    then conversations."""
    yield from read_spool(run_dir / "spool", report_problem)
    yield from read_traces(run_dir, report_problem)
    yield from read_episodes(run_dir)


def find_newest_version(run_dir: Path | None) -> int | None:
    """Return the newest version in the run's records; None if there is none."""
    found = []
    if run_dir is not None:
        versions = [row.get("version") for row in read_json_objects(run_dir / "metrics.jsonl")]
        found += [version for version in versions[-1:] if version is not None]
        for path in sorted((run_dir / "checkpoints").glob(f"step-*/{STATE_FILE}"))[-1:]:
            try:
                found.append(decode_state(read_file(path)).version)
            except (OSError, CheckpointError):
                continue
    return max(found, default=None)


def find_newest_sampled(path: Path) -> int | None:
    """Return the newest version that sampled any token of a spool."""
    return max(
        (seen.version_range[1] for seen in read_spool(path, lambda _: None) if seen.version_range),
        default=None,
    )


def find_containing_run(path: Path) -> Path | None:
    """Return the run that a file or a directory belongs to: the nearest one above it."""
    return next((parent for parent in Path(os.path.realpath(path)).parents if is_run(parent)), None)


def describe_refused(run_dir: Path) -> list[str]:
    """Describe the accepted trajectories that could not be trained, in one line; no line
    if there are none."""
    kept = list_spool_files(run_dir / "quarantine") if (run_dir / "quarantine").is_dir() else []
    size = sum(path.lstat().st_size for path in kept)
    where = (
        f"r3async inspect {run_dir / 'quarantine'}; reasons: events.jsonl, trajectory_quarantined"
    )
    return (
        [
            (
                f"quarantine: {len(kept)} trajectories that could not be trained, {size:,} "
                f"bytes ({where})"
            )
        ]
        if kept
        else []
    )


def describe_quarantine(run_dir: Path, limit: int = 10) -> list[str]:
    """Describe the tasks that are no longer posed; no lines if there are none."""
    tasks = read_quarantine(run_dir)
    if not tasks:
        return []
    lines = [
        (
            f"quarantined tasks: {len(tasks)} ({QUARANTINE_FILE}); every episode of them failed, "
            "and they are not used again"
        )
    ]
    for task in tasks[:limit]:
        last = next((line for line in task.error.splitlines()[::-1] if line.strip()), "")
        why = (
            f"group {task.group} failed by the {task.failed_by}: {fit_to_cells(last, 120).rstrip()}"
        )
        lines.append(f"  task seed {task.task_seed}: {why}")
    return lines + ([f"  and {len(tasks) - limit} more"] if len(tasks) > limit else [])


def describe_skipped_lines(run_dir: Path) -> list[str]:
    """Describe each file of the run that has unreadable lines, one line each."""
    told = [_describe_config_event(event) for event in make_config_events(run_dir)]
    for file in LINE_TYPES:
        _, numbers, error = read_json_lines(run_dir / file)
        if error:
            told.append(f"{file} cannot be read: {error}")
        elif numbers:
            told.append(
                f"{file}: {len(numbers)} of its lines cannot be read, and are passed over; the "
                f"first is line {numbers[0]}"
            )
    return told


def _describe_config_event(event: dict[str, Any]) -> str:
    if "settings" in event:
        return (
            f"{event['file']}: settings of another type than this release has are passed over: "
            f"{event['settings']}"
        )
    error = f" ({event['error']})" if "error" in event else ""
    return f"{event['file']} cannot be read{error}: the settings are not known"


def describe_sources(run_dir: Path) -> list[str]:
    """Describe each source of trajectories in a line, with the setting that would give more."""
    config = read_run_config(run_dir)
    durability = config.get("buffer", {}).get("durability", "memory")
    spooled = list_spool_files(run_dir / "spool") if (run_dir / "spool").is_dir() else []
    episodes = sum(1 for _ in read_episodes(run_dir))
    index = RouteIndex(run_dir)
    traced = len({(e.facts["step"], e.facts["trajectory_id"]) for e in index.trained_entries})
    trace = config.get("routing", {}).get("trace", "off")
    if durability == "disk" or spooled:
        size = sum(path.lstat().st_size for path in spooled)
        spool = f"{len(spooled)} files, {size:,} bytes, of groups that no checkpoint has trained"
    else:
        spool = (
            f'none (`buffer.durability` is "{durability}"; "disk" keeps what waits to be trained)'
        )
    more = (
        ""
        if trace == "all"
        else f' (`routing.trace` is "{trace}"; "all" keeps every one of an MoE model)'
    )
    return [
        f"spool: {spool}",
        *describe_refused(run_dir),
        f"traces: {traced} trained trajectories, token by token{more}",
        f"conversations: {episodes} (episodes.jsonl), without tokens",
        (
            "  inspect trajectories                      list all of them; --reward-below, "
            "--age-above, --turns: fewer"
        ),
        (
            "  inspect trajectories --tokens             one token per line; --export FILE.jsonl or "
            "FILE.parquet: for programs"
        ),
    ]
