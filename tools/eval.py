"""Play fixed tasks with a model or an environment's own policies, without Ray or
training: `r3async eval`."""

from __future__ import annotations

import asyncio
import json as json_module
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import msgspec
import numpy as np
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from r3async.actors.process import RunFailed
from r3async.checkpoint import CheckpointDirectory
from r3async.checkpoint.manifest import MANIFEST_FILE
from r3async.config import (
    REDACTED,
    Config,
    ConfigError,
    EnvConfig,
    config_from_dict,
    config_to_dict,
    load_config,
)
from r3async.config.load import Overrides, apply_overrides, nest_overrides, refuse_literal_secrets
from r3async.data.model_shape import take_text_config
from r3async.data.statistics import mean_interval
from r3async.envs import EnvironmentFactory
from r3async.envs.factory import build_environment_factory
from r3async.rollout import build_engine
from r3async.rollout.agents import OUTSIDE_AGENT, is_agent, make_agent
from r3async.rollout.engine import Engine
from r3async.rollout.evaluation import (
    BaselinePolicy,
    EvaluationPlayer,
    build_evaluation_tasks,
    count_tasks,
    drop_long_prompts,
    evaluate_without_model,
    refuse_shared_prompts,
    resolve_evaluation_env,
)
from r3async.rollout.evaluation_results import EpisodeOutcome, Evaluation, join_sets
from r3async.rollout.play_context import PlayContext
from r3async.rollout.renderer import ChatRenderer, TemplateError
from r3async.untrusted import decode_python_json
from r3async.world import EventReporter, ignore_event
from r3async.world.files import make_directory, replace_file
from r3async.world.processes import run_on_shared_loop
from r3async.world.real import REAL_WORLD

from .preflight import StartRequest, run_checks
from .terminal import SafeConsole

ENGINE_STOP_SECONDS = 30.0
ROW_ARGUMENTS = frozenset({"path", "subset", "split", "limit", "eval"})
"""Arguments of a dataset (`env.args`) that change its rows, so that the run's noted `data.digest`
no longer applies."""
START_MODEL = "start"
"""The word for the model that a run started from, as a baseline."""
DEFAULT_TASKS = 64
"""Number of tasks if neither the user nor `evaluation.sets` gives one."""


class EvaluationTarget(msgspec.Struct, frozen=True):
    """A model to evaluate and how.

    Attributes:
        model: The model's directory, or None for a policy that needs none.
        config: The settings. Its `evaluation` says what to play; where that names no environment,
            `env` is played.
        trained_env: The environment that the run trained.
        run: The run that is evaluated, if any.
    """

    model: Path | None
    config: Config
    trained_env: EnvConfig | None = None
    run: Path | None = None

    def with_tasks(self, tasks: int | None, seed: int | None) -> EvaluationTarget:
        """Return the target with another number of tasks, and another seed for them.
        Raises `ConfigError`."""
        if tasks is not None and tasks < 1:
            raise ConfigError(f"`--tasks` must be at least 1, got {tasks}")
        if seed is not None and seed < 0:
            raise ConfigError(f"`--seed` must be 0 or more, got {seed}")
        settings = self.config.evaluation
        given = {}
        if tasks is not None or not settings.sets:
            given["tasks"] = DEFAULT_TASKS if tasks is None else tasks
        if seed is not None:
            given["seed"] = seed
        sets = {
            name: msgspec.structs.replace(each, **given) for name, each in settings.sets.items()
        }
        settings = msgspec.structs.replace(settings, sets=sets, **given)
        return msgspec.structs.replace(
            self, config=msgspec.structs.replace(self.config, evaluation=settings)
        )

    @property
    def environments(self) -> dict[str, EnvConfig]:
        """The environments of the sets, by name."""
        return {
            name: resolve_evaluation_env(self.config, each)
            for name, each in self.config.evaluation.resolve_sets().items()
        }


