"""`python -m r3async.tools.fuzz`."""

from __future__ import annotations

import argparse
import asyncio
import tempfile
from pathlib import Path

import msgspec

import r3async.tools.fuzz
from r3async.tools.fuzz.checkpoints import fuzz_checkpoints
from r3async.tools.fuzz.common import Report
from r3async.tools.fuzz.messages import fuzz_receiver, fuzz_spool


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m r3async.tools.fuzz", description=(r3async.tools.fuzz.__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--messages", type=int, default=1_000_000)
    parser.add_argument("--files", type=int, default=100_000)
    parser.add_argument("--checkpoints", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    seed = options.seed
    if options.messages:
        print_report("receiver", seed, asyncio.run(fuzz_receiver(options.messages, seed)))
    if options.files:
        with tempfile.TemporaryDirectory(prefix="r3async-fuzz-") as directory:
            print_report("spool", seed, asyncio.run(fuzz_spool(options.files, seed, Path(directory))))
    if options.checkpoints:
        memory = "/dev/shm" if Path("/dev/shm").is_dir() else None  # what is refused is renamed, to the disk
        with tempfile.TemporaryDirectory(prefix="r3async-fuzz-", dir=memory) as directory:
            print_report("checkpoints", seed, fuzz_checkpoints(options.checkpoints, seed, Path(directory)))


def print_report(name: str, seed: int, report: Report) -> None:
    print(msgspec.json.encode({"seed": seed, name: report}).decode(), flush=True)


if __name__ == "__main__":
    main()
