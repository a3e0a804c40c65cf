"""Runner of `python -m dev chaos`: starts the run, lets the scenario disturb it, then checks
what was trained."""

from __future__ import annotations

import random
import shutil
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console

from dev.chaos.accounting import (
    AcknowledgedRecord,
    DamageRecord,
    LineageStart,
    RelayRecord,
    RunRestart,
    SentRecord,
    check_content,
    check_durable,
    check_lineages,
    check_trained,
)
from dev.chaos.relay import NoiseRates
from dev.chaos.scenario import ChaosScenario, Role
from dev.chaos.scenarios import SCENARIOS
from r3async.config import Config, ConfigError, load_config
from r3async.record.reading import read_json_objects
from r3async.record.trained_trajectories import TRAINED_FILE, TrainedStep
from r3async.schedule.run_ahead import count_slots

ENGINES = ("scripted", "vllm")
VLLM_STEP_FACTOR = 4
"""Factor on the number of steps with vLLM: a generator that restarts loads vLLM for a minute or
more, and the others go on training meanwhile."""
MAX_SHOWN_PROBLEMS = 10
"""Maximum number of problems that are printed."""
PROGRESS_STEPS = 20
"""Steps of a replay between two lines of progress."""


class ChaosReport(msgspec.Struct, frozen=True):
    """The result of one chaos run.

    `damaged` and `duplicates` come from the rows of metrics: what a learner saw after its last row
    is missing from them if it is killed.

    Attributes:
        faults: Faults that the scenario injected, by what they hit.
        generators_lost: Losses of generators that the conductor saw.
        changed: Messages of which one bit was flipped on the wire.
        damaged: Trajectories that arrived damaged and were sent again.
        duplicates: Trajectories that arrived twice and were dropped.
        problems: Problems found; empty if everything was trained once, as it was sent.
        replayed: Steps that were repeated from the recording with bitwise equal results; None if no
            recording was made.
    """

    preset: str
    scenario: str
    seed: int
    fault: str
    faults: dict[str, int]
    steps: int
    trajectories: int
    resumed: int
    generators_lost: int
    sent: int
    acknowledged: int
    changed: int
    damaged: int
    duplicates: int
    seconds: float
    problems: list[str]
    replayed: int | None = None


def chaos_overrides(scenario: type[ChaosScenario], kills: int, engine: str) -> list[str]:
    """Return the overrides of chaos. They override the preset; the user's own
    overrides override them."""
    times = VLLM_STEP_FACTOR if engine == "vllm" else 1
    common = [
        f"steps={times * scenario.count_steps(kills)}",
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
        "schedule.prompts_per_step=2",
        "schedule.group_size=4",
        "episode.retries=30",
        "episode.max_new_tokens=12",
        "env.name=dev.chaos.environment:UnsteadyEnvironment",
    ]
    if engine == "vllm":
        return [*common, *scenario.overrides]
    return [
        *common,
        "generator.engine=scripted",
        f"generator.engine_args={{ token_seconds = {scenario.token_seconds} }}",
        "weights.probe=false",
        "model.init.size=tiny",
        "model.init.max_warm_steps=1",
        "model.init.warm_reward=0.01",
        *scenario.overrides,
    ]


def make_model(
    preset: str, chosen: Sequence[str], directory: Path, print_line: Callable[[str], object]
) -> str:
    """Create and warm up the model of these settings, before any fault. Returns the
    override that names it."""
    from r3async.tools.init_model import init_model

    calm = (
        ["env.args={ failing = 0.0 }"]
        if load_config(preset, chosen, None).env.name.endswith(":UnsteadyEnvironment")
        else []
    )
    init_model(directory, load_config(preset, [*chosen, *calm], None), progress=print_line)
    return f"model.path={directory}"