def find_evaluation_target(
    name: str, preset: str | None, env: str | None, overrides: Overrides, root: Path
) -> EvaluationTarget:
    """Find a model directory, or the newest model of a run.

    A run is played with its own configuration and the environment of its `[evaluation]`; a model
    directory with the defaults or a `preset`. `overrides` apply on top. Raises `ConfigError` if
    `name` is neither.
    """
    from .inspect.run import InspectError, find_run

    if (Path(name) / "config.json").is_file():
        if (
            env is None
            and preset is None
            and "name" not in nest_overrides(overrides).get("env", {})
        ):
            raise ConfigError(
                f"{name} is a model: say which environment to evaluate it in, with --env "
                "NAME, or data=FILE"
            )
        run = None
        model = Path(name)
        base = load_config(preset, command=None) if preset else Config()
        trained = None
    else:
        try:
            run = find_run(name, root)
        except InspectError as error:
            if (Path(name) / MANIFEST_FILE).is_file():
                raise ConfigError(
                    f"RUN_OR_MODEL = {name!r} is a checkpoint: export it (`r3async export {name} "
                    "DIR`), and evaluate DIR with --preset RUN/config.toml"
                ) from error
            raise ConfigError(
                f"RUN_OR_MODEL = {name!r} is no model directory (no config.json in it), and {error}"
            ) from error
        base = load_config(preset or str(run / "config.toml"), command=None)
        model = _find_run_model(run, base)
        trained = base.env
    return EvaluationTarget(model.absolute(), _apply_overrides(base, env, overrides), trained, run)


def _start_model(run: Path, config: Config) -> Path:
    return Path(config.model.path) if config.model.path else run / "init"


def _find_run_model(run: Path, config: Config) -> Path:
    """Return the newest model of a run, which is the one that it started from as long as
    it has saved none."""
    paths = [run / "model", _start_model(run, config)]
    for path in paths:
        if (path / "config.json").is_file():
            return path
    raise ConfigError(
        f"{run} has no model yet: neither {paths[0]} nor {paths[1]} has a config.json"
    )


def make_baseline_target(target: EvaluationTarget, baseline: str, root: Path) -> EvaluationTarget:
    """Return the target with another model, which plays the same tasks by the same settings.

    Raises `ConfigError` if `baseline` is no model.

    Args:
        baseline: "start" for the model that the target's run started from, a model directory, or a
            run's name for its newest model.
    """
    from .inspect.run import InspectError, find_run

    if baseline == START_MODEL:
        if target.run is None:
            raise ConfigError(
                f"`--baseline {START_MODEL}` needs a run; name the directory of the "
                "other model instead"
            )
        model = _start_model(target.run, load_config(str(target.run / "config.toml"), command=None))
    elif (Path(baseline) / "config.json").is_file():
        model = Path(baseline)
    else:
        try:
            run = find_run(baseline, root)
        except InspectError as error:
            raise ConfigError(
                f"`--baseline {baseline}` is no model directory (no config.json in it), and {error}"
            ) from error
        model = _find_run_model(run, load_config(str(run / "config.toml"), command=None))
    if not (model / "config.json").is_file():
        raise ConfigError(f"`--baseline {baseline}`: {model} has no config.json")
    return msgspec.structs.replace(target, model=model.absolute(), run=None)


def _apply_overrides(base: Config, env: str | None, overrides: Overrides) -> Config:
    """Return the configuration for evaluation, with the overrides applied.

    Its `env` is what evaluation plays, except for sets that name their own. Overrides of `env`
    change it, as overrides of `evaluation.env` do. Another `env` has no sets.
    """
    data = config_to_dict(base, reveal=True)
    # An override may name its rows.
    played = base.evaluation.env if base.evaluation.env.name else base.env
    data["env"] = config_to_dict(played, reveal=True)
    if ROW_ARGUMENTS.intersection(nest_overrides(overrides).get("env", {}).get("args", {})):
        data["env"]["args"].pop("digest", None)
    data["evaluation"].pop("env", None)
    data["checkpoint"].pop("keep_best", None)  # nothing is trained
    if env is not None and env != data["env"]["name"]:
        data["evaluation"].pop("sets", None)
    if data["serving"]["token"] == REDACTED:  # no outside client is served here
        data["serving"] |= {"token": "", "host": "127.0.0.1"}
    if env is not None and env != data["env"]["name"]:
        data["env"] = {"name": env}  # arguments of one environment do not apply to another
    config = apply_overrides(config_from_dict(data), overrides, "eval")
    if not isinstance(overrides, Mapping):
        refuse_literal_secrets(config, overrides)
    return msgspec.structs.replace(config, env=resolve_evaluation_env(config, config.evaluation))


