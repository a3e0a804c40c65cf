"""GPU checks that are whole runs: the quickstart in bfloat16, its routes verified, and a run
killed and resumed."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from .place import Place

SMALL = (
    *("schedule.prompts_per_step=2", "schedule.group_size=4", "model.init.max_warm_steps=2"),
    *(
        "model.init.warm_reward=0",
        "learner.threads=1",
        "evaluation.every_steps=0",
        "generator.kv_cache_gib=0.25",
    ),
)


def quickstart(place: Place, *, dtype: str) -> dict[str, Any]:
    """Run the quickstart: its reward, drift and seconds per step, and its routes,
    verified token by token."""
    steps = 2 if place.small else 60
    rows = _rows(
        _started(place, f"quickstart-{dtype}", dtype, steps), place, f"quickstart-{dtype}", 550.0
    )
    checked = _r3async(place, "inspect", "verify", f"quickstart-{dtype}")
    output, _ = checked.communicate(timeout=120)
    last = rows[-10:]
    return {
        "steps": len(rows),
        "reward_first": float(np.mean([r["reward/mean"] for r in rows[:5]])),
        "reward_last": float(np.mean([r["reward/mean"] for r in last])),
        "rollout_kl_k3": float(np.mean([r["rollout_kl/k3"] for r in last])),
        "recorded": min(r["routing/recorded_fraction"] for r in rows),
        "step_seconds": float(np.median([r["timing/train_seconds"] for r in rows])),
        "routes_verified": checked.returncode == 0,
        "said": output.strip()[-200:],
        "ok": len(rows) == steps and checked.returncode == 0,
    }


def killed(place: Place, *, dtype: str) -> dict[str, Any]:
    """Send SIGKILL to the whole process group after some steps; the same command must
    resume and finish."""
    name = f"killed-{dtype}"
    steps = 4 if place.small else 20
    metrics = place.out / "runs" / name / "metrics.jsonl"
    process = _started(place, name, dtype, steps)
    deadline = time.monotonic() + 300.0
    while _lines(metrics) < steps // 2:
        if time.monotonic() > deadline or process.poll() is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            raise RuntimeError(
                f"the run made {_lines(metrics)} steps: {process.communicate()[0][-600:]}"
            )
        time.sleep(0.2)
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()
    before = _lines(metrics)
    rows = _rows(_started(place, name, dtype, steps), place, name, 300.0)
    whole = [r["step"] for r in rows] == list(range(1, steps + 1))
    return {"steps_before": before, "steps": len(rows), "lineage": rows[-1]["lineage"], "ok": whole}


def _started(place: Place, name: str, dtype: str, steps: int) -> subprocess.Popen[str]:
    own = [f"name={name}", f"steps={steps}", f"learner.dtype={dtype}", f"generator.dtype={dtype}"]
    own += ["checkpoint.every_steps=1"] if name.startswith("killed") else []
    own += SMALL if place.small else ["generator.engine_args.gpu_memory_utilization=0.3"]
    return _r3async(place, "train", "quickstart", *own)


def _r3async(place: Place, *words: str) -> subprocess.Popen[str]:
    line = [sys.executable, "-P", "-m", "r3async", *words]
    environment = {**os.environ, "R3ASYNC_RUNS": str(place.out / "runs"), "PYTHONUNBUFFERED": "1"}
    output = subprocess.PIPE
    return subprocess.Popen(
        line,
        env=environment,
        stdout=output,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
        cwd=place.out,
    )


def _rows(
    process: subprocess.Popen[str], place: Place, name: str, seconds: float
) -> list[dict[str, Any]]:
    """Wait for the end of a run and return the rows of its metrics."""
    try:
        output, _ = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGTERM)
        output, _ = process.communicate(timeout=60)
        raise RuntimeError(f"the run took longer than {seconds:.0f} s: {output[-600:]}") from None
    if process.returncode:
        raise RuntimeError(f"the run ended with {process.returncode}: {output[-600:]}")
    lines = (place.out / "runs" / name / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def _lines(path: Path) -> int:
    return len(path.read_text().splitlines()) if path.exists() else 0
