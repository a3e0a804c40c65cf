"""The simulated disk does what the real one does, and loses with its power nothing that was synced."""

import errno
import itertools
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from dev.simulation.disk import SimulatedFiles
from r3async.world.appending import AppendFile, RecordFlusher
from r3async.world.disk import SystemFiles
from r3async.world.files import make_directory, replace_file
from r3async.world.real import RealWorld
from tests.helpers.disk import Ended, Process, disk_and_files, read, write

PATHS = st.sampled_from(["a", "b", "d", "d/x", "d/e", "d/e/y", "d/e/z", "no/x"])
PIECES = st.lists(st.binary(max_size=40), max_size=6)
SMALL = st.integers(0, 60)
LENGTH = st.none() | SMALL
OPEN = st.sampled_from([{}, {"create": True}, {"exclusive": True}])
OF_FILES = st.one_of(
    st.tuples(st.just("open"), PATHS, OPEN),
    st.tuples(
        st.sampled_from(["stat", "list_names", "create_directory", "remove", "remove_tree", "fsync_directory", "free"]),
        PATHS,
    ),
    st.tuples(st.just("rename"), PATHS, PATHS),
)
OF_A_FILE = st.one_of(
    st.tuples(st.just("append"), PIECES),
    st.tuples(st.just("truncate"), SMALL),
    st.tuples(st.sampled_from(["read", "map_bytes"]), SMALL, LENGTH),
    st.tuples(st.sampled_from(["size", "fsync", "unlock", "close"])),
    st.tuples(st.just("lock"), st.booleans()),
)
STEPS = st.lists(OF_FILES | st.tuples(st.integers(0, 3), OF_A_FILE), max_size=60)
BEGIN = [
    ("create_directory", "d"),
    ("create_directory", "d/e"),
    ("open", "a", {"create": True}),
    ("open", "a", {}),
    (0, ("append", [b"x" * 9])),
]


class Tried:
    """Applies steps to a disk, and says what each returned or raised."""

    def __init__(self, files: Any, root: Path):
        self.files, self.root, self.opened = files, root, []

    def do(self, step: tuple[Any, ...]) -> Any:
        try:
            return self._of_files(*step) if isinstance(step[0], str) else self._of_a_file(step[0], *step[1])
        except OSError as error:
            return type(error), error.errno

    def _of_files(self, operation: str, name: str, *rest: Any) -> Any:
        path = self.root / name
        match operation:
            case "open":
                found = self.files.stat(path)
                if found is not None and found.is_directory:  # only the real one opens a directory for reading
                    return "a directory"
                self.opened.append(self.files.open(path, **rest[0]))
                return "open"
            case "stat":
                found = self.files.stat(path)
                return found and (found.is_directory, found.is_directory or found.size)
            case "free":
                return self.files.free_bytes(path) > 0
            case "rename":
                return self.files.rename(path, self.root / rest[0])
        return getattr(self.files, operation)(path)

    def _of_a_file(self, number: int, operation: str, *rest: Any) -> Any:
        if not self.opened:
            return None
        file = self.opened[number % len(self.opened)]
        if operation == "close":
            self.opened.remove(file)
            file.close()
            return file.close()
        if operation == "lock":
            return file.lock(shared=rest[0])
        result = getattr(file, operation)(*rest)
        return bytes(result) if operation == "map_bytes" else result

    def everything(self, directory: str = ".") -> dict[str, Any]:
        found: dict[str, Any] = {}
        for name in self.files.list_names(self.root / directory):
            path = f"{directory}/{name}"
            if self.files.stat(self.root / path).is_directory:
                found |= {path: None, **self.everything(path)}
            else:
                with self.files.open(self.root / path) as file:
                    found[path] = file.read()
        return found

    def close(self) -> None:
        for file in self.opened:
            file.close()


@settings(max_examples=150)
@given(steps=STEPS)
@example(steps=[("remove_tree", "d"), ("open", "d", {"create": True}), ("remove", "d/x")])
def test_every_call_returns_or_raises_what_the_real_one_does(tmp_path_factory, steps) -> None:
    real = Tried(SystemFiles(), tmp_path_factory.mktemp("real"))
    disk, files = disk_and_files()
    simulated = Tried(files, Path("/run"))
    try:
        for step in [*BEGIN, *steps]:
            assert simulated.do(step) == real.do(step), step
        assert simulated.everything() == real.everything()
    finally:
        real.close()
    assert disk.used_bytes == sum(len(data) for data in simulated.everything().values() if data is not None)


