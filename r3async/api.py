"""The two commands as functions: `r3async.train` and `r3async.evaluate`."""

from __future__ import annotations

import asyncio
import contextvars
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypeVar

from msgspec import UNSET

from r3async.config import Config, ConfigError, load_config
from r3async.config.load import apply_overrides
from r3async.envs.factory import build_factory_with_objects
from r3async.envs.passed_objects import extract_objects, register_objects
from r3async.rollout.evaluation_results import Evaluation
from r3async.world.processes import run_on_shared_loop

T = TypeVar("T")


def train(
    config: str | Path | Config = "quickstart",
    *,
    environment: Any = None,
    reward: Any = UNSET,
    callbacks: Sequence[Any] = (),
    runs: str | Path | None = None,
    **settings: Any,
) -> Path:
    """Train to the end, and return the run's directory, `runs/NAME`.

    Progress goes to standard error. Ctrl-C ends the run in order, and it can resume. Blocking; also
    works in a notebook. Wherever a setting is a name, the object may be passed instead.

    Args:
        config: A preset's name, a TOML file, or a `Config`.
        environment: A class, a function that makes environments, or a name as `env.name`.
        reward: Reward of `data`: a function, a list of them, or a value of the setting
            `reward`. None unsets it.
        callbacks: Callbacks of the run, see `Callback`.
        runs: Where run directories are; by default R3ASYNC_RUNS, or `runs` in the
            current directory.
        settings: Settings over `config`: `train("quickstart", steps=3, learner={"lr": 1e-4})`; a
            dotted key is passed as `**{"learner.lr": 1e-4}`. `data` may be rows: a list of dicts,
            or a `datasets.Dataset`. With the `name` of an existing run, that run resumes from its
            newest checkpoint.

    Raises `ConfigError` for a wrong setting or an object that cannot be sent to the generators,
    `CheckpointError` for a checkpoint that cannot be resumed, and `RunFailed` for a run that ended
    early. `CallbackFailed`, `NotTrained` (no step made an update) and `StoppedBeforeStep` are
    subclasses of `RunFailed`.
    """
    from r3async.actors.driver import RunLauncher
    from r3async.tools.training_session import StopRequest
    from r3async.tools.training_session import train as train_config

    named_settings, objects = _name_objects(environment, reward, settings)
    register_objects(objects)
    make_environment = partial(build_factory_with_objects, objects) if objects else None
    request = StopRequest()
    run_training = partial(
        train_config,
        _build_config(config, named_settings),
        preset="config" if isinstance(config, Config) else str(config),
        root=_resolve_runs_directory(runs),
        make_launcher=partial(RunLauncher, make_environment=make_environment),
        callbacks=callbacks,
        request=request,
    )
    return _run_blocking(run_training, stop=partial(setattr, request, "requested", True))


def evaluate(
    target: str | Path | None = None,
    *,
    environment: Any = None,
    reward: Any = UNSET,
    tasks: int | None = None,
    seed: int | None = None,
    policy: Literal["model", "oracle", "random"] = "model",
    preset: str | None = None,
    runs: str | Path | None = None,
    **settings: Any,
) -> Evaluation:
    """Play fixed tasks, which training never poses, and return the results.

    Args:
        target: A run's name or directory, whose newest model plays its environment (by default the
            newest run), or a model directory, which needs `environment`. A run that was given objects is
            given them again.
        environment: A class, a function that makes environments, or a name as `env.name`.
        reward: Reward of `data`, as for `train`.
        tasks: Number of tasks; by default 64, or as many as each of the run's sets has.
        seed: Seed of the tasks.
        policy: The model, or for comparison the environment's own `oracle` or `random` answers.
        preset: Preset to use in place of the run's configuration, or of the defaults for a
            model directory.
        runs: Where run directories are, as for `train`.
        settings: Settings over the configuration: `evaluation={"samples_per_task": 8}`.

    Raises `ConfigError` for a wrong setting, and `RunFailed` if an episode or the engine failed.
    Blocking, like `train`.
    """
    from r3async.tools.eval import check_evaluated_model, choose_target, run_evaluation

    if not isinstance(settings.get("env", {}), Mapping):
        raise ConfigError("`env` is a section: the argument is called `environment`")
    named_settings, objects = _name_objects(None, reward, settings)
    env_name = environment
    if env_name is not None and not isinstance(env_name, str):
        names, env_objects = extract_objects({"environment": env_name})
        env_name = names["environment"]
        objects = objects | env_objects
    register_objects(objects)
    chosen = choose_target(
        None if target is None else str(target),
        preset,
        env_name,
        named_settings,
        policy,
        _resolve_runs_directory(runs),
    )
    check_evaluated_model(chosen, policy)
    return _run_blocking(
        lambda: run_on_shared_loop(run_evaluation(chosen.with_tasks(tasks, seed), policy=policy)),
        stop=lambda: None,
    )


def _resolve_runs_directory(runs: str | Path | None) -> Path:
    from r3async.tools.runs import get_runs_directory

    return get_runs_directory() if runs is None else Path(runs)


def _name_objects(
    environment: Any, reward: Any, settings: Mapping[str, Any]
) -> tuple[dict[str, Any], dict[str, bytes]]:
    """Return all arguments as settings, with names in place of objects, and the pickled
    objects by name."""
    arguments = dict(settings)
    if environment is not None:
        arguments["environment"] = environment
    if reward is not UNSET:
        arguments["reward"] = reward
    named_settings, objects = extract_objects(arguments)
    if "environment" in named_settings:
        named_settings["env.name"] = named_settings.pop("environment")
    return named_settings, objects


def _build_config(preset: str | Path | Config, settings: Mapping[str, Any]) -> Config:
    if not isinstance(preset, Config):
        return load_config(str(preset), settings)
    return apply_overrides(preset, settings, "train")


def _run_blocking(call: Callable[[], T], *, stop: Callable[[], object]) -> T:
    """Run `call`, which runs an event loop. If a loop is running in this thread, as in a
    notebook, it runs in another thread; a first Ctrl-C then calls `stop`, and a second one stops
    waiting at once."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return call()
    result: Future[T] = Future()
    context = contextvars.copy_context()

    def work() -> None:
        try:
            result.set_result(context.run(call))
        except BaseException as error:
            result.set_exception(error)

    threading.Thread(target=work, name="r3async", daemon=True).start()
    try:
        return result.result()
    except KeyboardInterrupt:
        if result.done():
            raise
        stop()
        return result.result()