def run_chaos(
    preset: str,
    overrides: Sequence[str],
    *,
    kills: int,
    seed: int,
    scenario: str = "kills",
    engine: str = "scripted",
    fault: str = "",
    noise: NoiseRates | None = None,
    root: Path = Path("runs"),
    console: Console | None = None,
    roles: Sequence[Role] = (),
    replayed: bool = False,
) -> ChaosReport:
    """Run a preset under a scenario, and check what it trained.

    Raises `ConfigError`, and what `train` raises if the run fails.

    Args:
        kills: Number of faults, for a scenario whose number can be chosen.
        roles: Roles to hit, in this order, instead of those drawn from the seed.
        replayed: Record the run, and repeat its steps afterwards.
    """
    from dev.chaos.actors import LEARNER_FAULTS

    check_choice("--scenario", scenario, SCENARIOS)
    check_choice("--engine", engine, ENGINES)
    check_choice("--fault", fault, ("", *LEARNER_FAULTS))
    kind = SCENARIOS[scenario]
    name = "-".join(
        part
        for part in ("chaos", preset, scenario * (scenario != "kills"), str(seed), fault)
        if part
    )
    record = ["observe.record=full"] * replayed
    common = [
        *chaos_overrides(kind, kills, engine),
        f"seed={seed}",
        f"name={name}",
        "resume=none",
        *record,
    ]
    with kind.provide_directory(root) as place:
        chosen = [*common, *kind.overrides_in(place), *overrides]
        scenario_run = ScenarioRun(
            preset, chosen, scenario, seed, fault, place, console or Console(file=sys.stderr)
        )
        return scenario_run.run(
            kind, kills, msgspec.structs.replace(noise or NoiseRates(), seed=seed), roles
        )


@dataclass
class ScenarioRun:
    """One run of a scenario, in a directory below `root`."""

    preset: str
    chosen: Sequence[str]
    scenario: str
    seed: int
    fault: str
    root: Path
    console: Console

    def run(
        self, kind: type[ChaosScenario], faults: int, noise: NoiseRates, roles: Sequence[Role]
    ) -> ChaosReport:
        from dev.chaos.actors import chaos_directory, make_chaos_launcher
        from r3async.tools.training_session import train

        # A scenario sets how a model is initialized, which a run with a given model does not read.
        # So these settings are not checked as those of a command line.
        config = load_config(self.preset, self.chosen, None)
        run_dir = self.root / config.name
        directory = chaos_directory(run_dir)
        shutil.rmtree(directory, ignore_errors=True)
        directory.mkdir(parents=True)
        (directory / "noise.json").write_bytes(msgspec.json.encode(noise))
        if not config.model.path:
            model = make_model(self.preset, self.chosen, directory / "init", self.console.print)
            # Keeps the settings that made the model.
            config = load_config(self.preset, [*self.chosen, model], None)
        scenario = kind(
            run_dir, faults, random.Random(self.seed), self.console.print, roles, config.steps
        )
        began = time.monotonic()
        try:
            train(
                config,
                self.preset,
                self.console,
                self.root,
                make_launcher=make_chaos_launcher(self.fault, scenario.begin_disturbing),
            )
        finally:
            scenario.stop_disturbing()
        report = check_run(config, self, run_dir, scenario.fault_counts, time.monotonic() - began)
        unmet = [] if self.fault else scenario.find_problems()
        report = msgspec.structs.replace(report, problems=[*report.problems, *unmet])
        return (
            report
            if config.observe.record == "off"
            else replay_recording(report, run_dir, self.console.print)
        )


def replay_recording(
    report: ChaosReport, run_dir: Path, print_line: Callable[[str], object]
) -> ChaosReport:
    """Replay the run's recording, and return the report with the result. Each digest of every stage
    of every step must be the same."""
    from r3async.record.recording import RecordingError
    from r3async.tools.replay import describe_replay as told
    from r3async.tools.replay import replay_run

    def show_step(recorded: Any, metrics: Any) -> None:
        if recorded.step % PROGRESS_STEPS == 0:
            print_line(f"chaos: replayed {recorded.step} of {report.steps} steps")

    try:
        done = replay_run(run_dir, progress=show_step)
    except RecordingError as error:
        return msgspec.structs.replace(
            report, replayed=0, problems=[*report.problems, f"replay: {error}"]
        )
    equal = done.last - (done.difference is not None)
    problems = [] if done.difference is None else [f"replay: {told(done).splitlines()[0]}"]
    if done.difference is None and equal != report.steps:
        problems = [f"replay: the recording has {equal} of {report.steps} steps"]
    return msgspec.structs.replace(report, replayed=equal, problems=[*report.problems, *problems])


