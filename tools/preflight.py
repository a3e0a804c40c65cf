"""The checks before a start, in one list: a dry run, `submit` and the start itself make the same
ones in the same order.

So what a dry run lets through, the start does not refuse, and the reverse. A check that needs what
is not there (the model on the machine that submits, a GPU, permission to import code) is skipped,
and a note names it.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple

import msgspec

from r3async.config import Config, ConfigError, EnvConfig, check_policy_loss, resolve_envs
from r3async.data.model_shape import ModelShape
from r3async.envs import (
    Action,
    EnvironmentProtocolError,
    HasOracle,
    refuse_repeated_messages,
)
from r3async.envs.errors import summarize_error
from r3async.envs.factory import build_environment_factory
from r3async.envs.mix import add_default_evaluation_sets
from r3async.envs.returned import coerce_messages, require_step_result
from r3async.envs.task_splits import is_dataset
from r3async.record.sinks import check_sinks
from r3async.rollout.agents import is_agent
from r3async.rollout.episode import close_environment
from r3async.rollout.evaluation import check_environment
from r3async.world.processes import run_on_shared_loop

from .hub import resolve_hub_model
from .local_cache import check_once
from .machine_checks import (
    check_addresses,
    check_cluster_address,
    check_devices,
    check_head_size,
    has_gpu,
)
from .memory import GPU_PARAMETERS, check_router_settings, check_trainable, find_model_shape
from .model_checks import (
    check_buildable,
    check_engine_config,
    check_model_directory,
    check_model_files,
    check_model_kind,
    check_planned_adapters,
    check_teacher,
    check_tokenizer,
    read_evaluated_shape,
)
from .plan import RunPlan, make_run_plan
from .plan_checks import check_gpu_memory, check_message_size, check_positions, check_routes
from .rows import add_row_digests
from .run_dir import check_disk_space, check_named_run
from .user_code import describe_code, find_named_code

if TYPE_CHECKING:
    from .sft_data import SupervisedRows

ENVIRONMENT_TRY_SECONDS = 10.0
"""Seconds for the trial of an environment. One that takes longer is not judged."""

Command = Literal["train", "sft", "eval", "tinker"]
Need = Literal["model", "teacher", "code", "machine", "devices"]
NEEDS: dict[Need, str] = {
    "model": "the model's files",
    "teacher": "the teacher's files",
    "code": "leave to import the user's code",
    "machine": "the machine that runs the command",
    "devices": "the machine with the run's devices",
}
"""What a check may need, in words."""


@dataclass
class StartRequest:
    """A command that is about to start, or whose start is only checked.

    Attributes:
        config: The settings. The check of the rows adds their digest.
        runs: Directory of the runs.
        is_dry: Nothing starts on this machine: the model may be absent.
        made_elsewhere: Other machines make the run, as after `submit`.
        import_code: Import the code that `config` names. Otherwise it is left alone;
            see `user_code`.
        notes: Lines for the user: what was found in the rows, and the names of skipped checks.
        supervised_rows: The rows of `sft`, which its check has read.
    """

    config: Config
    command: Command = "train"
    runs: Path = Path("runs")
    is_dry: bool = False
    made_elsewhere: bool = False
    import_code: bool = True
    notes: list[str] = field(default_factory=list)
    supervised_rows: SupervisedRows | None = None

    @cached_property
    def shape(self) -> ModelShape:
        """The model's shape. Raises `ConfigError` if its numbers are unknown."""
        return find_model_shape(self.config)[0]

    @cached_property
    def plan(self) -> RunPlan:
        """The run's plan. Raises `ConfigError` if its processes cannot be placed."""
        return make_run_plan(self.config)

    @property
    def cluster_address(self) -> str:
        return self.config.cluster.address or os.environ.get("RAY_ADDRESS", "")

    def find_obstacle(self, need: Need) -> str:
        """Return why checks with this need are skipped; "" if they are not."""
        model = self.config.model.path
        distillation = self.config.algorithm.distillation
        teacher = "" if distillation.is_served else distillation.teacher
        if need == "model" and self.is_dry and model and not Path(model).exists():
            return f"`model.path` = {model!r} is not on this machine"
        if need == "teacher" and self.is_dry and teacher and not Path(teacher).exists():
            return f"`algorithm.distillation.teacher` = {teacher!r} is not on this machine"
        if need == "code" and self.command == "train" and not self.import_code:
            code = find_named_code(self.config)
            return f"{describe_code(code)}. It was not imported" if code else ""
        if need == "machine" and self.made_elsewhere:
            return "the cluster makes the run"
        if need == "devices" and (self.made_elsewhere or self.cluster_address):
            return "the cluster's hosts have the devices"
        if (
            need == "devices"
            and self.is_dry
            and not has_gpu()
            and self.shape.num_parameters > GPU_PARAMETERS
        ):
            return "this machine has no GPU, for which the run is planned"
        return ""


