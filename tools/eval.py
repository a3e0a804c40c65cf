"""`r3async eval`: play fixed tasks with a model, or with an environment's own policies, without Ray and without training."""

from __future__ import annotations

import asyncio
import json as json_module
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import msgspec
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from r3async.actors.process import RunFailed
from r3async.config import HIDDEN, Config, ConfigError, EnvConfig, config_from_dict, load_config, to_dict
from r3async.config.read import Overrides, nested, refuse_spoken, with_overrides
from r3async.envs.factory import environment_factory
from r3async.rollout.agents.agents import OUTSIDE, is_agent, make_agent
from r3async.rollout.chat import ChatRenderer, TemplateError
from r3async.rollout.engines import Engine, build_engine
from r3async.rollout.evaluation import (
    Evaluation,
    Outcome,
    Policy,
    drop_long_prompts,
    evaluate,
    evaluate_without_model,
    evaluated,
)
from r3async.tools.terminal import Terminal

STOP_SECONDS = 30.0


class Target(msgspec.Struct, frozen=True):
    """What to evaluate. `model` is a directory, or None where a policy plays that needs none; `config` says how to play, and its
    `env` what; `trained` is the environment that the run trained, if a run is evaluated."""

    model: Path | None
    config: Config
    trained: EnvConfig | None = None


def find_target(
    name: str, preset: str | None, env: str | None, overrides: Overrides, root: Path = Path("runs")
) -> Target:
    """A model directory, or a run, whose newest model it is and whose configuration counts, with the environment of its
    `[evaluation]`; `overrides` over that.

    A model directory is played with the defaults, or with a `preset`. Raises `ConfigError` for what is neither.
    """
    from r3async.tools.inspect.run import InspectError, find_run

    if (Path(name) / "config.json").is_file():
        if env is None and preset is None and "name" not in nested(overrides).get("env", {}):
            raise ConfigError(f"{name} is a model: say which environment it is to play, with --env NAME")
        model, base, trained = Path(name), load_config(preset) if preset else Config(), None
    else:
        try:
            run = find_run(name, root)
        except InspectError as error:
            raise ConfigError(
                f"RUN_OR_MODEL = {name!r} is no model directory (no config.json in it), and {error}"
            ) from error
        base = load_config(preset or str(run / "config.toml"))
        made = [run / "model", Path(base.model.path) if base.model.path else run / "init"]
        found = next((path for path in made if (path / "config.json").is_file()), None)
        if found is None:
            raise ConfigError(f"{run} has no model yet: neither {made[0]} nor {made[1]} has a config.json")
        model, trained = found, base.env
    return Target(model.absolute(), _override(base, env, overrides), trained)


def _override(base: Config, env: str | None, overrides: Overrides) -> Config:
    """`env` of what is returned is what evaluation plays; overrides of `env` change that, as overrides of `evaluation.env` do."""
    data = to_dict(base, reveal=True)
    data["env"] = to_dict(evaluated(base), reveal=True)
    data["evaluation"].pop("env", None)
    if data["serving"]["token"] == HIDDEN:  # nobody from outside is served here
        data["serving"] |= {"token": "", "host": "127.0.0.1"}
    if env is not None and env != data["env"]["name"]:
        data["env"] = {"name": env}  # arguments of another environment are not this one's
    config = with_overrides(config_from_dict(data), overrides)
    if not isinstance(overrides, Mapping):
        refuse_spoken(config, overrides)
    return msgspec.structs.replace(config, env=evaluated(config))


def without_model(preset: str | None, env: str | None, overrides: Overrides) -> Target:
    """What an environment's own policy plays: the defaults', or a `preset`'s, with `overrides` over that."""
    return Target(None, _override(load_config(preset) if preset else Config(), env, overrides))


def choose_target(
    name: str | None, preset: str | None, env: str | None, overrides: Overrides, policy: str, root: Path
) -> Target:
    """Of a policy that needs no model, nothing has to be named."""
    if name is None and policy != "model":
        return without_model(preset, env, overrides)
    return find_target(name or "latest", preset, env, overrides, root)


def check_target(target: Target, policy: str) -> None:
    """Raise `ConfigError` for an environment that cannot be played, or not so."""
    env, episode = target.config.env, target.config.episode
    if policy == "model":
        assert target.model is not None
        _check_positions(target.model, episode.max_total_tokens)
    if env.name == OUTSIDE:
        raise ConfigError(
            f'`env.name` = "{OUTSIDE}" cannot be evaluated: name something that plays by itself, with --env'
        )
    if is_agent(env):
        make_agent(env)
        if policy != "model":
            raise ConfigError(
                f"`--policy {policy}`: {env.name!r} is an agent, which asks a model; only environments have policies"
            )


def _check_positions(model: Path, tokens: int) -> None:
    positions = json_module.loads((model / "config.json").read_text()).get("max_position_embeddings")
    if positions is not None and tokens > positions:
        raise ConfigError(
            f"`episode.max_total_tokens` = {tokens} is more than the {positions} positions of the model: add "
            f"episode.max_total_tokens={positions} episode.max_prompt_tokens={positions // 2}"
        )


