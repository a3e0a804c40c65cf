"""The benchmark `bench e2e`: whole runs against a peer, from one model, and the pipeline against its parts alone.

Cases: `a`, one turn of eight letters (the preset `reverse-text`); `b`, several turns (`guess`); `c`, three turns with
slow tools; `own`, the quickstart against a bare engine and a bare learner. In `a`, `b` and `c` our run and the peer's
take turns, seed by seed, from one model, with the same reward, tasks per step, episodes per task and optimizer. Our run
has the schedule of its preset; the peer (TRL, `peer_trl.py`) is synchronous. A ratio is ours over theirs, the median
over seeds.

Wall time is meaningful only on a quiet machine: `others` is the number of cores that other processes kept busy
meanwhile.
"""

from __future__ import annotations

import os
import sys
import sysconfig
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from statistics import fmean, median
from typing import Any

import msgspec

from dev.bench import bare, overlap
from dev.bench.e2e_report import Case, Own, Pair, Plan, Report, Side, compare_sides, own_ratios, side_of
from dev.bench.jobs import BenchError, Say, run_job, started
from dev.bench.training import metrics_of, train_apart
from dev.bench.tree_cpu import TreeCpu
from r3async.config import Config, ConfigError, config_from_dict, config_to_dict, load_config
from r3async.envs.factory import BUILTIN_ENVIRONMENTS
from r3async.record.reading import read_json_objects
from r3async.record.timeline import read_timeline

TIMEOUT = 1800.0
CASES = ("a", "b", "c", "own")
EXPERTS = "grouped_mm"
"""The peer's implementation of experts in transformers: 0.444 CPU seconds a step on CPU, against 0.452 with `eager`."""
TRIAL_STEPS, TRIAL_SETTLE = 12, 4


# -- configurations ----------------------------------------------------------------------------------------------------


def configure(case: str, plan: Plan, seed: int, model: Path | None) -> Config:
    """Return the configuration of our run of a case."""
    if case == "c":
        base = config_to_dict(overlap.configure(overlap.Plan([4]), 4))
    else:
        base = config_to_dict(load_config("reverse-text" if case == "a" else "quickstart"))
    if case == "b":
        base["env"] |= {"name": "guess", "args": {"highest": 16}}
        base["model"]["init"] |= {"warm_reward": 0.5}
        base["episode"] |= {"max_turns": 5, "max_new_tokens": 4, "max_prompt_tokens": 96, "max_total_tokens": 100}
        base["algorithm"] |= {"credit": "trajectory"}
        # At 5e-4 the reward falls with weights one version old, and rises with the newest ones.
        base["learner"] |= {"lr": 2e-4}
    base["steps"], base["seed"], base["name"] = plan.steps, seed, "run"
    base["model"]["path"] = str(model or "")
    base["routing"]["trace"] = "off"
    sizes = {"prompts_per_step": plan.groups, "group_size": plan.samples}
    base["schedule"] |= {name: size for name, size in sizes.items() if size}
    return config_from_dict(base)


def small(plan: Plan) -> Plan:
    """Return a plan that exercises the code path; its figures mean nothing."""
    return msgspec.structs.replace(
        plan, seeds=plan.seeds[:1], steps=4, settle=1, batches=2, groups=2, samples=4, peer_threads=1
    )


def peer_job(config: Config, threads: int, steps: int) -> dict[str, Any]:
    """Return the peer's job with the settings of our run."""
    name, learner = config.env.name, config.learner
    return {
        "model": config.model.path,
        "env": BUILTIN_ENVIRONMENTS.get(name, name),
        "env_args": config.env.args,
        "steps": steps,
        "groups": config.schedule.prompts_per_step,
        "samples": config.schedule.group_size,
        "lr": learner.lr,
        "warmup_steps": learner.warmup_steps,
        "betas": list(learner.betas),
        "eps": learner.eps,
        "weight_decay": learner.weight_decay,
        "max_grad_norm": learner.max_grad_norm,
        "max_new_tokens": config.episode.max_new_tokens,
        "max_turns": config.episode.max_turns,
        "seed": config.seed,
        "threads": threads,
        "experts_implementation": EXPERTS,
    }