class StartCheck(NamedTuple):
    """A check of a start. `refuse` raises `ConfigError`, naming the setting and the fix."""

    name: str
    refuse: Callable[[StartRequest], object]
    needs: tuple[Need, ...] = ()
    commands: tuple[Command, ...] = ("train",)


BOTH: tuple[Command, ...] = ("train", "sft")
LEARN: tuple[Command, ...] = (*BOTH, "tinker")
PLAY: tuple[Command, ...] = ("train", "eval", "tinker")
ALL: tuple[Command, ...] = (*LEARN, "eval")

START_CHECKS = (
    StartCheck("runs directory", lambda start: check_disk_space(start.runs), ("machine",), LEARN),
    StartCheck(
        "resumed checkpoint", lambda start: _check_resume_path(start.config), ("machine",), BOTH
    ),
    StartCheck("sinks", lambda start: check_sinks(start.config.log), ("machine",), BOTH),
    StartCheck(
        "cluster address",
        lambda start: check_cluster_address(start.cluster_address),
        ("machine",),
        LEARN,
    ),
    StartCheck("learner", lambda start: _check_learner(start.config, start.command), (), BOTH),
    StartCheck(
        "model files",
        lambda start: _check_model_files(start.config, start.command),
        ("model",),
        ALL,
    ),
    StartCheck(
        "evaluated model", lambda start: _check_evaluated_model(start.config), (), ("eval",)
    ),
    StartCheck("model type", lambda start: _check_model_type(start.config), ("model",), LEARN),
    StartCheck("model sizes", lambda start: start.shape, (), LEARN),
    StartCheck(
        "parallel layout",
        lambda start: check_trainable(start.shape, start.config.learner),
        (),
        LEARN,
    ),
    StartCheck("router settings", lambda start: check_router_settings(start.shape, start.config)),
    StartCheck("routes", lambda start: check_routes(start.config, start.shape)),
    StartCheck("positions", lambda start: check_positions(start.config, start.shape), (), LEARN),
    StartCheck("head size", lambda start: _check_head_size(start), (), ("train", "tinker")),
    StartCheck("teacher", lambda start: check_teacher(start.config), ("model", "teacher")),
    StartCheck("placement", lambda start: start.plan),
    StartCheck("message size", lambda start: check_message_size(start.config, start.plan)),
    StartCheck("GPU memory", lambda start: check_gpu_memory(start.config, start.shape, start.plan)),
    StartCheck("engine's model", lambda start: _check_engine_model(start), ("model",), PLAY),
    StartCheck("adapters", lambda start: _check_adapters(start), (), LEARN),
    StartCheck("devices", lambda start: check_devices(start.config, start.shape), ("devices",)),
    StartCheck("addresses", lambda start: check_addresses(start.config), ("devices",)),
    StartCheck("tensors", lambda start: _check_tensors(start.config), ("model",), LEARN),
    StartCheck(
        "tokenizer",
        lambda start: check_once(check_tokenizer, start.config),
        ("model",),
        (*BOTH, "eval"),
    ),
    StartCheck("policy loss", lambda start: _check_policy_loss(start.config), ("code",)),
    StartCheck("advantage", lambda start: _check_advantage(start.config), ("code",)),
    StartCheck("environment", lambda start: check_environment(start.config), ("code",)),
    StartCheck("rows", lambda start: _check_rows(start), ("code",), BOTH),
    StartCheck("first episode", lambda start: _check_first_episode(start), ("code",)),
    StartCheck(
        "earlier run",
        lambda start: check_named_run(start.config, start.runs),
        ("machine", "code"),
        BOTH,
    ),
)
"""All checks, in order: first the quick ones. docs/operations.md has their table."""


