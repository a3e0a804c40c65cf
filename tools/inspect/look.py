"""The answers of `r3async inspect` for each kind of target."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from rich.console import Console

from r3async.record.reading import EVALUATION_FILE, read_json_objects
from r3async.views.episodes import RunTokenizer

from . import checkpoint as checkpoints
from .export import export_trajectories as write_file
from .routes import describe_route_traces, print_routes, print_verification
from .run import InspectError, find_file, find_run, is_checkpoint
from .show import make_printer, print_tokens, print_trajectories, write_json_lines
from .sources import (
    describe_quarantine,
    describe_skipped_lines,
    describe_sources,
    find_containing_run,
    find_newest_sampled,
    find_newest_version,
    list_spool_files,
    read_run_trajectories,
    read_spool,
)
from .trajectories import InspectedTrajectory, TrajectoryFilter, iter_tokens
from .wire import describe_message, read_messages

LIST_LIMIT = 20
TOKENS_LIMIT = 1
TENSORS_LIMIT = 50
MESSAGES_LIMIT = 5


class Inspection(NamedTuple):
    """One answer, printed on `console`.

    Unreadable data is added to `problems`, and the rest is shown. The methods raise `InspectError`
    for a target that does not exist. Their `limit` is the maximum number of items to show: 0 for
    all, None for as many as fit a screen.
    """

    console: Console
    problems: list[str]
    root: Path
    """Directory in which runs are found by name."""

    def show_target(self, target: str, limit: int | None, json: bool) -> None:
        """Show the parts of a run, the trajectories of a spool, a checkpoint, a directory of
        them, or a message."""
        found = find_file(target, self.root)
        if found is None:
            self._show_overview(find_run(target, self.root))
        elif found.is_dir() and found.name == "checkpoints":
            self._show_checkpoints(found)
        elif is_checkpoint(found):
            self._show_checkpoint(found, limit, json)
        elif found.is_dir() or found.suffix == ".spool":
            self.show_trajectories(target, TrajectoryFilter(), None, limit, json=json)
        else:
            self.show_frames(target, limit, json)

    def show_routes(
        self,
        run: str,
        trajectory: str | None,
        step: int | None,
        layers: Sequence[int],
        *,
        diff: bool,
        json: bool,
    ) -> None:
        run_dir = self._find_run(run)
        tokenizer = self._open_tokenizer(run_dir)
        print_routes(
            run_dir,
            tokenizer,
            self.console,
            trajectory=trajectory,
            step=step,
            layers=layers,
            diff=diff,
            json=json,
        )

    def verify_routes(self, run: str, json: bool) -> bool:
        """Return whether training used the engine's routes."""
        return print_verification(self._find_run(run), self.console, json=json)

    def _find_run(self, name: str) -> Path:
        found = find_file(name, self.root)
        if found is not None:
            raise InspectError(f"{found} is no run: only a run has routes")
        return find_run(name, self.root)

    def _show_overview(self, run_dir: Path) -> None:
        say = make_printer(self.console)
        say(f"{run_dir.resolve().name}  ({run_dir})", "bold")
        for line in [*describe_route_traces(run_dir), *describe_run_contents(run_dir)]:
            say(line)
        self.problems.extend(describe_skipped_lines(run_dir))

    # -- trajectories ------------------------------------------------------------------------------

    def show_trajectories(
        self,
        target: str,
        trajectory_filter: TrajectoryFilter,
        version: int | None,
        limit: int | None,
        *,
        tokens: bool = False,
        export: Path | None = None,
        json: bool = False,
    ) -> None:
        """Show trajectories of a run or a spool as a list or as tokens, or write them to a file.

        Args:
            version: The version from which ages count; None for the newest known.
        """
        spool = find_file(target, self.root)
        run_dir: Path | None
        if spool is None:
            run_dir = find_run(target, self.root)
            spool = run_dir / "spool"
            found = read_run_trajectories(run_dir, self.problems.append)
            kept_in = [line for line in describe_sources(run_dir) if not line.startswith(" ")]
        else:
            files = list_spool_files(spool)
            if not files:
                raise InspectError(
                    f"{spool} has no spool file: everything that was accepted is in a checkpoint"
                )
            run_dir = find_containing_run(spool)
            found = read_spool(spool, self.problems.append)
            kept_in = [f"{spool}: {len(files)} files"]
        if version is None:
            known = find_newest_version(run_dir), find_newest_sampled(spool)
            version = max((each for each in known if each is not None), default=None)
        kept = (
            seen
            for seen in found
            if trajectory_filter.matches_trajectory(seen, version) and (seen.samples or not tokens)
        )
        default = 0 if export else TOKENS_LIMIT if tokens else LIST_LIMIT
        shown = _LimitedIterator(kept, default if limit is None else limit)
        if export:
            make_printer(self.console)(
                f"{export}: {write_file(shown, export, version)} trajectories"
            )
        elif tokens:
            self._show_tokens(shown, version, self._open_tokenizer(run_dir or Path("none")), json)
        elif json:
            write_json_lines((seen.to_facts(version) for seen in shown), self.console)
        elif rows := [seen.to_facts(version) for seen in shown]:
            print_trajectories(rows, shown.hidden, self.console)
        if not shown.count:
            raise InspectError("no such trajectory was kept. " + "; ".join(kept_in))

    def _open_tokenizer(self, run_dir: Path) -> RunTokenizer:
        tokenizer = RunTokenizer(run_dir)
        self.problems.extend(tokenizer.problems)
        return tokenizer

    def _show_tokens(
        self,
        shown: Iterable[InspectedTrajectory],
        version: int | None,
        tokenizer: RunTokenizer,
        json: bool,
    ) -> None:
        for seen in shown:
            if json:
                for sample in seen.samples:
                    write_json_lines(
                        iter_tokens(seen, sample, tokenizer.decode_token), self.console
                    )
            else:
                print_tokens(seen, version, tokenizer.decode_token, self.console)

    # -- messages and checkpoints ------------------------------------------------------------------

    def show_frames(self, target: str, limit: int | None, json: bool) -> None:
        """Show the messages of a spool or of one of its files, or of a file with
        a single message."""
        path = find_file(target, self.root)
        if path is None:
            raise InspectError(
                "frames are of a spool or a message, for example of "
                f"{find_run(target, self.root) / 'spool'}"
            )
        for file in list_spool_files(path):
            try:
                self._show_messages(file, MESSAGES_LIMIT if limit is None else limit, json)
            except OSError as error:
                self.problems.append(f"{file}: {error.strerror or error}")

    def _show_messages(self, path: Path, limit: int, json: bool) -> None:
        say = make_printer(self.console)
        hidden = 0
        for number, (offset, frames) in enumerate(read_messages(path, self.problems.append)):
            lines, problem = describe_message(frames)
            if problem:
                self.problems.append(
                    f"{path}: the message at byte {offset} cannot be read: {problem}"
                )
            if limit and number >= limit:
                hidden += 1
                continue
            size = sum(memoryview(frame).nbytes for frame in frames)
            if json:
                facts = {
                    "file": str(path),
                    "offset": offset,
                    "bytes": size,
                    "frames": [x.strip() for x in lines],
                }
                write_json_lines([facts | {"problem": problem}], self.console)
                continue
            say(f"message at byte {offset} of {path}: {len(frames)} frames, {size:,} bytes", "bold")
            for line in lines:
                say(line)
        if hidden and not json:
            say(f"and {hidden} more; --limit 0 shows all")

    def _show_checkpoint(self, path: Path, limit: int | None, json: bool) -> None:
        seen = checkpoints.inspect_checkpoint(path)
        self.problems.extend(f"{path}: {problem}" for problem in seen.problems)
        if json:
            write_json_lines([seen], self.console)
            return
        for line in checkpoints.describe_checkpoint(
            seen, TENSORS_LIMIT if limit is None else limit
        ):
            make_printer(self.console)(line, "bold" if line.startswith("checkpoint") else "")

    def _show_checkpoints(self, path: Path) -> None:
        lines, broken = checkpoints.summarize_checkpoints(path)
        self.problems.extend(broken)
        if not lines:
            raise InspectError(f"{path} has no checkpoint")
        for line in lines:
            make_printer(self.console)(line)


