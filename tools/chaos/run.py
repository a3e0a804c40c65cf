"""`r3async chaos`: starts the run, kills its processes, and checks its books when it has ended."""

from __future__ import annotations

import random
import shutil
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import msgspec
import psutil
from rich.console import Console

from r3async.config import Config, load_config
from r3async.observe.events import read_events
from r3async.observe.jsonl import read_objects
from r3async.observe.trained import FILE, TrainedStep
from r3async.scheduling.admission import slots_of
from tools.chaos.books import Acknowledged, Passed, Resumed, Sent, check_content, check_kept, check_trained
from tools.chaos.relay import Noise

Role = Literal["generator", "learner", "conductor", "environment"]
SHARES: dict[Role, int] = {"generator": 4, "environment": 4, "learner": 1, "conductor": 1}
"""Of the kills. A learner's or a conductor's death begins the whole run again, which takes ten times as long as the others."""
STEPS_PER_KILL = 2
WAIT_SECONDS = 0.05


class Report(msgspec.Struct, frozen=True):
    """`problems` is empty if the books are right. `kills`: by role. `damaged`: trajectories that came damaged and were sent
    again. `duplicates`: those that came twice and were dropped. `generator_deaths`: that the conductor saw."""

    preset: str
    seed: int
    fault: str
    kills: dict[str, int]
    steps: int
    trajectories: int
    resumed: int
    generator_deaths: int
    sent: int
    acknowledged: int
    damaged: int
    duplicates: int
    seconds: float
    problems: list[str]


def settings(kills: int, engine: str) -> list[str]:
    """What chaos sets over the preset, and under what the person sets."""
    steps = STEPS_PER_KILL * (kills + 1) + 2
    common = [
        f"steps={steps}",
        "generator.count=3",
        "generator.concurrency=16",
        f"generator.max_restarts={10 + kills}",
        f"supervise.max_run_restarts={10 + kills}",
        "supervise.restart_backoff=0.001",
        "supervise.stall_seconds=60",
        "supervise.on_stall=abort",
        "checkpoint.every_steps=2",
        "buffer.durability=disk",
        "transport.ack_timeout=1",
        "schedule.max_staleness=2",
        "schedule.window=3",
        "schedule.groups_per_step=2",
        "schedule.samples_per_group=4",
        "episode.retries=30",
        "episode.max_new_tokens=12",
        "env.name=tools.chaos.environment:Unsteady",
    ]
    if engine == "vllm":
        return common
    tiny = {"hidden_size": 32, "expert_hidden_size": 16, "layers": 2, "max_warm_steps": 1, "warm_reward": 0.01}
    return [
        *common,
        "generator.engine=scripted",
        "generator.engine_args={ token_seconds = 0.005 }",
        "weights.probe=false",
        *(f"model.init.{name}={value}" for name, value in tiny.items()),
    ]


def draw_roles(kills: int, chance: random.Random) -> list[Role]:
    """Who is killed, in order. Not drawn one by one: every role has its share, however few kills there are."""
    shares: list[Role] = [role for role, share in SHARES.items() for _ in range(share)]
    chance.shuffle(shares)
    roles = [shares[i % len(shares)] for i in range(kills)]
    chance.shuffle(roles)
    return roles


class Killer(threading.Thread):
    """Kills one process after the other of the run in `run_dir`, each when `STEPS_PER_KILL` more steps were trained than at the
    one before, and up to a second later. `told(text)` hears of each."""

    def __init__(self, run_dir: Path, roles: Sequence[Role], chance: random.Random, told: Any):
        super().__init__(name="chaos-killer", daemon=True)
        self.run_dir, self.roles, self.chance, self.told = run_dir, roles, chance, told
        self.killed: Counter[str] = Counter()
        self._most = 0
        self._over = threading.Event()

    def begin(self) -> None:
        """When the actors exist: what an earlier run of that name said of its processes is set aside by then. Idempotent."""
        if not self.ident:
            self.start()

    def run(self) -> None:
        for number, role in enumerate(self.roles):
            while self._steps() < 1 + STEPS_PER_KILL * number:
                if self._over.wait(WAIT_SECONDS):
                    return
            if self._over.wait(self.chance.uniform(0, 1)):
                return
            self._kill(role, number)

    def stop(self) -> None:
        self._over.set()
        if self.ident:
            self.join(10)

    def _steps(self) -> int:
        """Trained so far, at the most: what a resume takes back counts as well."""
        self._most = max(self._most, sum(1 for _ in read_objects(self.run_dir / FILE)))
        return self._most

    def _kill(self, role: Role, number: int) -> None:
        while not self._over.is_set():
            victim = self._victim(role)
            if victim is not None:
                try:
                    victim.kill()
                except psutil.Error:
                    continue
                self.killed[role] += 1
                self.told(f"chaos: kill -9 of {role} ({victim.pid}), {number + 1} of {len(self.roles)}")
                return
            self._over.wait(WAIT_SECONDS)

    def _victim(self, role: Role) -> psutil.Process | None:
        """One of that role that lives now; None while there is none."""
        started = [e for e in read_events(self.run_dir / "events.jsonl") if e["event"].endswith("_started")]
        alike = "generator" if role == "environment" else role
        pids = {e["pid"] for e in started if e["event"] == f"{alike}_started"}
        living = [p for pid in sorted(pids) if (p := actor_process(pid)) is not None]
        if role == "environment":
            living = [child for p in living for child in environment_workers(p)]
        return self.chance.choice(living) if living else None


def actor_process(pid: int) -> psutil.Process | None:
    """Process ids are used again: only what calls itself a worker of Ray is taken for the one that said it had started."""
    try:
        process = psutil.Process(pid)
        return process if process.cmdline()[:1] and process.cmdline()[0].startswith("ray::") else None
    except psutil.Error:
        return None