def check_start(
    config: Config, runs: Path = Path("runs"), command: Command = "train"
) -> StartRequest:
    """Make all checks of a start on this machine, and return the checked request.

    Raises `ConfigError` with the setting and the fix.
    """
    start = StartRequest(config, command, runs)
    run_checks(start)
    return start


def check_dry_run(
    config: Config,
    *,
    command: Command = "train",
    runs: Path = Path("runs"),
    import_code: bool = True,
    made_elsewhere: bool = False,
) -> StartRequest:
    """Make the checks of a start that does not follow, as far as this machine can, and return the
    checked request.

    Its notes name the skipped checks. Raises `ConfigError` with the setting and the fix.
    """
    config = resolve_hub_model(add_default_evaluation_sets(config), download=False)
    start = StartRequest(config, command, runs, True, made_elsewhere, import_code)
    run_checks(start)
    return start


def make_checked_plan(
    config: Config,
    import_code: bool = True,
    *,
    runs: Path = Path("runs"),
    made_elsewhere: bool = False,
) -> RunPlan:
    """Plan a run that could start. Raises like `check_dry_run`, whose notes are the
    first of the plan."""
    start = check_dry_run(config, runs=runs, import_code=import_code, made_elsewhere=made_elsewhere)
    return msgspec.structs.replace(start.plan, notes=[*start.notes, *start.plan.notes])


def run_checks(start: StartRequest) -> None:
    """Make the checks of `START_CHECKS` for this command; the first failure
    raises `ConfigError`."""
    skipped: dict[str, list[str]] = {}
    for check in START_CHECKS:
        if start.command not in check.commands:
            continue
        reasons = [reason for need in check.needs if (reason := start.find_obstacle(need))]
        if reasons:
            skipped.setdefault(reasons[0], []).append(check.name)
        else:
            check.refuse(start)
    start.notes += [
        f"not checked: {', '.join(names)} ({reason})" for reason, names in skipped.items()
    ]


def _check_resume_path(config: Config) -> None:
    if config.resume not in ("auto", "none") and not Path(config.resume).exists():
        raise ConfigError(
            f"`resume` = {config.resume!r}: there is no such checkpoint, and no run "
            "with checkpoints"
        )


def _check_learner(config: Config, command: Command) -> None:
    if command == "sft" and config.learner.backend == "scripted":
        raise ConfigError('`learner.backend` = "scripted" has no model that could learn')


def _check_model_files(config: Config, command: Command) -> None:
    if command == "tinker":  # clients render messages themselves
        check_model_files(config.model.path, "model.path")
    elif config.model.path:
        check_model_directory(config.model.path)
    elif command == "sft":
        raise ConfigError(
            "`model.path` is empty: name the model that is to learn, a directory with "
            "config.json in it"
        )


def _check_evaluated_model(config: Config) -> None:
    shape = read_evaluated_shape(Path(config.model.path))
    if shape is not None:
        check_head_size(config, shape, on_cpu=not has_gpu())


def _check_model_type(config: Config) -> None:
    if config.model.path:
        check_model_kind(config)