def run(plan: Plan, say: Say, *, keep: Path | None = None) -> Report:
    """Make the models, then all runs, seed by seed, our run and the peer's in turns.

    With `keep`, models and runs are made in that directory and stay; those found there are not made again. Raises
    `BenchError`, and `ConfigError` for an unknown case.
    """
    began = time.perf_counter()
    if unknown := [case for case in plan.cases if case not in CASES]:
        raise ConfigError(f"--cases {unknown[0]!r}: there are {', '.join(CASES)}")
    if plan.peer != "none" and any(case != "own" for case in plan.cases):
        check_peer(plan)
    made: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="r3async-e2e-") as scratch:
        for case in plan.cases:
            place = (keep or Path(scratch)) / case
            model = _model(case, plan, place, say)
            made[case] = _own(plan, model, place, say) if case == "own" else _case(case, plan, model, place, say)
    return Report("e2e", plan, **made, seconds=time.perf_counter() - began)


def _model(case: str, plan: Plan, place: Path, say: Say) -> Path:
    from r3async.tools.init_model import init_model

    model = place / "model"
    if not model.is_dir():
        init_model(model, _quick(configure(case, plan, 0, None)), progress=say)
    return model


def _quick(config: Config) -> Config:
    """Return the configuration without tool latency, so that warming up the model waits for no tool."""
    made = config_to_dict(config)
    if "median" in made["env"]["args"]:
        made["env"]["args"] |= {"median": 0.0}
    return config_from_dict(made)


def _case(case: str, plan: Plan, model: Path, place: Path, say: Say) -> Case:
    threads = plan.peer_threads
    if plan.peer != "none" and not threads:
        threads = fastest_threads(configure(case, plan, plan.seeds[0], model), plan, place, say)
    pairs = []
    for index, seed in enumerate(plan.seeds):
        config, sides = configure(case, plan, seed, model), {}
        who = ["ours", "theirs"] if plan.peer != "none" else ["ours"]
        for name in who if index % 2 == 0 else who[::-1]:
            say(f"{case}, seed {seed}: {name}")
            directory = place / f"{name}-{seed}"
            if name == "ours":
                sides[name] = our_run(config, directory, plan, say)
            else:
                sides[name] = their_run(config, directory, plan, threads)
            say(f"{case}, seed {seed}: {name} {sides[name].seconds_per_step:.3f} s a step")
        pairs.append(Pair(seed, **sides))
    settings = {"ours": f"max_staleness = {config.schedule.max_staleness}"}
    if plan.peer != "none":
        settings["theirs"] = f"TRL's GRPOTrainer, transformers' generate, {threads} torch threads, sdpa, {EXPERTS}"
    return compare_sides(pairs, settings)


# -- our run -----------------------------------------------------------------------------------------------------------


def our_run(config: Config, directory: Path, plan: Plan, say: Say) -> Side:
    """Make the run unless it exists, and return its figures."""
    done = directory / "side.json"
    if done.exists():
        return msgspec.json.decode(done.read_bytes(), type=Side)
    load = os.getloadavg()[0]
    with TreeCpu() as cpu:
        train_apart(config, directory, timeout=TIMEOUT, say=say)
    rows = metrics_of(config, directory)
    if len(rows) != plan.steps:
        raise BenchError(f"our run made {len(rows)} of {plan.steps} steps; see {directory}")
    waits = [s.start for s in read_timeline(directory / config.name) if (s.who, s.what) == ("learner", "wait")]
    marks = [(float(row["time"]), float(row["reward/mean"])) for row in rows]
    settled = rows[plan.settle :]
    facts = {
        "learner_idle": sum(r["learner/wait_seconds"] for r in settled) / (marks[-1][0] - marks[plan.settle - 1][0]),
        "engine_idle": fmean(r["generator/engine_idle_share"] for r in settled),
        "lag_p99_ms": median(max(r[f"lag/{who}_own_p99_ms"] for who in LOOPS) for r in settled),
        "age_max": max(r["staleness/max"] for r in rows),
        "pause_share": settled[-1]["weights/paused_share"],
    }
    tokens = fmean(r["batch/trained_tokens"] for r in settled)
    side = side_of(min(waits), marks, cpu, config, plan, tokens, load, facts)
    done.write_bytes(msgspec.json.encode(side))
    return side


LOOPS = ("conductor", "learner", "generator")


# -- the peer's run ----------------------------------------------------------------------------------------------------


