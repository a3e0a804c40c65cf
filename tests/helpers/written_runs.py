"""A run's directory as its processes write it, without a run."""

import json
from collections.abc import Callable
from pathlib import Path

import msgspec

from r3async.config import config_from_dict, config_to_toml
from r3async.data.metrics import METRICS
from r3async.record.events import open_event_log
from r3async.record.routes import EngineCall, RouteFile, TrainedRoutes
from r3async.record.step_writer import MetricsFile
from r3async.record.timeline import Timeline
from r3async.tools.init_model import build_byte_tokenizer
from tests.helpers.routes import episode


def write_run(root: Path, name: str = "demo", steps: int = 12, **settings: object) -> Path:
    run = root / "runs" / name
    run.mkdir(parents=True)
    (run / "config.toml").write_text(config_to_toml(config_from_dict({"steps": steps, **settings})))
    build_byte_tokenizer().save_pretrained(run / "init")
    open_event_log(run, "generator-0").info("generator_started", pid=7)
    writer = MetricsFile(run)
    for step in range(1, steps + 1):
        row = {metric: 0.1 + index / 100 + step / 1000 for index, metric in enumerate(METRICS)}
        writer.write(
            {**row, "step": step, "version": step, "time": 1000.0 + 3 * step, "staleness/max": 1, "gpu/odd": step}
        )
        for at, what in enumerate(("wait", "train", "snapshot")):
            Timeline(run, "learner").add_span(what, 1000.0 + 3 * step + at, 1001.0 + 3 * step + at, step=step)
    write_routes(run)
    (run / "routing.jsonl").write_text(
        json.dumps({"step": 1, "agreement": [0.9, 1.0], "load": [[1, 2], [3, 4]]}) + "\n"
    )
    turns = [{"user": "say <b>", "assistant": "no", "reward": 0.5}]
    (run / "episodes.jsonl").write_text(json.dumps({"step": 1, "reward": 0.5, "turns": turns}) + "\n")
    return run


def write_routes(run: Path, change: Callable[..., tuple[TrainedRoutes, list[EngineCall]]] | None = None) -> None:
    """Write the routes of a run whose learner replayed one episode in step 1 and another in step 11;
    `change(trained, calls)` for step 11."""
    learner, engine = RouteFile(run / "routes", "learner"), RouteFile(run / "routes", "engine-generator-0")
    for step in (1, 11):
        trained, calls = episode()
        other = f"g{4 * (step - 1):08d}e0000"
        trained = msgspec.structs.replace(trained, step=step, trajectory_id=other, sample_id=f"{other}s0")
        calls = [msgspec.structs.replace(call, trajectory_id=other) for call in calls]
        if change and step == 11:
            trained, calls = change(trained, calls)
        learner.append(trained)
        for call in calls:
            engine.append(call)