async def run_evaluation(
    target: Target,
    *,
    episodes: int,
    seed: int,
    policy: Literal["model", "oracle", "random"] = "model",
    phase: Callable[[str], object] = lambda text: None,
    progress: Callable[[Outcome], object] = lambda outcome: None,
    report: Callable[..., object] = lambda event, **fields: None,
    make_engine: Callable[[Config, str, int], Engine] = build_engine,
) -> Evaluation:
    """Raises `ConfigError` for what can be mended beforehand, and `RunFailed` with what an episode or the engine failed with."""
    check_target(target, policy)
    config = target.config
    factory = None if is_agent(config.env) else environment_factory(config.env)
    if policy != "model":
        assert factory is not None
        phase(f"playing the {policy} policy")
        return await evaluate_without_model(
            config.env,
            factory,
            policy,
            episodes=episodes,
            seed=seed,
            trained=target.trained,
            max_turns=config.episode.max_turns,
            progress=progress,
        )
    phase("loading the model")
    assert target.model is not None
    try:
        renderer = ChatRenderer.from_model(target.model, config.episode.template_args)
        engine = make_engine(config, str(target.model), config.seed)
    except (TemplateError, ValueError, OSError) as error:
        raise ConfigError(f"the model in {target.model} cannot be used: {error}") from error
    if factory is not None and (dropped := drop_long_prompts(factory, renderer, config.episode)):
        phase(
            f"{dropped} prompts are longer than episode.max_prompt_tokens = {config.episode.max_prompt_tokens}, and not posed"
        )
    try:
        await engine.start()
        phase("playing")
        return await evaluate(
            config.env,
            factory,
            engine,
            renderer,
            config.episode,
            config.serving,
            episodes=episodes,
            seed=seed,
            trained=target.trained,
            concurrency=config.generator.concurrency,
            generator_id="eval",
            report=report,
            progress=progress,
        )
    except Exception as error:
        while isinstance(error, ExceptionGroup):
            error = error.exceptions[0]
        if isinstance(error, ConfigError):
            raise error from None
        raise RunFailed(str(error)) from error
    finally:
        await asyncio.wait_for(engine.stop(), STOP_SECONDS)


def describe(result: Evaluation, name: str, env: EnvConfig) -> list[str]:
    """Lines for a person."""
    error = "" if result.reward_error is None else f" ± {result.reward_error:.4f}"
    lines = [
        f"{name} on {env.name}: mean reward {result.reward_mean:.4f}{error}  "
        f"({result.episodes} episodes, {result.reward_min:.3g} to {result.reward_max:.3g}, {result.seconds:.1f} s)",
        f"  of an episode: {result.turns_mean:.2f} turns, {result.tokens_mean:.1f} sampled tokens",
    ]
    for reason, (count, mean) in result.stop_reasons.items():
        lines.append(f"  ended by {reason:<10} {count:>5}  mean reward {mean:.4f}")
    return lines + [f"  mean {name} {mean:.4f}" for name, mean in result.metrics.items()]


def eval_command(
    target: str | None,
    env: str | None,
    overrides: Sequence[str],
    *,
    preset: str | None,
    episodes: int,
    seed: int | None,
    policy: Literal["model"] | Policy,
    json: bool,
    root: Path = Path("runs"),
) -> Evaluation:
    """Progress on stderr, the result on stdout; with `json`, one object as its last line."""
    if episodes < 1:
        raise ConfigError(f"`--episodes` must be at least 1, got {episodes}")
    if seed is not None and seed < 0:
        raise ConfigError(f"`--seed` must be 0 or more, got {seed}")
    if target is not None and "=" in target and not Path(target).exists():
        overrides, target = [target, *overrides], None  # a setting, and no target
    what = choose_target(target, preset, env, overrides, policy, root)
    if seed is None:
        seed = what.config.evaluation.seed
    screen = Terminal(stderr=True)
    bar = Progress(
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), console=screen
    )
    with bar:
        task = bar.add_task("starting", total=episodes)
        result = asyncio.run(
            run_evaluation(
                what,
                episodes=episodes,
                seed=seed,
                policy=policy,
                phase=lambda text: bar.update(task, description=text),
                progress=lambda outcome: bar.advance(task),
                report=lambda event, **fields: bar.console.print(event, fields, markup=False, highlight=False),
            )
        )
    out = Terminal()
    name = what.model.name if what.model is not None and policy == "model" else policy
    for line in describe(result, name, what.config.env):
        out.print(line, markup=False, highlight=False, soft_wrap=True)
    if json:
        data: dict[str, Any] = msgspec.to_builtins(result)
        about = {"model": str(what.model or ""), "env": what.config.env.name, "policy": policy, "seed": seed}
        print(json_module.dumps({**about, **data}))
    return result
