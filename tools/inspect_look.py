"""What `r3async inspect` does with each kind of thing. `problems` gets what could not be read; the rest is shown."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from r3async.observe.jsonl import read_objects
from r3async.observe.quarantine import describe_quarantine
from r3async.observe.tokens import RunTokenizer
from tools import inspect_checkpoint as checkpoints
from tools.inspect_export import export
from tools.inspect_run import InspectError, is_checkpoint
from tools.inspect_show import print_list, print_tokens, printer, write_json
from tools.inspect_sources import newest_sampled, newest_version, read_run, read_spool, run_of, sources_of, spool_files
from tools.inspect_trajectories import Filter, Seen, tokens_of
from tools.inspect_wire import describe_message, is_spool_file, read_messages

if TYPE_CHECKING:
    from tools.inspect_command import Wanted

LIST_LIMIT, TOKENS_LIMIT, TENSORS_LIMIT, MESSAGES_LIMIT = 20, 1, 50, 5


def look_at(path: Path, wanted: Wanted, console: Console, problems: list[str]) -> None:
    """A spool, one of its files, a checkpoint, a directory of them, or a message. Raises `InspectError` for anything else."""
    if path.is_dir() and path.name == "checkpoints":
        _checkpoints(path, wanted, console, problems)
    elif is_checkpoint(path):
        _checkpoint(path, wanted, console, problems)
    elif path.is_dir() or path.suffix == ".spool" or (wanted.of_trajectories and is_spool_file(path)):
        _spool(path, wanted, console, problems)
    else:
        _messages(path, wanted, console, problems)


# -- trajectories ------------------------------------------------------------------------------------------------------


def run_trajectories(run_dir: Path, wanted: Wanted, console: Console, problems: list[str]) -> None:
    """Of all that the run holds."""
    version = wanted.version if wanted.version is not None else newest_version(run_dir)
    if version is None:
        version = newest_sampled(run_dir / "spool")
    told = [line for line in sources_of(run_dir) if not line.startswith(" ")]
    _trajectories(read_run(run_dir, problems.append), version, run_dir, told, wanted, console)


def _spool(path: Path, wanted: Wanted, console: Console, problems: list[str]) -> None:
    files = spool_files(path)
    if not files:
        raise InspectError(f"{path} has no spool file: everything that was accepted is in a checkpoint")
    if wanted.frames:
        for file in files:
            _messages(file, wanted, console, problems)
        return
    run_dir = run_of(path)
    known = [v for v in (newest_version(run_dir), newest_sampled(path)) if v is not None]
    version = wanted.version if wanted.version is not None else max(known, default=None)
    _trajectories(read_spool(path, problems.append), version, run_dir, [f"{path}: {len(files)} files"], wanted, console)


def _trajectories(
    found: Iterable[Seen], version: int | None, run_dir: Path | None, told: list[str], wanted: Wanted, console: Console
) -> None:
    """List, tokens, or a file. `told`: where they come from, for whom nothing was found."""
    keep = Filter(wanted.reward_below, wanted.age_above, wanted.turns, wanted.trajectory, wanted.step)
    kept = (seen for seen in found if keep.keeps(seen, version))
    if wanted.tokens:
        kept = (seen for seen in kept if seen.samples)
    default = 0 if wanted.export else TOKENS_LIMIT if wanted.tokens else LIST_LIMIT
    limit = default if wanted.limit is None else wanted.limit
    shown = _Limited(kept, limit)
    if wanted.export:
        count = export(shown, wanted.export, version)
        console.print(f"{wanted.export}: {count} trajectories", highlight=False, markup=False, soft_wrap=True)
    elif wanted.tokens:
        text = RunTokenizer(run_dir or Path("none")).text
        for seen in shown:
            if wanted.json:
                for sample in seen.samples:
                    write_json(tokens_of(seen, sample, text), console)
            else:
                print_tokens(seen, version, text, console)
    elif wanted.json:
        write_json((seen.facts(version) for seen in shown), console)
    else:
        rows = [seen.facts(version) for seen in shown]
        if rows:
            print_list(rows, shown.hidden, console)
    if not shown.count:
        raise InspectError("no such trajectory was kept. " + "; ".join(told))


class _Limited:
    """The first `limit` of `found` (0: all); the others are counted as `hidden`."""

    def __init__(self, found: Iterable[Seen], limit: int):
        self._found, self._limit = found, limit
        self.count = self.hidden = 0

    def __iter__(self) -> Iterator[Seen]:
        for seen in self._found:
            self.count += 1
            if self._limit and self.count > self._limit:
                self.hidden += 1
            else:
                yield seen


# -- messages and checkpoints ------------------------------------------------------------------------------------------


def _messages(path: Path, wanted: Wanted, console: Console, problems: list[str]) -> None:
    say, limit = printer(console), MESSAGES_LIMIT if wanted.limit is None else wanted.limit
    hidden = 0
    for number, (offset, frames) in enumerate(read_messages(path, problems.append)):
        lines, problem = describe_message(frames)
        if problem:
            problems.append(f"{path}: the message at byte {offset} can not be read: {problem}")
        if limit and number >= limit:
            hidden += 1
            continue
        size = sum(memoryview(frame).nbytes for frame in frames)
        if wanted.json:
            write_json([_message_facts(path, offset, size, lines, problem)], console)
            continue
        say(f"message at byte {offset} of {path}: {len(frames)} frames, {size:,} bytes", "bold")
        for line in lines:
            say(line)
    if hidden and not wanted.json:
        say(f"and {hidden} more; --limit 0 shows all")


def _message_facts(path: Path, offset: int, size: int, lines: list[str], problem: str) -> dict[str, Any]:
    return {
        "file": str(path),
        "offset": offset,
        "bytes": size,
        "frames": [x.strip() for x in lines],
        "problem": problem,
    }


def _checkpoint(path: Path, wanted: Wanted, console: Console, problems: list[str]) -> None:
    seen = checkpoints.look(path)
    problems += [f"{path}: {problem}" for problem in seen.problems]
    if wanted.json:
        write_json([seen], console)
        return
    for line in checkpoints.describe(seen, TENSORS_LIMIT if wanted.limit is None else wanted.limit):
        printer(console)(line, "bold" if line.startswith("checkpoint") else "")


def _checkpoints(path: Path, wanted: Wanted, console: Console, problems: list[str]) -> None:
    lines, broken = checkpoints.overview(path)
    problems += broken
    if not lines:
        raise InspectError(f"{path} has no checkpoint")
    for line in lines:
        printer(console)(line)


def describe_rest(run_dir: Path) -> list[str]:
    """For the overview of a run: its trajectories, checkpoints and evaluations, and how to look at them."""
    lines = sources_of(run_dir)
    found, _ = checkpoints.overview(run_dir / "checkpoints") if (run_dir / "checkpoints").is_dir() else ([], [])
    lines.append(f"checkpoints: {len(found)}" + (f" (r3async inspect {run_dir / 'checkpoints'})" if found else ""))
    lines += [f"  {line}" for line in found[-3:]]
    evaluations = sum(1 for _ in read_objects(run_dir / "evaluation.jsonl"))
    if evaluations:
        lines.append(f"evaluations: {evaluations} (evaluation.jsonl; `r3async report` draws them)")
    return lines + describe_quarantine(run_dir)
