"""The append primitive of all records: whole, in order, kept while the disk refuses; injected and real errors."""

from __future__ import annotations

import asyncio
import errno
import os
import resource
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from r3async.checkpoint.rewind import rewind_records
from r3async.checkpoint.state import ConductorState
from r3async.world.appending import AppendFile, RecordFlusher, whole_record_bytes
from r3async.world.disk import SYSTEM_FILES, SystemFile, SystemFiles
from r3async.world.files import make_directory, replace_file
from r3async.world.real import REAL_WORLD, RealWorld


class FaultyDisk(SystemFiles):
    """Each write takes what the plan says, in bytes, or fails with that error (negative)."""

    def __init__(self, plan: list[int], truncates: list[bool]):
        self.plan, self.truncates = list(plan), list(truncates)

    def open(self, path: Path, **options) -> FaultyFile:
        return FaultyFile(super().open(path, **options)._descriptor, self)


class FaultyFile(SystemFile):
    def __init__(self, descriptor: int, disk: FaultyDisk):
        super().__init__(descriptor)
        self._disk = disk

    def append(self, buffers) -> int:
        left = memoryview(b"".join(buffers))
        while left:
            step = self._disk.plan.pop(0) if self._disk.plan else len(left)
            if step < 0:
                raise OSError(-step, os.strerror(-step))
            left = left[super().append([left[: max(1, step)]]) :]
        return sum(map(len, buffers))

    def truncate(self, size: int) -> None:
        if self._disk.truncates and not self._disk.truncates.pop(0):
            raise OSError(errno.EIO, "it does not shrink either")
        super().truncate(size)


class FaultyWorld(RealWorld):
    def __init__(self, plan: list[int], truncates: list[bool]):
        self.files = FaultyDisk(plan, truncates)


FAULTS = st.sampled_from([-errno.ENOSPC, -errno.EDQUOT, -errno.EIO, 1, 3, 7, 1000, 1000, 1000])


@settings(max_examples=100)
@given(
    plan=st.lists(FAULTS, max_size=40),
    truncates=st.lists(st.booleans(), max_size=10),
    torn=st.booleans(),
    records=st.lists(st.binary(min_size=1, max_size=12).map(bytes.hex).map(str.encode), min_size=1, max_size=25),
)
def test_the_file_holds_a_prefix_of_whole_records_and_in_the_end_all_of_them(
    tmp_path_factory, plan, truncates, torn, records
) -> None:
    path = tmp_path_factory.mktemp("a") / "records.jsonl"
    before = [b"before"]
    path.write_bytes(b"before\n" + (b"half a li" if torn else b""))
    world = FaultyWorld(plan, truncates)
    keeper = RecordFlusher(lambda event, **facts: None, world=world, retry_seconds=0)
    file = AppendFile(path, world=world, flusher=keeper)
    for index, record in enumerate(records):
        written = file.append(record)
        position = keeper.file_position(path)
        # What a resume would make of it: what is whole in the file, and then what waits.
        whole = path.read_bytes()[: position.whole_bytes]
        assert (whole + b"".join(position.waiting_records)).splitlines() == before + records[: index + 1]
        assert written == (not position.waiting_records)
        if index % 3 == 2:
            keeper.retry_writes()
    for _ in range(200):
        if keeper.retry_writes():
            break
    assert path.read_bytes().splitlines() == before + records
    assert file.lost_records == 0


@settings(max_examples=80)
@given(plan=st.lists(FAULTS, max_size=40), count=st.integers(1, 20), saved=st.integers(0, 20))
def test_a_resume_finds_each_row_up_to_its_checkpoint_once_whatever_waited_then(
    tmp_path_factory, plan, count, saved
) -> None:
    run_dir, name = tmp_path_factory.mktemp("a"), "metrics.jsonl"
    keeper = RecordFlusher(lambda event, **facts: None, world=REAL_WORLD, retry_seconds=0)
    state = ConductorState()
    file = AppendFile(run_dir / name, world=FaultyWorld(plan, []), flusher=keeper)
    for index in range(count + 1):
        if index == min(saved, count):
            state = asyncio.run(state.with_record_positions(run_dir, [name], keeper=keeper))
        file.append(b"%d" % index)
        if index % 4 == 3:
            keeper.retry_writes()
    # The process is killed: what waits in it is lost. A checkpoint was made before row `saved`.
    rewind_records(run_dir, state.record_bytes, state.record_kept)
    rows = (run_dir / name).read_bytes().splitlines() if (run_dir / name).exists() else []
    assert rows == [b"%d" % index for index in range(min(saved, count))]


