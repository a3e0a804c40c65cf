"""The two commands as functions: `r3async.train` and `r3async.evaluate`."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from r3async.config import Config, load_config
from r3async.config.read import with_overrides
from r3async.rollout.outcomes import Evaluation


def train(preset: str | Path | Config = "quickstart", *, runs: str | Path = "runs", **settings: Any) -> Path:
    """Train to the end, and return the run's directory, `runs/NAME`.

    `preset`: a preset's name, a TOML file, or a `Config`. `settings` go over it: `train("quickstart", steps=3,
    learner={"lr": 1e-4})`; a dotted key goes in as `**{"learner.lr": 1e-4}`. With the `name` of a run that is there, that run
    resumes from its newest checkpoint. Progress goes to standard error.

    Raises `ConfigError` for a wrong setting, `CheckpointError` for a checkpoint that cannot be resumed, `RunFailed` for a run
    that ended early, and `NotTrained`, which is one, if no step made an update. Ctrl-C ends the run in order, and it can resume.
    Blocking, with an event loop of its own: `RuntimeError` within one that runs, as a notebook's does.
    """
    from r3async.tools.train import train as run

    _refuse_running_loop()
    name = "config" if isinstance(preset, Config) else str(preset)
    return run(_config(preset, settings), name, root=Path(runs))


def evaluate(
    target: str | Path | None = None,
    env: str | None = None,
    *,
    episodes: int | None = None,
    seed: int | None = None,
    policy: Literal["model", "oracle", "random"] = "model",
    preset: str | None = None,
    runs: str | Path = "runs",
    **settings: Any,
) -> Evaluation:
    """Play fixed tasks, which training never poses, and return what came of them.

    `target`: a run's name or directory, whose newest model plays its environment (by default the newest run), or a model
    directory, which needs `env`.
    `policy`: the model, or for scale the environment's own `oracle` or `random` answers. `settings` go over the configuration.

    Raises `ConfigError` for a wrong setting, and `RunFailed` for what an episode or the engine failed with.
    Blocking, as `train`.
    """
    from r3async.tools.eval import choose_target, run_evaluation

    _refuse_running_loop()
    chosen = choose_target(None if target is None else str(target), preset, env, settings, policy, Path(runs))
    return asyncio.run(run_evaluation(chosen.posing(episodes, seed), policy=policy))


def _refuse_running_loop() -> None:
    """Before anything is made: later, `asyncio.run` would refuse it too, in words of its own."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return
    raise RuntimeError(
        "r3async.train and r3async.evaluate run an event loop of their own, and one runs here already, as in a notebook: "
        "await asyncio.to_thread(r3async.train, ...)"
    )


def _config(preset: str | Path | Config, settings: Mapping[str, Any]) -> Config:
    if not isinstance(preset, Config):
        return load_config(str(preset), settings)
    return with_overrides(preset, settings)
