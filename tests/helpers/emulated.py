"""Runs of `dev.gpu.runs`: on the emulated device, and on the CPU beside it."""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import pytest

from dev.gpu.library import NoCompilerError, compile_library
from dev.gpu.runs import Case, run_plan


class Found(NamedTuple):
    """The directories with what the runs found."""

    cpu: Path
    emulated: Path


def need_emulated_device() -> None:
    """Compile the emulated device, or skip the test where there is no compiler."""
    try:
        compile_library()
    except NoCompilerError as error:
        pytest.skip(str(error))


def run_on_both(cases: Sequence[Case], out: Path) -> Found:
    """Run the cases on both devices at once. Fails with what the ranks said if one did."""
    need_emulated_device()
    found = Found(out / "cpu", out / "emulated")
    processes = [(path, run_plan(path.name, cases, path)) for path in found]
    for path, process in processes:
        if process.wait(timeout=800):
            pytest.fail(describe_failure(path))
    return found


def run_emulated(cases: Sequence[Case], out: Path) -> list[str]:
    """Run the cases on the emulated device, and return the names of those that failed."""
    need_emulated_device()
    run_plan("emulated", cases, out).wait(timeout=800)
    return [
        case.name for case in cases if not all((out / f"{case.name}-{r}.json").exists() for r in range(case.num_ranks))
    ]


def describe_failure(out: Path) -> str:
    """Return the end of what the processes of a run printed, without those that said nothing."""
    logs = {log.name: log.read_text(errors="replace").strip() for log in sorted(out.glob("*.log"))}
    return "\n".join(
        f"{name}: {text[-2000:]}" for name, text in logs.items() if "Error" in text or name == "output.log"
    )
