"""Runner of `python -m dev fuzz`: damages messages, spool files and checkpoints, and
reports the outcomes."""

from __future__ import annotations

import asyncio
import tempfile
from pathlib import Path

import msgspec

from dev.fuzz.checkpoints import fuzz_checkpoints
from dev.fuzz.common import FuzzReport
from dev.fuzz.messages import fuzz_receiver, fuzz_spool


def run_fuzz(*, messages: int, files: int, checkpoints: int, seed: int) -> None:
    """Fuzz each kind of input, and print one JSON line for each. Raises `AssertionError` for a
    wrong outcome, and any unexpected exception of a reader."""
    if messages:
        print_report("receiver", seed, asyncio.run(fuzz_receiver(messages, seed)))
    if files:
        with tempfile.TemporaryDirectory(prefix="r3async-fuzz-") as directory:
            print_report("spool", seed, asyncio.run(fuzz_spool(files, seed, Path(directory))))
    if checkpoints:
        # A refused checkpoint is renamed, to the disk.
        memory = "/dev/shm" if Path("/dev/shm").is_dir() else None
        with tempfile.TemporaryDirectory(prefix="r3async-fuzz-", dir=memory) as directory:
            print_report("checkpoints", seed, fuzz_checkpoints(checkpoints, seed, Path(directory)))


def print_report(name: str, seed: int, report: FuzzReport) -> None:
    print(msgspec.json.encode({"seed": seed, name: report}).decode(), flush=True)