def make_policy_target(
    preset: str | None, env: str | None, overrides: Overrides
) -> EvaluationTarget:
    """Return the target for an environment's own policy: the defaults or a `preset`, with
    `overrides` on top."""
    return EvaluationTarget(
        None,
        _apply_overrides(load_config(preset, command=None) if preset else Config(), env, overrides),
    )


def choose_target(
    name: str | None,
    preset: str | None,
    env: str | None,
    overrides: Overrides,
    policy: str,
    root: Path,
) -> EvaluationTarget:
    """Return the target that the options name; a policy that needs no model needs no name."""
    if name is None and policy != "model":
        return make_policy_target(preset, env, overrides)
    return find_evaluation_target(name or "latest", preset, env, overrides, root)


def check_target(target: EvaluationTarget, policy: str) -> None:
    """Raise `ConfigError` for an environment that cannot be played, or not with this policy."""
    if policy == "model":
        assert target.model is not None
        _check_positions(target.model, target.config.episode.max_total_tokens)
    for env in target.environments.values():
        if env.name == OUTSIDE_AGENT:
            raise ConfigError(
                f'`env.name` = "{OUTSIDE_AGENT}" cannot be evaluated: name something that runs by '
                "itself, with --env"
            )
        if is_agent(env):
            make_agent(env)
            if policy != "model":
                raise ConfigError(
                    f"`--policy {policy}`: {env.name!r} is an agent, which asks a model; only "
                    "environments have policies"
                )
        elif target.trained_env is not None:
            refuse_shared_prompts(env, target.trained_env)


def check_evaluated_model(target: EvaluationTarget, policy: str) -> None:
    """Raise `ConfigError` for a model that cannot generate on this machine; see `preflight`."""
    if policy == "model":
        evaluated = msgspec.structs.replace(target.config.model, path=str(target.model))
        run_checks(StartRequest(msgspec.structs.replace(target.config, model=evaluated), "eval"))


def _check_positions(model: Path, tokens: int) -> None:
    described = decode_python_json((model / "config.json").read_bytes())
    positions = take_text_config(described).get("max_position_embeddings")
    if positions is not None and tokens > positions:
        raise ConfigError(
            f"`episode.max_total_tokens` = {tokens} is more than the {positions} positions of the "
            f"model: add episode.max_total_tokens={positions} "
            f"episode.max_prompt_tokens={positions // 2}"
        )


async def run_evaluation(
    target: EvaluationTarget,
    *,
    policy: Literal["model", "oracle", "random"] = "model",
    show_phase: Callable[[str], object] = lambda text: None,
    on_total: Callable[[int], object] = lambda episodes: None,
    on_outcome: Callable[[EpisodeOutcome], object] = lambda outcome: None,
    report_event: EventReporter = ignore_event,
    make_engine: Callable[[Config, str, int], Engine] = build_engine,
) -> Evaluation:
    """Play the target's tasks and return the result.

    `on_total` gets the number of episodes before the first is played.

    Raises `ConfigError` for what the user can fix beforehand, and `RunFailed` with the failure of
    an episode or the engine.
    """
    check_target(target, policy)
    config = target.config
    factories = {
        name: None if is_agent(env) else build_environment_factory(env)
        for name, env in target.environments.items()
    }
    if policy != "model":
        show_phase(f"evaluating the {policy} policy")
        on_total(await _count_episodes(target, factories))
        return join_sets(
            {
                name: await evaluate_without_model(
                    env,
                    factory,
                    policy,
                    config.evaluation.resolve_sets()[name],
                    trained_env=target.trained_env,
                    max_turns=config.episode.max_turns,
                    progress=on_outcome,
                )
                for name, env in target.environments.items()
                if (factory := factories[name]) is not None
            }
        )
    show_phase("loading the model")
    assert target.model is not None
    try:
        renderer = ChatRenderer.from_model(target.model, config.episode.template_args)
        engine = make_engine(config, str(target.model), config.seed)
    except (TemplateError, ValueError, OSError) as error:
        raise ConfigError(f"the model in {target.model} cannot be used: {error}") from error
    for factory in factories.values():
        if factory is not None:
            dropped = drop_long_prompts(factory, renderer, config.episode)
            if dropped:
                show_phase(
                    f"{dropped} prompts are longer than episode.max_prompt_tokens = "
                    f"{config.episode.max_prompt_tokens}, and left out"
                )
    made = {
        msgspec.json.encode(config_to_dict(env, reveal=True)): factories[name]
        for name, env in target.environments.items()
    }

    async def factory_of(env: EnvConfig) -> EnvironmentFactory | None:
        return made[msgspec.json.encode(config_to_dict(env, reveal=True))]

    try:
        on_total(await _count_episodes(target, factories))
        await engine.start()
        show_phase("evaluating")
        player = EvaluationPlayer(
            config,
            PlayContext(engine, renderer, "eval", report_event),
            make_factory=factory_of,
            trained_env=target.trained_env,
            progress=on_outcome,
        )
        return await player.play_sets()
    except Exception as error:
        while isinstance(error, ExceptionGroup):
            error = error.exceptions[0]
        if isinstance(error, ConfigError):
            raise error from None
        raise RunFailed(str(error)) from error
    finally:
        await asyncio.wait_for(engine.stop(), ENGINE_STOP_SECONDS)


