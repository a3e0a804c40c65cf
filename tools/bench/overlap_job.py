"""One run of `bench overlap`: the whole pipeline with one setting of `schedule.max_staleness`."""

from __future__ import annotations

from pathlib import Path

import msgspec
from rich.console import Console

from r3async.config import config_from_dict
from r3async.tools.bench.jobs import job_main


def main(directory: Path) -> None:
    """Train as `config.json` says; the run is `DIRECTORY/run`."""
    from r3async.tools.train import train

    config = config_from_dict(msgspec.json.decode((directory / "config.json").read_bytes()))
    with (directory / "console.txt").open("w") as file:
        train(config, "overlap", Console(file=file), root=directory)


if __name__ == "__main__":
    job_main(main)