def check_peer(plan: Plan) -> None:
    """Raise `ConfigError` with install instructions if the peer cannot run."""
    if plan.peer != "trl":
        raise ConfigError(f"--peer {plan.peer!r}: there are none, trl")
    if not plan.peer_python or not Path(plan.peer_python).exists():
        site = sysconfig.get_path("purelib")
        place = f"PEER/lib/python{sys.version_info.major}.{sys.version_info.minor}/site-packages"
        raise ConfigError(
            "--peer trl needs --peer-python: the Python of an environment that has TRL, on top of this one's torch and "
            f"transformers. To make it: `{sys.executable} -m venv PEER && echo {site} > {place}/base.pth && "
            "PEER/bin/pip install trl`; then --peer-python PEER/bin/python"
        )


def fastest_threads(config: Config, plan: Plan, place: Path, say: Say) -> int:
    """Return the number of torch threads with which the peer makes a few steps fastest."""
    seconds = {}
    for threads in sorted({1, os.cpu_count() or 1}):
        directory = place / f"trial-{threads}"
        marks = peer_marks(config, directory, plan, threads, TRIAL_STEPS)[TRIAL_SETTLE:]
        seconds[threads] = median(after["time"] - before["time"] for before, after in pairwise(marks))
        say(f"the peer with {threads} threads: {seconds[threads]:.3f} s a step")
    return min(seconds, key=lambda threads: seconds[threads])


def peer_marks(config: Config, directory: Path, plan: Plan, threads: int, steps: int) -> list[dict[str, Any]]:
    """Return the rows of the peer's run; the first is of step 0, the beginning. An existing run is not made again."""
    directory.mkdir(parents=True, exist_ok=True)
    rows, log = directory / "rows.jsonl", directory / "log.txt"
    if not (directory / "done.json").exists():
        (directory / "job.json").write_bytes(msgspec.json.encode(peer_job(config, threads, steps)))
        root = Path(bare.__file__).resolve().parents[2]
        command = [plan.peer_python, "-P", "-m", "dev.bench.peer_trl", str(directory)]
        with started(command, log, PYTHONPATH=str(root), HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false") as process:
            deadline = time.monotonic() + TIMEOUT
            while process.poll() is None and time.monotonic() < deadline:
                time.sleep(0.2)
        if process.returncode:
            raise BenchError(f"the peer failed with exit code {process.returncode}:\n{log.read_text()[-3000:]}")
    found = read_json_objects(rows)
    if len(found) != steps + 1:
        raise BenchError(f"the peer made {len(found) - 1} of {steps} steps; see {log}")
    return found


def their_run(config: Config, directory: Path, plan: Plan, threads: int) -> Side:
    done = directory / "side.json"
    if done.exists():
        return msgspec.json.decode(done.read_bytes(), type=Side)
    load = os.getloadavg()[0]
    with TreeCpu("peer") as cpu:
        rows = peer_marks(config, directory, plan, threads, plan.steps)
    marks = [(float(row["time"]), float(row["reward"])) for row in rows[1:]]
    tokens = (rows[-1]["tokens"] - rows[plan.settle]["tokens"]) / (plan.steps - plan.settle)
    side = side_of(float(rows[0]["time"]), marks, cpu, config, plan, tokens, load, {})
    done.write_bytes(msgspec.json.encode(side))
    return side


# -- the case `own` ----------------------------------------------------------------------------------------------------


def _own(plan: Plan, model: Path, place: Path, say: Say) -> Own:
    seeds, runs = [], []
    for seed in plan.seeds:
        config = configure("own", plan, seed, model)
        say(f"own, seed {seed}: the quickstart")
        side = our_run(config, place / f"ours-{seed}", plan, say)
        job, directory = bare.Job(config_to_dict(config), plan.batches), place / f"bare-{seed}"
        target = "dev.bench.bare"
        engine = run_job(f"{target}:play", job, bare.Engine, directory, timeout=TIMEOUT, say=say)
        learner = run_job(f"{target}:train", job, bare.Learner, directory, timeout=TIMEOUT, say=say)
        seeds.append(own_ratios(side, engine, learner))
        runs.append(side)
    middle = {name: median(ratios[name] for ratios in seeds) for name in seeds[0]}
    return Own(**middle, by_seed=seeds, runs=runs)