async def _count_episodes(
    target: EvaluationTarget, factories: Mapping[str, EnvironmentFactory | None]
) -> int:
    """Return the number of episodes of all sets. Raises `ConfigError` if the run
    trained on their tasks."""
    sets = target.config.evaluation.resolve_sets()
    planned = [
        build_evaluation_tasks(
            env, await count_tasks(factories[name]), sets[name], target.trained_env
        )
        for name, env in target.environments.items()
    ]
    return sum(map(len, planned))


def save_result(target: EvaluationTarget, result: Evaluation) -> Path | None:
    """Write the result beside the checkpoints of the evaluated run, as
    `evaluation-model-1.json` and so on.

    Returns the path; None if there is no run or its directory cannot be written.
    """
    if target.run is None:
        return None
    directory = CheckpointDirectory.from_config(target.config, target.run).directory
    about = {
        "model": str(target.model),
        "time": REAL_WORLD.clock.time(),
        "evaluation": config_to_dict(target.config.evaluation),
        "env": {name: env.name for name, env in target.environments.items()},
        "result": msgspec.to_builtins(result),
    }
    try:
        make_directory(directory)
        number = 1
        while (path := directory / f"evaluation-model-{number}.json").exists():
            number += 1
        replace_file(path, msgspec.json.format(msgspec.json.encode(about)) + b"\n")
    except OSError:
        return None
    return path


def describe_result(result: Evaluation, name: str, envs: Mapping[str, EnvConfig]) -> list[str]:
    """Describe a result in readable lines.

    Args:
        envs: The environments of the sets, by name.
    """
    if not result.sets:
        return describe_set_result(result, name, next(iter(envs.values())).name)
    return [
        line
        for of, each in result.sets.items()
        for line in describe_set_result(each, f"{name}, {of},", envs[of].name)
    ]


def describe_set_result(result: Evaluation, name: str, env: str) -> list[str]:
    """Describe the result of one set in readable lines."""
    error = "" if result.reward_error is None else f" ± {result.reward_error:.4f}"
    lines = [
        f"{name} on {env}: mean reward {result.reward_mean:.4f}{error}  "
        f"({result.episodes} episodes, {result.reward_min:.3g} to {result.reward_max:.3g}, "
        f"{result.seconds:.1f} s)",
        f"  of an episode: {result.turns_mean:.2f} turns, {result.tokens_mean:.1f} sampled tokens",
    ]
    samples = max(int(k) for k in result.passes)
    low_high = _format_interval(result.reward_low, result.reward_high)
    lines.append(f"  avg@{samples} {result.reward_mean:.4f}{low_high}, over {result.tasks} tasks")
    for k, (estimate, low, high) in result.passes.items():
        lines.append(f"  pass@{k} {estimate:.4f}{_format_interval(low, high)}")
    for reason, (count, mean) in result.stop_reasons.items():
        lines.append(f"  ended by {reason:<10} {count:>5}  mean reward {mean:.4f}")
    return lines + [f"  mean {name} {mean:.4f}" for name, mean in result.metrics.items()]


def _format_interval(low: float | None, high: float | None) -> str:
    return "" if low is None or high is None else f"  (95 %: {low:.4f} to {high:.4f})"


class PairedDifference(msgspec.Struct, frozen=True):
    """The mean over tasks of how much more reward one model earns than another on the same task.

    Attributes:
        low: Lower end of the 95 % interval of the mean; None for a single task.
        high: Upper end of the interval.
        better: Number of tasks on which the first model earns more.
        worse: Number of tasks on which it earns less.
    """

    mean: float
    low: float | None
    high: float | None
    tasks: int
    better: int
    worse: int


