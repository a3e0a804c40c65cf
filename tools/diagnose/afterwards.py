"""`r3async diagnose` of a run that ended because a probe of its weights failed, as soon as its processes have ended."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from r3async.weights.probe import KEPT

SECONDS = 300.0
"""A model of a few gigabytes takes a fraction of it."""
LARGEST = 2 * 2**30
"""Bytes of the weights. A larger model is loaded three times only if a person asks for it."""
TEXT = "diagnosis.txt"
"""Beside the weights."""


def diagnose_failed(run: Path, say: Callable[[str], object], phase: Callable[[str], object]) -> None:
    """Say where engine and learner part with the version that the run's probe failed with, if it has one, and write it beside
    that. In a process of its own, `SECONDS` at most; a model above `LARGEST` is left to the person. Does not raise: the run has
    failed, and for another reason."""
    kept = run / KEPT
    if not (kept / "config.json").is_file():
        return
    by_hand = f"`r3async diagnose {run}`, on a host of its engines"
    if sum(file.stat().st_size for file in kept.glob("*.safetensors")) > LARGEST:
        say(f"{by_hand}, names the layer and the likely cause")
        return
    phase("diagnosing the version that the probe failed with")
    command = [sys.executable, "-m", "r3async", "diagnose", str(run)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        say(f"the version that the probe failed with was not diagnosed ({error}): {by_hand}")
        return
    if done.returncode not in (0, 1) or not done.stdout:
        reason = (done.stderr.strip().splitlines() or ["no message"])[-1]
        say(f"the version that the probe failed with was not diagnosed ({reason}): {by_hand}")
        return
    for line in done.stdout.rstrip().splitlines():
        say(line)
    try:
        (kept / TEXT).write_text(done.stdout)
    except OSError as error:
        say(f"it was not written to {kept / TEXT}: {error.strerror}")
    if not done.returncode:
        say("so a fresh engine and learner agree: what differed was in the memory of the run's processes, or passes")