class _LimitedIterator:
    """An iterator over the first `limit` of `trajectories` (0: all) that counts the
    others in `hidden`."""

    def __init__(self, trajectories: Iterable[InspectedTrajectory], limit: int):
        self._found = trajectories
        self._limit = limit
        self.count = self.hidden = 0

    def __iter__(self) -> Iterator[InspectedTrajectory]:
        for seen in self._found:
            self.count += 1
            if self._limit and self.count > self._limit:
                self.hidden += 1
            else:
                yield seen


def describe_run_contents(run_dir: Path) -> list[str]:
    """Describe a run's trajectories, checkpoints and evaluations for its overview, with the
    commands to show them."""
    lines = describe_sources(run_dir)
    found, _ = (
        checkpoints.summarize_checkpoints(run_dir / "checkpoints")
        if (run_dir / "checkpoints").is_dir()
        else ([], [])
    )
    lines.append(
        f"checkpoints: {len(found)}"
        + (f" (r3async inspect {run_dir / 'checkpoints'})" if found else "")
    )
    lines += [f"  {line}" for line in found[-3:]]
    evaluations = len(read_json_objects(run_dir / EVALUATION_FILE))
    if evaluations:
        lines.append(f"evaluations: {evaluations} (evaluation.jsonl; `r3async report` draws them)")
    return lines + describe_quarantine(run_dir)