def compare_results(result: Evaluation, baseline: Evaluation) -> dict[str, PairedDifference]:
    """Return the paired difference of each set of tasks by its name, which is empty if
    there is one set.

    Tasks that only one of the two has are left out: a prompt may be too long for one
    model's tokenizer.
    """
    compared = {}
    for name, each in (result.sets or {"": result}).items():
        other = (baseline.sets or {"": baseline})[name].rewards
        differences = [
            float(np.mean(each.rewards[task]) - np.mean(other[task]))
            for task in each.rewards
            if task in other
        ]
        if differences:
            mean, _, low, high = mean_interval(differences)
            better = sum(d > 0 for d in differences)
            worse = sum(d < 0 for d in differences)
            compared[name] = PairedDifference(mean, low, high, len(differences), better, worse)
    return compared


def describe_difference(difference: PairedDifference, name: str) -> str:
    """Describe a paired difference in one readable line."""
    interval = _format_interval(difference.low, difference.high)
    return (
        f"difference{f' on {name}' if name else ''}: {difference.mean:+.4f}{interval}, better on "
        f"{difference.better} and worse on {difference.worse} of {difference.tasks} tasks"
    )


def eval_command(
    target: str | None,
    env: str | None,
    overrides: Sequence[str],
    *,
    baseline: str | None,
    preset: str | None,
    tasks: int | None,
    seed: int | None,
    policy: Literal["model"] | BaselinePolicy,
    json: bool,
    root: Path,
) -> Evaluation:
    """Evaluate, with progress on stderr and the result on stdout.

    With `json`, one object is the last line. The result of a run's model is kept beside
    its checkpoints.

    Args:
        baseline: A model that plays the same tasks before, for the difference; see
            `make_baseline_target`.
    """
    if target is not None and "=" in target and not Path(target).exists():
        overrides = [target, *overrides]  # a setting, and no target
        target = None
    what = choose_target(target, preset, env, overrides, policy, root).with_tasks(tasks, seed)
    if baseline is not None and policy != "model":
        raise ConfigError(f"`--baseline` compares models, and `--policy {policy}` uses none")
    # The baseline comes first, since it is checked and refused before minutes are
    # spent on the other.
    targets = [] if baseline is None else [make_baseline_target(what, baseline, root)]
    results = [_play_with_progress(each, policy) for each in [*targets, what]]
    result = results[-1]
    out = SafeConsole()
    lines = []
    for each, played in zip([*targets, what], results, strict=True):
        name = each.model.name if each.model is not None and policy == "model" else policy
        if each is not what:
            name = f"baseline {each.model}"
        lines += describe_result(played, name, each.environments)
    differences = compare_results(result, results[0]) if targets else {}
    lines += [describe_difference(each, name) for name, each in differences.items()]
    if policy == "model":
        path = save_result(what, result)
        if path is not None:
            lines.append(f"kept as {path.resolve()}")  # runs/latest is another run soon
    for line in lines:
        out.print(line, markup=False, highlight=False, soft_wrap=True)
    if json:
        data: dict[str, Any] = msgspec.to_builtins(result)
        first = next(iter(what.environments.values())).name
        about: dict[str, Any] = {
            "model": str(what.model or ""),
            "env": first,
            "policy": policy,
            "seed": what.config.evaluation.seed,
        }
        if targets:
            about["baseline"] = {"model": str(targets[0].model), **msgspec.to_builtins(results[0])}
            about["differences"] = msgspec.to_builtins(differences)
        print(json_module.dumps({**about, **data}))
    return result


def _play_with_progress(
    target: EvaluationTarget, policy: Literal["model"] | BaselinePolicy
) -> Evaluation:
    check_evaluated_model(target, policy)
    bar = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=SafeConsole(stderr=True),
    )
    with bar:
        task = bar.add_task("starting", total=None)
        return run_on_shared_loop(
            run_evaluation(
                target,
                policy=policy,
                show_phase=lambda text: bar.update(task, description=text),
                on_total=lambda episodes: bar.update(task, total=episodes),
                on_outcome=lambda outcome: bar.advance(task),
                report_event=lambda event, /, **fields: bar.console.print(
                    event, fields, markup=False, highlight=False
                ),
            )
        )