def test_two_events_however_many_files_and_records(tmp_path: Path) -> None:
    told = []
    keeper = RecordFlusher(lambda event, **facts: told.append((event, facts)), world=REAL_WORLD, retry_seconds=0)
    world = FaultyWorld([-errno.ENOSPC] * 8, [])
    files = [AppendFile(tmp_path / f"{name}.jsonl", world=world, flusher=keeper) for name in "ab"]
    for index in range(5):
        for file in files:
            assert not file.append(b"%d" % index)
    while not keeper.retry_writes():
        pass
    assert [event for event, _ in told] == ["records_kept", "records_written"]
    assert told[0][1]["file"] == str(tmp_path / "a.jsonl")
    assert "No space left" in told[0][1]["error"]
    assert told[1][1] | {"seconds": 0} == {"files": ["a.jsonl", "b.jsonl"], "lost": 0, "seconds": 0}
    assert files[0].path.read_bytes() == files[1].path.read_bytes() == b"0\n1\n2\n3\n4\n"


def test_what_memory_has_no_capacity_for_is_counted_and_said(tmp_path: Path) -> None:
    told = []
    keeper = RecordFlusher(lambda event, **facts: told.append((event, facts)), world=REAL_WORLD, retry_seconds=0)
    world = FaultyWorld([-errno.ENOSPC], [])
    file = AppendFile(tmp_path / "a.jsonl", world=world, flusher=keeper, max_waiting_bytes=30)
    for index in range(5):
        file.append(b"record %d" % index)
    assert (file.lost_records, file.waiting_count) == (2, 3)
    assert keeper.retry_writes()
    assert file.append(b"record 5")
    assert file.path.read_bytes() == b"record 0\nrecord 1\nrecord 2\nrecord 5\n"
    assert [event for event, _ in told] == ["records_kept", "records_lost", "records_written"]
    assert told[-1][1]["lost"] == 2


def test_the_thread_writes_what_waits_without_a_further_record(tmp_path: Path) -> None:
    done = threading.Event()
    keeper = RecordFlusher(
        lambda event, **facts: event == "records_written" and done.set(), world=REAL_WORLD, retry_seconds=0.01
    )
    file = AppendFile(tmp_path / "a.jsonl", world=FaultyWorld([-errno.EIO] * 3, []), flusher=keeper)
    file.append(b"last words")
    assert done.wait(120)
    assert file.path.read_bytes() == b"last words\n"


def limited(script: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """A process whose files may have 1,000 bytes: the kernel itself cuts its writes short and refuses the next."""

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 10**6))
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)

    return subprocess.run(
        [sys.executable, "-c", script, *arguments], capture_output=True, text=True, timeout=240, preexec_fn=limit
    )