def environment_workers(generator: psutil.Process) -> list[psutil.Process]:
    try:
        return [p for p in generator.children() if any("pool_worker" in part for part in p.cmdline())]
    except psutil.Error:
        return []


def make_model(preset: str, chosen: Sequence[str], directory: Path, say: Callable[[str], object]) -> str:
    """Make and warm up the model that these settings ask for, while nothing fails yet. Returns the setting that names it."""
    from tools.init_model import init_model

    calm = ["env.args={ failing = 0.0 }"] if load_config(preset, chosen).env.name.endswith(":Unsteady") else []
    init_model(directory, load_config(preset, [*chosen, *calm]), progress=say)
    return f"model.path={directory}"


def chaos(
    preset: str,
    overrides: Sequence[str],
    *,
    kills: int,
    seed: int,
    engine: str = "scripted",
    fault: str = "",
    noise: Noise | None = None,
    root: Path = Path("runs"),
    console: Console | None = None,
    roles: Sequence[Role] = (),
) -> Report:
    """One run. `roles`: of whom to kill, in order, in place of what the seed draws.

    Raises what `train` raises, where the run does not end well.
    """
    from tools.chaos.actors import chaos_directory, chaos_pipeline
    from tools.train import train

    name = f"chaos-{preset}-{seed}" + (f"-{fault}" if fault else "")
    chosen = [*settings(kills, engine), f"seed={seed}", f"name={name}", "resume=none", *overrides]
    config = load_config(preset, chosen)
    run_dir = root / config.name
    directory = chaos_directory(run_dir)
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True)
    noise = msgspec.structs.replace(noise or Noise(), seed=seed)
    (directory / "noise.json").write_bytes(msgspec.json.encode(noise))
    console = console or Console(file=sys.stderr)
    if not config.model.path:
        config = load_config(preset, [*chosen, make_model(preset, chosen, directory / "init", console.print)])
    chance = random.Random(seed)
    killer = Killer(run_dir, roles or draw_roles(kills, chance), chance, console.print)
    began = time.monotonic()
    try:
        train(config, preset, console, root, pipeline=chaos_pipeline(fault, killer.begin))
    finally:
        killer.stop()
    report = look_into(config, preset, seed, fault, run_dir, killer.killed, time.monotonic() - began)
    spared = len(killer.roles) - killer.killed.total()
    if spared and not fault:
        few = f"{spared} of {len(killer.roles)} processes were not killed: the run ended before; steps={config.steps} is too few"
        report = msgspec.structs.replace(report, problems=[*report.problems, few])
    return report


def look_into(
    config: Config, preset: str, seed: int, fault: str, run_dir: Path, killed: Counter[str], seconds: float
) -> Report:
    """The books of a run that has ended."""
    from r3async.observe.metrics import read_metrics
    from tools.chaos.actors import chaos_directory

    schedule = config.schedule
    steps = [msgspec.convert(line, TrainedStep) for line in read_objects(run_dir / FILE)]
    passed = list(read_passed(chaos_directory(run_dir)))
    resumed = list(read_resumed(run_dir, config))
    problems = [
        *check_trained(steps, config.steps, schedule.groups_per_step, schedule.samples_per_group),
        *check_content(steps, passed),
        *check_kept(passed, resumed),
    ]
    rows = read_metrics(run_dir / "metrics.jsonl")
    count = Counter(row["step"] for row in rows)
    problems += [f"step {n} has {count[n]} rows of metrics" for n in range(1, config.steps + 1) if count[n] != 1]
    problems += [
        f"step {r['step']} trained a token of age {r['staleness/max']}, above the bound {r['staleness/bound']}"
        for r in rows
        if r["staleness/max"] > r["staleness/bound"]
    ]
    left = [p.name for p in (run_dir / "spool").glob("*") if p.is_file()]
    if left and not fault:
        problems.append(f"the spool still holds {len(left)} files, though everything was trained: {left[:3]}")
    events = Counter(e["event"] for e in read_events(run_dir / "events.jsonl"))
    return Report(
        preset=preset,
        seed=seed,
        fault=fault,
        kills=dict(killed),
        steps=len(steps),
        trajectories=sum(len(s.trajectories) for s in steps),
        resumed=len(resumed),
        generator_deaths=events["generator_died"],
        sent=sum(isinstance(p, Sent) for p in passed),
        acknowledged=sum(len(p.trajectory_ids) for p in passed if isinstance(p, Acknowledged)),
        damaged=int(sum(drops(rows, "transport/damaged"))),
        duplicates=int(sum(drops(rows, "transport/duplicates"))),
        seconds=round(seconds, 1),
        problems=problems,
    )


def drops(rows: Sequence[dict[str, Any]], name: str) -> Iterator[float]:
    """The last value before each fall of a counter, which begins anew with its process, and the last of all."""
    for row, after in zip(rows, [*rows[1:], {name: -1.0}], strict=True):
        if after[name] < row[name]:
            yield row[name]


def read_passed(directory: Path) -> Iterator[Passed]:
    for path in sorted(directory.glob("*.jsonl")):
        for line in read_objects(path):
            yield msgspec.convert(line, Passed)


def read_resumed(run_dir: Path, config: Config) -> Iterator[Resumed]:
    """Where the run began again. Without a checkpoint it did so from nothing."""
    schedule = config.schedule
    slots = slots_of(schedule.max_staleness, schedule.groups_per_step, schedule.steps_per_publication)
    starts = [e for e in read_events(run_dir / "events.jsonl") if e["event"] == "conductor_started"]
    for event in starts[1:]:
        step = event["step"]
        yield Resumed(event["time"], step // schedule.steps_per_publication, step * schedule.groups_per_step + slots)