def check_run(
    config: Config, scenario_run: ScenarioRun, run_dir: Path, done: Counter[str], seconds: float
) -> ChaosReport:
    """Check the files of a run that has ended, and return the report."""
    from dev.chaos.actors import chaos_directory

    schedule = config.schedule
    steps = [
        msgspec.convert(line, TrainedStep) for line in read_json_objects(run_dir / TRAINED_FILE)
    ]
    passed = list(read_relay_records(chaos_directory(run_dir)))
    resumed = list(read_restarts(run_dir, config))
    problems = [
        *check_trained(steps, config.steps, schedule.prompts_per_step, schedule.group_size),
        *check_content(steps, passed),
        *check_durable(passed, resumed),
        *check_lineages(steps, read_lineage_starts(run_dir)),
    ]
    rows = read_json_objects(run_dir / "metrics.jsonl")
    count = Counter(row["step"] for row in rows)
    problems += [
        f"step {n} has {count[n]} rows of metrics"
        for n in range(1, config.steps + 1)
        if count[n] != 1
    ]
    problems += [
        (
            f"step {r['step']} trained a token of age {r['staleness/max']}, above the bound "
            f"{r['staleness/bound']}"
        )
        for r in rows
        if r["staleness/max"] > r["staleness/bound"]
    ]
    leftover_files = [p.name for p in (run_dir / "spool").glob("*") if p.is_file()]
    if leftover_files and not scenario_run.fault:
        problems.append(
            f"the spool still holds {len(leftover_files)} files, though everything was trained: "
            f"{leftover_files[:3]}"
        )
    events = Counter(e["event"] for e in read_json_objects(run_dir / "events.jsonl"))
    return ChaosReport(
        preset=scenario_run.preset,
        scenario=scenario_run.scenario,
        seed=scenario_run.seed,
        fault=scenario_run.fault,
        faults=dict(done),
        steps=len(steps),
        trajectories=sum(len(s.trajectories) for s in steps),
        resumed=len(resumed),
        generators_lost=events["generator_lost"],
        sent=sum(isinstance(p, SentRecord) for p in passed),
        acknowledged=sum(
            len(p.trajectory_ids) for p in passed if isinstance(p, AcknowledgedRecord)
        ),
        changed=sum(isinstance(p, DamageRecord) for p in passed),
        damaged=int(sum(values_before_drops(rows, "transport/damaged"))),
        duplicates=int(sum(values_before_drops(rows, "transport/duplicates"))),
        seconds=round(seconds, 1),
        problems=problems,
    )


def values_before_drops(rows: Sequence[dict[str, Any]], name: str) -> Iterator[float]:
    """Yield the last value of a counter before each drop, where its process restarted, and its
    last value of all."""
    for row, after in zip(rows, [*rows[1:], {name: -1.0}], strict=True):
        if after[name] < row[name]:
            yield row[name]


def read_relay_records(directory: Path) -> Iterator[RelayRecord]:
    for path in sorted(directory.glob("*.jsonl")):
        for line in read_json_objects(path):
            yield msgspec.convert(line, RelayRecord)


def read_lineage_starts(run_dir: Path) -> list[LineageStart]:
    """Return the starts of the run, in order."""
    events = [
        e for e in read_json_objects(run_dir / "events.jsonl") if e["event"] == "lineage_began"
    ]
    return [LineageStart(e["lineage"], e["parent"], e["version"]) for e in events]


def read_restarts(run_dir: Path, config: Config) -> Iterator[RunRestart]:
    """Yield the restarts of the run. Without a checkpoint, a run restarts from step 0."""
    schedule = config.schedule
    slots = count_slots(schedule)
    starts = [
        e for e in read_json_objects(run_dir / "events.jsonl") if e["event"] == "conductor_started"
    ]
    for event in starts[1:]:
        step = event["step"]
        yield RunRestart(
            event["time"],
            step // schedule.steps_per_publication,
            step * schedule.prompts_per_step + slots,
        )


def check_choice(option: str, value: str, choices: Iterable[str]) -> None:
    """Raise `ConfigError` if `value` is none of `choices`."""
    if value not in choices:
        raise ConfigError(f"{option} {value!r} must be one of {', '.join(filter(None, choices))}")


def describe_report(report: ChaosReport) -> str:
    faults = ", ".join(f"{count} {what}" for what, count in sorted(report.faults.items())) or "none"
    lines = [
        f"{report.scenario}: {faults}; the run restarted {report.resumed} times",
        f"trained: {report.trajectories} trajectories in {report.steps} steps",
        f"on the wire: {report.sent} sent, {report.acknowledged} acknowledgements, "
        f"{report.changed} messages changed; {report.damaged} came damaged and "
        f"{report.duplicates} twice",
    ]
    if report.replayed is not None:
        lines.append(f"replayed: {report.replayed} steps, every digest of every stage the same")
    if not report.problems:
        return "\n".join(
            [
                *lines,
                (
                    "everything is right: each trained once, as it was sent; nothing "
                    "acknowledged was lost"
                ),
            ]
        )
    more = len(report.problems) - MAX_SHOWN_PROBLEMS
    shown = [f"  {problem}" for problem in report.problems[:MAX_SHOWN_PROBLEMS]] + (
        [f"  and {more} more"] if more > 0 else []
    )
    return "\n".join([*lines, "something is WRONG:", *shown])
