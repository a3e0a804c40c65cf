"""The list of GPU checks in order, their predictions, and their results."""

from __future__ import annotations

import json
import os
import subprocess
import time
import tomllib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console

from r3async.world.kept_programs import KeptProgram

from .part import RESULT, command

RESULTS = "results.json"
PREDICTIONS = Path(__file__).with_name("predictions.toml")
LIMIT_SECONDS = 590.0


class Part(NamedTuple):
    """A GPU check, displayed by its `name`.

    Attributes:
        target: "module:function" of this package, called with a `Place` and `arguments`.
    """

    target: str
    arguments: dict[str, Any]

    @property
    def name(self) -> str:
        return " ".join([self.target.split(":")[1], *map(str, self.arguments.values())])


def _parts() -> list[Part]:
    def of(target: str, **arguments: Any) -> Part:
        return Part(target, arguments)

    def parity(backend: str, dtype: str, recompute: str) -> Part:
        return of("learner:parity", backend=backend, dtype=dtype, recompute=recompute)

    def step(backend: str, recompute: str) -> Part:
        return of("learner:step_of_30b_layers", backend=backend, recompute=recompute, budget=8192)

    return [
        of("learner:machine"),
        parity("megatron", "float32", "none"),
        parity("megatron", "bfloat16", "full"),
        of("engine:generations", mode="eager"),
        of("engine:learner_agrees", mode="eager", backend="megatron"),
        step("megatron", "full"),
        of("runs:quickstart", dtype="bfloat16"),
        of("engine:generations", mode="graphs"),
        of("engine:learner_agrees", mode="graphs", backend="megatron"),
        of("engine:updates", mode="graphs", on_update="keep"),
        of("kernels:experts", how="sequential"),
        of("kernels:experts", how="grouped"),
        of("kernels:attention_agrees"),
        of("kernels:attention", layout="packed", tokens=8192),
        of("runs:killed", dtype="bfloat16"),
        of("engine:throughput", mode="eager", concurrency=64),
        of("engine:throughput", mode="graphs", concurrency=64),
        step("megatron", "none"),
        step("torch", "full"),
        of("engine:generations", mode="synchronous"),
        of("engine:updates", mode="eager", on_update="keep"),
        of("engine:updates", mode="eager", on_update="recompute"),
        of("engine:learner_agrees", mode="eager", backend="torch"),
        parity("torch", "float32", "none"),
        parity("torch", "bfloat16", "full"),
        of("learner:repeatable", dtype="bfloat16", kernels="deterministic"),
        of("learner:resume", dtype="bfloat16", kernels="deterministic"),
        of("learner:repeatable", dtype="float32", kernels="any"),
        of("learner:repeatable", dtype="bfloat16", kernels="any"),
        of("kernels:attention", layout="padded", tokens=8192),
        of("kernels:attention", layout="packed", tokens=32768),
        of("engine:throughput", mode="graphs-without-routes", concurrency=64),
        of("engine:throughput", mode="graphs", concurrency=256),
        of("runs:quickstart", dtype="float32"),
    ]


PARTS = _parts()
ON_CUDA_ONLY = ("graphs",)
"""Values of arguments that need CUDA at any size; such parts are left out on a CPU."""


def run_parts(
    out: Path,
    *,
    small: bool,
    only: Sequence[str] = (),
    seconds: float = LIMIT_SECONDS,
    cuda: bool,
    say: Callable[[str], object],
) -> list[dict[str, Any]]:
    """Run every part that has no good result in `out` yet, each in a separate process.

    No part starts, or continues, after `seconds`; the same command continues with the remaining
    parts. Returns the results of all parts, which `out` holds too.

    Args:
        only: Run the parts whose names begin with one of these.
    """
    (out / "models").mkdir(parents=True, exist_ok=True)
    file = out / RESULTS
    results: dict[str, dict[str, Any]] = json.loads(file.read_text()) if file.exists() else {}
    ends = time.monotonic() + seconds
    chosen = [p for p in PARTS if not only or p.name.startswith(tuple(only))]
    for part in chosen:
        if not cuda and set(part.arguments.values()) & set(ON_CUDA_ONLY):
            say(f"{part.name}: left out, for it needs CUDA")
            continue
        if results.get(part.name, {}).get("ok"):
            continue
        left = ends - time.monotonic()
        if left <= 0:
            say(f"{part.name}: left for the next call")
            continue
        say(f"{part.name} ...")
        results[part.name] = _run(part, out, small, left)
        (out / f"{RESULTS}.new").write_text(json.dumps(results, indent=1))
        (out / f"{RESULTS}.new").replace(file)
    return [{"part": p.name, **results[p.name]} for p in chosen if p.name in results]


