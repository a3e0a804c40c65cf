"""Run `r3async diagnose` for a run that a failed weight probe ended, once its
processes have ended."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from r3async.weights.probe import FAILED_MODEL_DIRECTORY

DIAGNOSE_TIMEOUT_SECONDS = 300.0
"""Seconds before the diagnosis is stopped; a model of a few gigabytes takes a fraction of it."""
MAX_WEIGHT_BYTES = 2 * 2**30
"""Maximum bytes of the weights. A larger model is loaded three times only at the user's request."""
DIAGNOSIS_FILE = "diagnosis.txt"
"""File for the diagnosis, in the directory of the weights."""


def diagnose_failed_run(
    run: Path, print_line: Callable[[str], object], show_phase: Callable[[str], object]
) -> None:
    """Print where engine and learner diverge with the weights of the failed probe, and save the
    text beside them.

    Does nothing if no version was kept. The diagnosis runs in a separate process for at most
    `DIAGNOSE_TIMEOUT_SECONDS`; a model above `MAX_WEIGHT_BYTES` is left to the user. Does not
    raise, because the run has already failed for another reason.
    """
    kept = run / FAILED_MODEL_DIRECTORY
    if not (kept / "config.json").is_file():
        return
    by_hand = f"`r3async diagnose {run}`, on a host of its engines"
    if sum(file.stat().st_size for file in kept.glob("*.safetensors")) > MAX_WEIGHT_BYTES:
        print_line(f"{by_hand}, names the layer that differs first")
        return
    show_phase("diagnosing the version that the probe failed with")
    command = [sys.executable, "-m", "r3async", "diagnose", str(run)]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=DIAGNOSE_TIMEOUT_SECONDS, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        print_line(f"the version that the probe failed with was not diagnosed ({error}): {by_hand}")
        return
    if done.returncode not in (0, 1) or not done.stdout:
        reason = (done.stderr.strip().splitlines() or ["no message"])[-1]
        print_line(
            f"the version that the probe failed with was not diagnosed ({reason}): {by_hand}"
        )
        return
    for line in done.stdout.rstrip().splitlines():
        print_line(line)
    try:
        (kept / DIAGNOSIS_FILE).write_text(done.stdout)
    except OSError as error:
        print_line(f"it was not written to {kept / DIAGNOSIS_FILE}: {error.strerror}")
    if not done.returncode:
        print_line(
            "so a fresh engine and learner agree: what differed was in the memory of the run's "
            "processes, or passes"
        )