def _check_head_size(start: StartRequest) -> None:
    check_head_size(start.config, start.shape, on_cpu=_has_cpu_engines(start))


def _has_cpu_engines(start: StartRequest) -> bool:
    """Return True if the engines certainly have no GPU."""
    if start.command == "eval":
        return not has_gpu()
    return not start.find_obstacle("devices") and not has_gpu()


def _check_adapters(start: StartRequest) -> None:
    if not Path(
        start.config.model.path or "-"
    ).exists():  # the tensors of a model that is here are looked at themselves
        check_planned_adapters(start.config, start.shape)


def _check_engine_model(start: StartRequest) -> None:
    if start.config.model.path:
        check_engine_config(start.config, on_cpu=_has_cpu_engines(start))


def _check_tensors(config: Config) -> None:
    if config.model.path:
        check_once(check_buildable, config)


def _check_policy_loss(config: Config) -> None:
    check_policy_loss(config.algorithm)
    if ":" in config.algorithm.policy_loss:
        from r3async.learner.policy_loss import check_custom_loss

        check_custom_loss(config.algorithm)


def _check_advantage(config: Config) -> None:
    if ":" in config.algorithm.advantage:
        from r3async.learner.advantages import check_custom_advantage

        check_custom_advantage(config.algorithm)


def _check_rows(start: StartRequest) -> None:
    if start.command == "train":
        start.config = add_row_digests(start.config, start.notes.append)
        return
    from .sft_data import SupervisedRows

    start.supervised_rows = SupervisedRows.from_config(start.config, start.notes.append)
    start.config = start.supervised_rows.update_config(start.config)


# -- the environment -------------------------------------------------------------------------------


def _check_first_episode(start: StartRequest) -> None:
    start.notes += run_on_shared_loop(try_environments(start.config))


async def try_environments(config: Config) -> list[str]:
    """Play one turn of each environment with the best answer it knows, or an empty one
    if it knows none, and return notes for the user.

    The best answer to a row is the row's own. Raises `ConfigError` if the environment breaks the
    protocol (a `step` that returns a tuple, a reward that is a text, None or not finite,
    `sys.exit`), or if it fails with its own best answer. Time-outs, connection errors, and errors
    with an empty answer are not judged: an empty answer may not be a valid one.
    """
    notes = []
    for each in resolve_envs(config):
        if not is_agent(each.env):
            notes += await _try_environment(each.env)
    return notes


async def _try_environment(env: EnvConfig) -> list[str]:
    environment = build_environment_factory(env)()
    answer = ""
    said = "`reward`" if is_dataset(env) else f"`env.name` = {env.name!r}"
    try:
        async with asyncio.timeout(ENVIRONMENT_TRY_SECONDS):
            told = coerce_messages(await environment.reset(0), "reset()")
            answer = environment.oracle() if isinstance(environment, HasOracle) else ""
            result = require_step_result(await environment.step(Action(answer)))
            if not (result.done or result.rewrites):
                refuse_repeated_messages(
                    told, coerce_messages(result.messages, "StepResult.messages")
                )
    except (Exception, SystemExit) as error:
        raised = summarize_error(error)
        if isinstance(error, EnvironmentProtocolError | SystemExit):
            where = (
                "on the first row that it was given" if is_dataset(env) else "in its first episode"
            )
            raise ConfigError(f"{said} failed {where}: {raised.line}") from error
        if answer and not raised.passing:
            whose = "a row's own answer" if is_dataset(env) else "its own best answer"
            raise ConfigError(
                f"{said} fails with {whose}, {answer!r:.80}: {raised.line}"
            ) from error
        return []
    finally:
        with contextlib.suppress(Exception):
            await close_environment(environment)
    if is_dataset(env) and answer and result.reward == 0:
        return [f"`reward` gives a row's own answer, {answer!r:.80}, 0"]
    return []