def _run(part: Part, out: Path, small: bool, limit: float) -> dict[str, Any]:
    began = time.monotonic()
    log = out / f"{part.name.replace(' ', '-')}.log"
    with log.open("w") as output:
        program = KeptProgram(
            command(out.absolute(), small, part.target, part.arguments),
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"},
        )
        try:
            exit_code = program.wait(limit)
        finally:
            program.end()
    found: dict[str, Any] = {}
    if exit_code is None:
        found = {"failure": f"no answer within {limit:.0f} s"}
    lines = [
        line for line in log.read_text(errors="replace").splitlines() if line.startswith(RESULT)
    ]
    if lines and not found:
        found = json.loads(lines[-1].removeprefix(RESULT))
    elif not found:
        found = {"failure": f"exit code {exit_code}: see {log}"}
    return {"seconds": round(time.monotonic() - began, 1), **found}


def predictions() -> dict[str, dict[str, list[float]]]:
    """Return the bounds `[low, high]` that were written down before any measurement, by
    part and figure."""
    return tomllib.loads(PREDICTIONS.read_text())


def missed(result: Mapping[str, Any], expected: Mapping[str, Sequence[float]]) -> list[str]:
    """Describe the figures that differ from the prediction."""
    out = []
    for name, (low, high) in expected.items():
        value = result.get(name)
        if isinstance(value, int | float) and not low <= value <= high:
            out.append(f"{name} {value:.4g}, predicted {low:g} to {high:g}")
    return out


def render(results: Sequence[Mapping[str, Any]], *, small: bool) -> list[str]:
    """Render a line per part, one for its figures, and one for those of real shapes that differ
    from the prediction."""
    expected = {} if small else predictions()
    lines = []
    for row in results:
        state = "FAILED" if "failure" in row else "ok" if row.get("ok") else "NOT OK"
        lines.append(f"{state:<7} {row['part']}, {row['seconds']:.1f} s")
        figures = {
            name: value for name, value in row.items() if name not in ("part", "seconds", "ok")
        }
        lines.append(
            "        " + ", ".join(f"{name} {_short(value)}" for name, value in figures.items())
        )
        astray = missed(row, expected.get(row["part"], {}))
        if astray:
            lines.append(f"        not as predicted: {'; '.join(astray)}")
    return lines


def _short(value: Any) -> str:
    if isinstance(value, list):
        return f"[{' '.join(map(_short, value))}]"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def check_gpu(
    out: Path, *, small: bool, only: Sequence[str], minutes: float, console: Console
) -> int:
    """Run the checks and print the results.

    Returns 0 if every part that ran is good, 1 if not, and 2 if there is no GPU and
    `small` is not set.
    """
    import torch

    cuda = torch.cuda.is_available()
    if not cuda and not small:
        built = (
            f"is built for CUDA {torch.version.cuda}"
            if torch.version.cuda
            else "has no CUDA: make install EXTRA=gpu"
        )
        said = (
            f"torch {torch.__version__} sees no GPU, and {built}. --small tries the "
            "parts on this CPU."
        )
        console.print(said, highlight=False, soft_wrap=True)
        return 2
    results = run_parts(
        out, small=small, only=only, seconds=60 * minutes, cuda=cuda, say=console.print
    )
    for line in [*render(results, small=small), f"results: {out / RESULTS}"]:
        console.print(line, highlight=False, markup=False, soft_wrap=True)
    return 0 if results and all(row.get("ok") for row in results) else 1
