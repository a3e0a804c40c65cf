"""Recompute what a refactoring must not change, and compare it with the recorded values:
`make check-frozen`.

`python -m dev.frozen --write` writes the values to `dev/frozen.json`. The parts are: digests of
simulated runs, digests of every stage of twenty trained steps of two presets, one real run under
chaos, the bytes of ten messages on the wire, and the files of a checkpoint.

The bits of trained steps depend on the CPU model; the file names the CPU it was written on. The
digest of a simulated run covers the names of events and remote calls. A commit that renames
them adds `new = "old"` to `dev/frozen_names.toml`, which is applied to the current lines before
they are hashed.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import multiprocessing
import os
import platform
import re
import subprocess
import sys
import tempfile
import tomllib
import zlib
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import msgspec

HERE = Path(__file__).parent
FROZEN = HERE / "frozen.json"
SEEDS = 150
STEPS = 20
PRESETS = ("quickstart", "reverse-text")
SMALL_RUN = (
    *("generator.engine=scripted", "weights.probe=false", "observe.record=full", f"steps={STEPS}"),
    *("schedule.max_staleness=0", "schedule.prompts_per_step=2", "schedule.group_size=4"),
    *(
        "learner.dtype=float32",
        "learner.threads=1",
        "checkpoint.every_steps=10",
        "evaluation.every_steps=0",
    ),
    *("model.init.size=tiny", "model.init.max_warm_steps=1", "model.init.warm_reward=0.01"),
)
"""Overrides for a small run whose result does not depend on the order in which episodes arrive:
each step trains the groups that were played with its version of the weights."""


@cache
def original_names() -> Callable[[str], str]:
    """Return a function that replaces renamed names in a line of the log by
    their original names."""
    names: dict[str, str] = tomllib.loads((HERE / "frozen_names.toml").read_text())
    if not names:
        return str
    pattern = re.compile(
        r"(?<!\w)(" + "|".join(map(re.escape, sorted(names, key=len, reverse=True))) + r")(?!\w)"
    )
    return lambda line: pattern.sub(lambda match: names[match[0]], line)


def simulate_seed(seed: int) -> str:
    """Simulate the run of `seed`. Returns the digest of everything that happens, or the invariant
    that is violated."""
    from dev.simulation.run import SimulatedRun, draw_case
    from dev.simulation.world import SimulationLog

    digest, put_back, add = (
        hashlib.blake2b(digest_size=16),
        original_names(),
        SimulationLog._add_line,
    )

    def hash_line(log: SimulationLog, line: str) -> None:
        digest.update(put_back(line).encode() + b"\n")

    SimulationLog._add_line = hash_line  # type: ignore[method-assign,assignment]
    simulated = SimulatedRun(draw_case(seed))
    try:
        result = simulated.run()
    finally:
        SimulationLog._add_line = add  # type: ignore[method-assign]
    for event in simulated.history:
        digest.update(put_back(msgspec.json.encode(event).decode()).encode())
    return result.violated or digest.hexdigest()


def simulated_runs() -> dict[str, str]:
    """Simulate the first `SEEDS` seeds in parallel. Returns the result of
    `simulate_seed` by seed."""
    from dev.simulation.run import tiny_model_directory
    from dev.simulation.search import quiet_logs

    with (
        quiet_logs(),
        tiny_model_directory(),
        multiprocessing.get_context("fork").Pool(os.cpu_count()) as pool,
    ):
        return {
            str(seed): digest for seed, digest in enumerate(pool.imap(simulate_seed, range(SEEDS)))
        }


def trained_steps() -> dict[str, Any]:
    """Train each preset. Returns the digests of its recorded steps, and the learner's files in its
    last checkpoint."""
    from r3async.record.recording import find_recorded_steps, read_recorded_step

    results: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as runs:
        for preset in PRESETS:
            run_command("train", preset, "--runs", runs, f"name={preset}", *SMALL_RUN)
            steps = [
                read_recorded_step(path)[0] for path in find_recorded_steps(Path(runs) / preset)
            ]
            file = Path(runs) / preset / "checkpoints" / f"step-{STEPS:08d}" / "manifest.json"
            manifest = json.loads(file.read_text().splitlines()[0])  # its own digest follows
            results[preset] = {
                "steps": [
                    [step.step, step.version, step.groups, step.minibatches] for step in steps
                ],
                # Its tensors are covered by the digests of the last step. The rest of the
                # file contains times.
                "checkpoint": [
                    [one["name"], one["size"]]
                    for one in manifest["files"]
                    if one["name"].startswith("learner")
                ],
            }
    return results


def chaos_run() -> dict[str, Any]:
    """Return what a real run under faults trained. Which faults hit it depends on timing."""
    with tempfile.TemporaryDirectory() as directory:
        report = json.loads(
            run_command(
                "chaos", "quickstart", "--seed", "1", "--json", program="dev", cwd=directory
            ).splitlines()[-1]
        )
    return {name: report[name] for name in ("steps", "trajectories", "problems")}


def wire_messages() -> list[list[int]]:
    """Return the sizes and CRC-32 checksums of the frames of ten encoded trajectories."""
    from r3async.data.wire import encode_trajectory
    from tests.helpers.wire import make_table, make_trajectory

    messages = []
    for seed in range(10):
        tables = [
            make_table(seed + i, 5 + 40 * seed * i, wide=seed % 2 == 1, optional=seed % 3 > 0)
            for i in range(3)
        ]
        frames = [
            bytes(frame)
            for frame in encode_trajectory(make_trajectory(f"t{seed}", tables, finished_at=1.5))
        ]
        messages.append([number for frame in frames for number in (len(frame), zlib.crc32(frame))])
    return messages


PARTS: dict[str, Callable[[], Any]] = {
    "wire": wire_messages,
    "simulated": simulated_runs,
    "trained": trained_steps,
    "chaos": chaos_run,
}


def run_command(*words: str, program: str = "r3async", cwd: str | None = None) -> str:
    """Run `program` with `words` and return its standard output. Raises `RuntimeError` with its
    output if it fails."""
    done = subprocess.run(
        [sys.executable, "-m", program, *words],
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=1200,
    )
    if done.returncode:
        raise RuntimeError(
            f"{program} {words[0]} ended with {done.returncode}:\n{done.stdout}\n{done.stderr}"
        )
    return done.stdout


def list_differences(name: str, before: Any, now: Any) -> Iterator[str]:
    """Yield a line for each place at which two JSON values differ."""
    if isinstance(before, dict) and isinstance(now, dict):
        for key in sorted({*before, *now}):
            yield from list_differences(f"{name}.{key}", before.get(key), now.get(key))
    elif isinstance(before, list) and isinstance(now, list) and len(before) == len(now):
        for index, (old, new) in enumerate(zip(before, now, strict=True)):
            yield from list_differences(f"{name}[{index}]", old, new)
    elif before != now:
        yield f"{name}: {before} before, {now} now"


def processor_name() -> str:
    """Return the name, family, model and stepping of this machine's CPU. A virtual machine's name
    may be that of several models, which do not compute the same bits."""
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    facts = {
        key.strip(): value.strip() for key, _, value in (line.partition(":") for line in lines)
    }
    wanted = ("model name", "cpu family", "model", "stepping")
    return " ".join(facts[key] for key in wanted if key in facts) or platform.machine()


def main(words: Sequence[str] | None = None) -> int:
    """Compare the parts with `dev/frozen.json`, or write them to it. Returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument(
        "parts", nargs="*", help=f"some of {', '.join(PARTS)}; all of them if none is named"
    )
    parser.add_argument(
        "--write", action="store_true", help=f"write {FROZEN.name} instead of comparing with it"
    )
    options = parser.parse_args(words)
    unknown = set(options.parts) - set(PARTS)
    if unknown:
        parser.error(f"no part {', '.join(sorted(unknown))}")
    frozen: dict[str, Any] = json.loads(FROZEN.read_text()) if FROZEN.exists() else {}
    failed = False
    for part in options.parts or PARTS:
        now = json.loads(json.dumps(PARTS[part]()))
        if options.write:
            frozen |= {part: now, "processor": processor_name()}
            FROZEN.write_text(json.dumps(frozen, indent=None, separators=(",", ":")) + "\n")
            print(f"{part}: written", flush=True)
            continue
        if part not in frozen:
            failed = True
            print(
                (
                    f"{part}: not in {FROZEN.name} yet: `python -m dev.frozen {part} --write` at a "
                    "commit that is right"
                ),
                flush=True,
            )
            continue
        differences = list(list_differences(part, frozen[part], now))
        failed |= bool(differences)
        print(
            f"{part}: {'as before' if not differences else f'{len(differences)} differences'}",
            flush=True,
        )
        for line in differences[:10]:
            print(f"  {line}")
    if failed and processor_name() != frozen.get("processor"):
        print(
            f"  {FROZEN.name} was written on {frozen.get('processor')}: bits of trained steps may "
            f"differ on {processor_name()}"
        )
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
