"""`r3async diagnose` of a run that ended because a probe of its weights failed, as soon as its processes have ended."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from r3async.weights.probe import FAILED_MODEL_DIRECTORY

DIAGNOSE_TIMEOUT_SECONDS = 300.0
"""A model of a few gigabytes takes a fraction of it."""
MAX_WEIGHT_BYTES = 2 * 2**30
"""Bytes of the weights. A larger model is loaded three times only if a person asks for it."""
DIAGNOSIS_FILE = "diagnosis.txt"
"""Beside the weights."""


def diagnose_failed_run(run: Path, print_line: Callable[[str], object], show_phase: Callable[[str], object]) -> None:
    """Say where engine and learner part with the version that the run's probe failed with, if it has one, and write it beside
    that. In a process of its own, `DIAGNOSE_TIMEOUT_SECONDS` at most; a model above `MAX_WEIGHT_BYTES` is left to the person.
    Does not raise: the run has failed, and for another reason."""
    kept = run / FAILED_MODEL_DIRECTORY
    if not (kept / "config.json").is_file():
        return
    by_hand = f"`r3async diagnose {run}`, on a host of its engines"
    if sum(file.stat().st_size for file in kept.glob("*.safetensors")) > MAX_WEIGHT_BYTES:
        print_line(f"{by_hand}, names the layer and the likely cause")
        return
    show_phase("diagnosing the version that the probe failed with")
    command = [sys.executable, "-m", "r3async", "diagnose", str(run)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=DIAGNOSE_TIMEOUT_SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        print_line(f"the version that the probe failed with was not diagnosed ({error}): {by_hand}")
        return
    if done.returncode not in (0, 1) or not done.stdout:
        reason = (done.stderr.strip().splitlines() or ["no message"])[-1]
        print_line(f"the version that the probe failed with was not diagnosed ({reason}): {by_hand}")
        return
    for line in done.stdout.rstrip().splitlines():
        print_line(line)
    try:
        (kept / DIAGNOSIS_FILE).write_text(done.stdout)
    except OSError as error:
        print_line(f"it was not written to {kept / DIAGNOSIS_FILE}: {error.strerror}")
    if not done.returncode:
        print_line(
            "so a fresh engine and learner agree: what differed was in the memory of the run's processes, or passes"
        )