def test_a_kernel_that_cuts_a_write_short_leaves_no_half_record(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    script = """
import resource, sys
from pathlib import Path
from r3async.world.appending import AppendFile, RecordFlusher
from r3async.world.real import REAL_WORLD
path, told = Path(sys.argv[1]), []
keeper = RecordFlusher(lambda event, **facts: told.append(event), world=REAL_WORLD, retry_seconds=0)
file = AppendFile(path, world=REAL_WORLD, flusher=keeper)
print([file.append(b"%02d" % i + b"x" * 400) for i in range(5)], path.stat().st_size, told)
resource.setrlimit(resource.RLIMIT_FSIZE, (10**6, 10**6))
print(keeper.retry_writes(), told)
"""
    done = limited(script, str(path))
    assert done.stderr == ""
    assert done.stdout.splitlines() == [
        "[True, True, False, False, False] 806 ['records_kept']",
        "True ['records_kept', 'records_written']",
    ]
    assert path.read_bytes() == b"".join(b"%02d" % i + b"x" * 400 + b"\n" for i in range(5))


def test_a_log_on_a_full_disk_raises_from_no_print(tmp_path: Path) -> None:
    log = tmp_path / "log"
    script = """
import logging, os, resource, sys
from r3async.world.process_output import ignore_output_errors
log = os.open(sys.argv[1], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
os.dup2(log, 1), os.dup2(log, 2)
ignore_output_errors()
for i in range(100):
    print(i, "x" * 30)
    print(i, file=sys.stderr)
    logging.warning("odd")
resource.setrlimit(resource.RLIMIT_FSIZE, (10**6, 10**6))
print("again")
"""
    assert limited(script, str(log)).returncode == 0
    text = log.read_text()
    assert text.startswith("0 xxxxxx")
    assert "bytes of this log were not written" in text
    assert text.endswith("again\n")


def test_a_process_that_was_stopped_within_its_write_holds_nobody_up(tmp_path: Path) -> None:
    import fcntl

    path, told = tmp_path / "a.jsonl", []
    keeper = RecordFlusher(lambda event, **facts: told.append(event), world=REAL_WORLD, retry_seconds=0)
    other = os.open(path, os.O_RDWR | os.O_CREAT)
    fcntl.flock(other, fcntl.LOCK_EX)
    assert not AppendFile(path, world=REAL_WORLD, flusher=keeper).append(b"one")
    os.close(other)
    assert keeper.retry_writes()
    assert path.read_bytes() == b"one\n"
    assert told == []


@pytest.mark.parametrize(
    ("data", "whole"), [(b"", 0), (b"a\n", 2), (b"a\nb", 2), (b"abc", 0), (b"a\n" + b"x" * 9999, 2)]
)
def test_whole_bytes_end_with_the_last_whole_line(tmp_path: Path, data: bytes, whole: int) -> None:
    path = tmp_path / "a"
    path.write_bytes(data)
    assert whole_record_bytes(path, files=SYSTEM_FILES) == whole
    assert whole_record_bytes(tmp_path / "none", files=SYSTEM_FILES) == 0


def test_a_new_directory_and_its_parents_are_synced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced, real = [], os.fsync
    monkeypatch.setattr(os, "fsync", lambda fd: (synced.append(os.readlink(f"/proc/self/fd/{fd}")), real(fd))[1])
    make_directory(tmp_path / "a" / "b")
    assert {str(tmp_path.parent), str(tmp_path), str(tmp_path / "a"), str(tmp_path / "a" / "b")} == set(synced)
    synced.clear()
    make_directory(tmp_path / "a" / "b")  # it is there, perhaps since a call that failed: its name alone
    assert synced == [str(tmp_path / "a")]
    (tmp_path / "file").write_text("")
    with pytest.raises(FileExistsError, match="no directory"):
        make_directory(tmp_path / "file")


def test_a_file_is_replaced_whole_or_stays_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.json"
    replace_file(path, b"one")
    monkeypatch.setattr(os, "fsync", lambda fd: (_ for _ in ()).throw(OSError(errno.ENOSPC, "full")))
    with pytest.raises(OSError, match="full"):
        replace_file(path, b"two")
    monkeypatch.undo()
    assert path.read_bytes() == b"one"
    assert [p.name for p in tmp_path.iterdir()] == ["a.json"]
    replace_file(path, b"three", 0o600)
    assert (path.read_bytes(), path.stat().st_mode & 0o777) == (b"three", 0o600)


def test_what_waits_when_the_process_exits_is_tried_once_more(tmp_path: Path) -> None:
    script = """
import resource, sys
from pathlib import Path
from r3async.world.appending import AppendFile
from r3async.world.real import REAL_WORLD
file = AppendFile(Path(sys.argv[1]), world=REAL_WORLD)
print(file.append(b"x" * 2000))
resource.setrlimit(resource.RLIMIT_FSIZE, (10**6, 10**6))
"""
    assert limited(script, str(tmp_path / "a")).stdout == "False\n"
    assert (tmp_path / "a").read_bytes() == b"x" * 2000 + b"\n"