@settings(max_examples=300)
@given(steps=STEPS, seed=st.integers(0, 2**32))
def test_what_is_synced_survives_a_power_failure(steps, seed) -> None:
    """After a last `sync` of everything, whatever happened before; and nothing appears that never was."""
    disk, files = disk_and_files(seed)
    tried = Tried(files, Path("/run"))
    for step in [*BEGIN, *steps]:
        tried.do(step)
    there = tried.everything()
    files.fsync_directory(Path("/run"))
    for name, data in there.items():
        if data is None:
            files.fsync_directory(Path("/run") / name)
        else:
            with files.open(Path("/run") / name) as file:
                file.fsync()
    disk.lose_power()
    assert Tried(disk.files_for(Process()), Path("/run")).everything() == there
    assert disk.used_bytes == sum(len(data) for data in there.values() if data is not None)


@settings(max_examples=300)
@given(steps=STEPS, synced=st.integers(0, 60), seed=st.integers(0, 2**32))
def test_the_same_seed_leaves_the_same_and_of_a_synced_file_at_least_what_was_synced(steps, synced, seed) -> None:
    left = []
    for _ in range(2):
        disk, files = disk_and_files(seed)
        tried = Tried(files, Path("/run"))
        kept = Path("/run/kept")
        write(files, kept, b"synced" * synced)
        with files.open(kept, create=True) as file:
            file.fsync()
        files.fsync_directory(Path("/run"))
        for step in [*BEGIN, *steps]:
            tried.do(step)
        write(files, kept, b"and more")
        disk.lose_power()
        after = Tried(disk.files_for(Process()), Path("/run"))
        left.append(after.everything())
        assert left[-1]["./kept"].startswith(b"synced" * synced)
    assert left[0] == left[1]


def fates(change: Callable[[SimulatedFiles], object], look: Callable[[SimulatedFiles], Any]) -> set[Any]:
    """What a power failure makes of a change, over seeds."""
    found = set()
    for seed in range(60):
        disk, files = disk_and_files(seed)
        change(files)
        disk.lose_power()
        found.add(look(disk.files_for(Process())))
    return found


A, B = Path("/run/a"), Path("/run/b")


def test_what_is_not_synced_is_lost_or_there_or_torn() -> None:
    def new_name(files: SimulatedFiles) -> None:
        with files.open(A, exclusive=True) as file:
            file.append([b"content"])
            file.fsync()

    assert fates(new_name, lambda files: read(files, A)) == {None, b"content"}

    def new_content(files: SimulatedFiles) -> None:
        with files.open(A, exclusive=True) as file:
            files.fsync_directory(Path("/run"))
            file.append([b"x" * 2000])

    contents = fates(new_content, lambda files: read(files, A))
    assert {b"", b"x" * 2000} < contents
    assert any(0 < len(content) < 2000 for content in contents)
    assert any(0 in content for content in contents)

    def replaced(files: SimulatedFiles) -> None:
        write(files, A, b"old")
        with files.open(A) as file:
            file.fsync()
        files.fsync_directory(Path("/run"))
        write(files, B, b"new")
        files.rename(B, A)

    after = fates(replaced, lambda files: (read(files, A), read(files, B)))
    assert (b"old", None) in after  # nothing
    assert (b"new", None) in after  # everything
    assert (b"", None) in after  # the name without the content: what a rename without a sync does


def test_a_truncated_file_may_have_its_synced_content_again() -> None:
    def truncated(files: SimulatedFiles) -> None:
        with files.open(A, exclusive=True) as file:
            file.append([b"synced"])
            file.fsync()
            files.fsync_directory(Path("/run"))
            file.truncate(2)
            file.append([b"other"])

    contents = fates(truncated, lambda files: read(files, A))
    assert {b"synced", b"syother", b"sy"} <= contents
    assert all(content.startswith(b"sy") for content in contents)


def test_a_file_that_is_replaced_is_old_or_new_whenever_power_fails() -> None:
    """`replace_file` and `make_directory`, with the power failing before each of their operations in turn."""
    seen = set()
    for seed, at in itertools.product(range(10), range(20)):
        disk, files = disk_and_files(seed)
        replace_file(A, b"old", files=files)
        left = [at]

        def fail(process: Process, operation: str, path: Path, left: list[int] = left, disk=disk) -> None:
            left[0] -= 1
            if left[0] < 0:
                process.end()
                disk.lose_power()

        disk.on_operation = fail
        try:
            replace_file(A, b"new", files=files)
            make_directory(Path("/run/x/y"), files=files)
            left[0] = 0
            files.stat(A)
        except Ended:
            pass
        disk.on_operation = lambda *_: None
        after = disk.files_for(Process())
        seen.add((read(after, A), after.list_names(Path("/run/x")) == ["y"]))
    assert seen == {(b"old", False), (b"new", False), (b"new", True)}


