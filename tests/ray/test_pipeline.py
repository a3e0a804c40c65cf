"""The whole run: Ray, vLLM, ZeroMQ, Megatron. Short, and real."""

import io
import json
import os
import signal
import threading
import time

import psutil
import pytest
from rich.console import Console

import r3async
from r3async.config import load_config
from r3async.record.reading import read_json_objects
from r3async.record.route_verification import verify_routes
from r3async.record.routes import RouteIndex
from r3async.tools.inspect.routes import print_routes, print_verification
from r3async.tools.training_session import train
from r3async.views.episodes import RunTokenizer
from r3async.views.summary import summarize_run

pytestmark = [pytest.mark.timeout(400), pytest.mark.usefixtures("local_ray")]

SMALL = ["steps=4", "schedule.prompts_per_step=4", "schedule.group_size=4", "generator.kv_cache_gib=0.25"]
STEPS = 12
GENTLE = "learner.lr=2e-5"  # so small that drift can only come from something misaligned
MEASURED = ("lag/learner_p99_ms", "lag/conductor_p99_ms", "lag/generator_p99_ms", "generator/engine_idle_share")
"""Metrics of real processes. Those that any run has in every row: `sim/test_catalogue.py`."""


def run(model, tmp_path, name, *overrides, **faults):
    """`faults`: engine arguments that are refused where a configuration is read."""
    screen = io.StringIO()
    config = load_config("quickstart", [*SMALL, f"model.path={model}", f"name={name}", *overrides])
    config.generator.engine_args.update(faults)
    try:
        return train(config, "quickstart", Console(file=screen, width=120), tmp_path), screen
    except BaseException:
        print(screen.getvalue())
        raise


def events(run_dir):
    return [json.loads(line) for line in (run_dir / "events.jsonl").read_text().splitlines()]


def kill_generator_and_engine(run_dir, killed):
    """SIGKILL the generator's process after step 2, and after step 6 the process of vLLM below the next one. `killed`
    gets the processes below the first."""
    metrics, deadline = run_dir / "metrics.jsonl", time.monotonic() + 200
    for event, step in (("generator_started", 2), ("generator_restarted", 6)):
        while not metrics.exists() or len(read_json_objects(metrics)) < step:
            assert time.monotonic() < deadline
            time.sleep(0.1)
        pid = next(e["pid"] for e in events(run_dir) if e["event"] == event)
        below = psutil.Process(pid).children(recursive=True)
        if step == 2:
            killed += below
            os.kill(pid, signal.SIGKILL)
        else:
            next(process for process in below if "EngineCore" in " ".join(process.cmdline())).kill()


def test_a_run_goes_on_when_its_generator_or_engine_is_killed_and_records_what_it_promises(warm_model, tmp_path):
    killed = []
    killer = threading.Thread(target=kill_generator_and_engine, args=(tmp_path / "killed", killed))
    killer.start()
    run_dir, screen = run(
        warm_model, tmp_path, "killed", f"steps={STEPS}", GENTLE, "routing.trace=all", "schedule.window=5"
    )
    killer.join(timeout=120)
    assert killed, "its engine has a process of its own"
    assert psutil.wait_procs(killed, 10)[1] == [], "it outlived its owner"

    rows = read_json_objects(run_dir / "metrics.jsonl")
    assert [r["step"] for r in rows] == list(range(1, STEPS + 1))
    for row in rows[1:]:
        assert {"pace/ratio", "learner/idle_share", "generator/idle_share"} <= set(row)
    for row in rows:
        assert all(isinstance(row[name], (int, float)) for name in MEASURED)
        assert row["staleness/max"] <= row["staleness/bound"] == 2
        assert sum(row[f"staleness/tokens_{age}"] for age in range(3)) == row["batch/trained_tokens"]
        assert row["routing/recorded_fraction"] >= 0.95
        assert row["batch/tokens"] > row["batch/shared_tokens"] > 0
        assert row["transport/rejected"] == 0
        assert row["rollout_kl/k3"] < 0.01
    assert max(r["staleness/mean"] for r in rows) > 0  # generation overlapped training
    assert [r["version"] for r in rows] == list(range(1, STEPS + 1))

    names = [e["event"] for e in events(run_dir)]
    assert names.count("generator_restarted") == 2
    assert "episode_abandoned" not in names
    lost = [e["error"] for e in events(run_dir) if e["event"] == "generator_lost"]
    # A request or an installation is the first to learn of it. Both name the cause.
    assert "its process ended with code -9" in lost[1]
    assert summarize_run(run_dir).history.generators_lost == len(lost) == 2
    assert "restart" in screen.getvalue()
    for product in ("report.html", "config.toml", "episodes.jsonl", "model/model.safetensors", "logs/generator-0.log"):
        assert (run_dir / product).stat().st_size > 0, product
    assert (tmp_path / "latest").resolve() == run_dir.resolve()
    assert load_config(str(run_dir / "config.toml")).steps == STEPS
    routes_were_the_engines_own(run_dir, rows)


def routes_were_the_engines_own(run_dir, rows):
    """Every trained sample's, also those that were played again after the kill."""
    index = RouteIndex(run_dir)
    result = verify_routes(index)
    assert result.samples == STEPS * 16
    assert (result.different, result.first, result.unmatched) == (0, None, [])
    layers = len(json.loads((run_dir / "routing.jsonl").read_text().splitlines()[0])["agreement"])
    positions = int(sum(r["batch/tokens"] for r in rows))
    assert result.equal + result.unrecorded == positions * layers
    # Only the last token of a sample is never fed.
    assert result.unrecorded == result.samples * layers
    screen = io.StringIO()
    assert print_verification(run_dir, Console(file=screen, width=80))
    print_routes(run_dir, RunTokenizer(run_dir), Console(file=screen, width=80), step=STEPS)
    assert "every recorded route was used in training as the engine chose it" in screen.getvalue()
    assert screen.getvalue().count(" sampled ") >= 3


@pytest.mark.short_run
def test_staleness_zero_is_on_policy_and_the_learner_agrees_with_the_engine(tmp_path):
    run_dir = r3async.train(
        "quickstart",
        runs=tmp_path,
        name="on-policy",
        steps=3,
        model={"init": {"max_warm_steps": 1, "warm_reward": 0.0}},
        generator={"kv_cache_gib": 0.25},
        schedule={"prompts_per_step": 4, "group_size": 4, "max_staleness": 0},
        routing={"replay": "off"},
    )
    assert run_dir == tmp_path / "on-policy"
    for row in read_json_objects(run_dir / "metrics.jsonl"):
        assert row["staleness/max"] == 0
        assert row["rollout_kl/k3"] < 1e-6
        assert row["routing/agreement"] > 0.999