def test_what_a_killed_process_wrote_is_there_and_its_locks_are_not() -> None:
    disk, _ = disk_and_files()
    process, other = Process(), disk.files_for(Process())
    killed = disk.files_for(process)
    file = killed.open(A, create=True)
    file.append([b"written"])
    file.lock()
    with other.open(A) as mine:
        with pytest.raises(BlockingIOError):
            mine.lock()
        process.end()
        mine.lock()
    for call in (file.size, file.fsync, lambda: file.append([b"more"]), lambda: killed.remove(A)):
        with pytest.raises(Ended):
            call()
    file.unlock()  # what a `finally` does has no effect
    file.close()
    assert read(other, A) == b"written"


def test_a_process_that_is_killed_within_a_write_leaves_a_part_of_it() -> None:
    lengths = set()
    for seed in range(40):
        disk, files = disk_and_files(seed)
        process = Process()
        file = disk.files_for(process).open(A, create=True)
        disk.on_operation = lambda process, operation, path: operation == "append" and process.end()
        with pytest.raises(Ended):
            file.append([b"12345", b"67890"])
        lengths.add(len(read(files, A)))
    assert {0, 10} < lengths < set(range(11)) | {10}


def test_a_full_disk_takes_what_fits_until_something_is_removed() -> None:
    disk, files = disk_and_files(total_bytes=100)
    write(files, A, b"a" * 60)
    file = files.open(B, create=True)
    with pytest.raises(OSError, match="No space left") as caught:
        file.append([b"b" * 30, b"b" * 30])
    assert caught.value.errno == errno.ENOSPC
    assert (file.size(), files.free_bytes(B), disk.used_bytes) == (40, 0, 100)
    with pytest.raises(OSError, match="No space left"):
        files.create_directory(Path("/run/d"))
    files.remove(A)
    assert files.free_bytes(B) == 60
    assert file.append([b"b" * 60]) == 60
    files.remove(B)
    assert disk.used_bytes == 0
    assert file.append([b"b" * 200]) == 200  # it has no name: nobody counts it


def test_what_is_refused_fails_there_and_nowhere_else() -> None:
    disk, files = disk_and_files()
    write(files, A, b"before")
    disk.refuse_operations(Path("/run"), errno.EIO)
    for call in (
        lambda: files.open(B, create=True),
        lambda: files.remove(A),
        lambda: files.rename(A, B),
        lambda: files.fsync_directory(Path("/run")),
        lambda: files.open(A, create=True).append([b"x"]),
    ):
        with pytest.raises(OSError, match="Input/output error"):
            call()
    assert files.stat(B) is None
    assert read(files, A)[:6] == b"before"
    write(files, Path("/elsewhere"), b"x")
    write(files, Path("/runs"), b"x")
    disk.allow_operations(Path("/run"))
    disk.refuse_operations(A, errno.ENOSPC)
    with pytest.raises(OSError, match="No space left"):
        write(files, A, b"x")
    files.remove(A)


def test_operations_take_their_time_and_are_observed() -> None:
    disk, files = disk_and_files()
    seen: list[tuple[str, str]] = []
    disk.on_operation = lambda process, operation, path: seen.append((operation, str(path)))
    disk.latency, disk.bytes_per_second = 0.5, 100.0
    write(files, A, b"x" * 50)
    assert math.isclose(files.process.disk_seconds, 0.5 + 0.5 + 0.5)
    assert seen == [("create", "/run/a"), ("append", "/run/a")]


@settings(max_examples=100)
@given(seed=st.integers(0, 2**32), records=st.integers(1, 30))
def test_records_on_a_disk_that_writes_short_are_whole_and_in_order(seed, records) -> None:
    disk, files = disk_and_files(seed)

    class Simulated(RealWorld):
        pass

    world = Simulated()
    world.files = files  # type: ignore[assignment]
    keeper = RecordFlusher(lambda event, **facts: None, world=world, retry_seconds=0)
    file = AppendFile(Path("/run/records/a.jsonl"), world=world, flusher=keeper)
    disk.short_write_rate = 0.4
    for index in range(records):
        file.append(b"record %d" % index)
        assert set(read(files, file.path).split(b"\n")) <= {b"", *(b"record %d" % i for i in range(records))}
    disk.short_write_rate = 0.0
    assert keeper.retry_writes()
    assert read(files, file.path) == b"".join(b"record %d\n" % index for index in range(records))


def test_a_process_without_descriptors_opens_nothing_and_goes_on_with_what_it_has():
    _, files = disk_and_files()
    with files.open(Path("/a"), exclusive=True) as file:
        files.process.out_of_descriptors = True
        file.append([b"x"])
        for opening in (
            lambda: files.open(Path("/a")),
            lambda: files.open(Path("/b"), create=True),
            lambda: files.list_names(Path("/")),
        ):
            with pytest.raises(OSError, match="Too many open files"):
                opening()
        assert files.stat(Path("/a")).size == 1
        files.process.out_of_descriptors = False
        assert "a" in files.list_names(Path("/"))
