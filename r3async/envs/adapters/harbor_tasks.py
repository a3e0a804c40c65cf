"""`harbor:FOLDER`: tasks in the format of Harbor. The package `harbor` is not needed."""

from __future__ import annotations

import asyncio
import hashlib
import json
import math
import shlex
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from r3async.config import ConfigError, EnvConfig
from r3async.config.paths import resolve_user_path
from r3async.envs import Action, EnvironmentFactory, EnvironmentFailed, Message, StepResult
from r3async.envs.adapters.harbor_format import (
    HarborTask,
    PhaseTable,
    build_solution_command,
    format_exports,
    load_task,
    pack_folder,
    parse_rewards,
)
from r3async.envs.containers import (
    Container,
    SandboxContainer,
    build_image,
    fetch_image,
    find_docker_problem,
)
from r3async.envs.pool import filter_variables
from r3async.envs.sandbox import CommandLimits, CommandResult, can_confine
from r3async.envs.tool_call_parser import run_tool_calls
from r3async.world.processes import run_on_own_loop

BASH_TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "bash",
        "description": "Run a command. Returns its output and its exit code.",
        "parameters": {
            "type": "object",
            "properties": {"command": {"type": "string"}},
            "required": ["command"],
        },
    },
}
LOCAL_WORKDIR = "/app"
MAX_PROCESSES = 512
VERIFIER_SECONDS = 600.0
"""Time limit of tests for which a task sets none."""
OUR_SECONDS = 30.0
"""Time limit of a command of ours, and of ending one of the policy's."""
_AS_ROOT = PhaseTable(user=0)


class HarborConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The `env.args` of `harbor:FOLDER`.

    Attributes:
        images: False to play all tasks in the sandbox of this machine, whatever image they name.
        commands: Commands per task.
        seconds: Time limit of one command.
        system: System message.
    """

    images: bool = True
    commands: int = 32
    seconds: float = 60.0
    system: str = (
        "Work on the task with the tool bash. It is tested after your first answer without a call."
    )


class TaskPlaces:
    """The containers and sandboxes in which tasks are worked on.

    Each image is built or pulled once for all episodes of this process.
    """

    def __init__(self, use_images: bool):
        self._use_images = use_images
        self._image_tasks: dict[str, asyncio.Task[str]] = {}

    def needs_docker(self, task: HarborTask) -> bool:
        return self._use_images and (task.has_dockerfile or bool(task.environment.docker_image))

    def find_workdir(self, task: HarborTask) -> str:
        """Return the folder in which the commands of a task start; empty for that of its image."""
        return task.environment.workdir or ("" if self.needs_docker(task) else LOCAL_WORKDIR)

    async def open_place(self, task: HarborTask) -> Container | SandboxContainer:
        in_docker = self.needs_docker(task)
        workdir = self.find_workdir(task)
        storage = task.environment.storage_mb
        limits = CommandLimits(
            memory_mib=task.environment.memory_mb or CommandLimits().memory_mib,
            disk_mib=storage or CommandLimits().disk_mib,
            file_mib=storage or CommandLimits().disk_mib,
            processes=MAX_PROCESSES,
            network=in_docker and task.is_online,
        )
        place: Container | SandboxContainer
        if in_docker:
            place = await Container.start(await self._fetch_image(task), limits)
        else:
            place = await SandboxContainer.start(
                limits, [Path(workdir).parts[1], "tests", "logs", "solution"]
            )
        files = task.folder / "environment"
        if files.is_dir() and not (in_docker and task.has_dockerfile):
            try:
                workdir = workdir or (await place.run("pwd", OUR_SECONDS)).output.strip()
                await place.unpack(
                    await asyncio.to_thread(pack_folder, files, "Dockerfile"), workdir
                )
            except BaseException:
                await place.close()
                raise
        return place

    async def _fetch_image(self, task: HarborTask) -> str:
        waiting = self._image_tasks.get(task.path)
        if waiting is None or (waiting.done() and (waiting.cancelled() or waiting.exception())):
            tag = f"r3async-harbor-{hashlib.sha256(task.path.encode()).hexdigest()[:12]}"
            work = (
                fetch_image(task.environment.docker_image)
                if task.environment.docker_image
                else build_image(
                    task.folder / "environment", tag, task.environment.build_timeout_sec
                )
            )
            waiting = self._image_tasks[task.path] = asyncio.create_task(work)
        # Others wait for it, too, when one episode is cancelled.
        return await asyncio.shield(waiting)


class HarborEnvironment:
    """A task of Harbor, worked on by commands in a container of its image, or in a sandbox
    of this machine.

    The first answer without a call ends the episode: the task's tests run, as Harbor runs them, and
    write the reward. It is 0 if they write none, as Harbor counts it, or if they run out of time.
    The time limit of the agent is that of all commands together, so the speed of the model does not
    decide a reward.
    """

    tools = (BASH_TOOL,)

    def __init__(self, tasks: Sequence[HarborTask], places: TaskPlaces, settings: HarborConfig):
        self.size = len(tasks)
        self._tasks = tasks
        self._places = places
        self._settings = settings
        self._task = tasks[0]
        self._place: Container | SandboxContainer | None = None
        self._command_count = 0
        self._seconds_left = 0.0

    async def reset(self, task_seed: int) -> list[Message]:
        await self.close()
        task = self._task = self._tasks[task_seed % self.size]
        self._command_count = 0
        self._seconds_left = task.agent.timeout_sec or math.inf
        self._place = await self._places.open_place(task)
        system = [Message("system", self._settings.system)] if self._settings.system else []
        return [*system, Message("user", task.instruction)]

    async def step(self, action: Action) -> StepResult:
        left = self._settings.commands - self._command_count if self._seconds_left > 0 else 0
        results = await run_tool_calls(
            action.text,
            self.tools if left > 0 else (),
            self._call_tool,
            seconds=self._settings.seconds + OUR_SECONDS,
            max_calls=left,
            max_characters=2 * CommandLimits().output_bytes,
            thinking=action.thinking,
        )
        self._command_count += len(results)
        if results:
            return StepResult(0.0, results)
        reward, metrics = await self._run_tests()
        return StepResult(reward, done=True, metrics={"commands": self._command_count, **metrics})

    def oracle(self) -> str:
        """Return a call with the commands of the task's solution, then that it is done."""
        if self._command_count:
            return "Done."
        arguments = {"command": build_solution_command(self._task)}
        return f"<tool_call>{json.dumps({'name': 'bash', 'arguments': arguments})}</tool_call>"

    async def close(self) -> None:
        place = self._place
        self._place = None
        if place is not None:
            await place.close()

    async def _call_tool(self, name: str, arguments: dict[str, Any]) -> str:
        if name != "bash" or not isinstance(command := arguments.get("command"), str):
            raise ValueError("the only tool is bash, with a command")
        seconds = min(self._settings.seconds, self._seconds_left)
        if seconds <= 0:
            raise ValueError("the time of all commands is over")
        begun = time.monotonic()
        result = await self._run_command(command, seconds, self._task.agent)
        self._seconds_left -= time.monotonic() - begun
        return result.format_for_policy()

    async def _run_command(self, command: str, seconds: float, phase: PhaseTable) -> CommandResult:
        if self._place is None:
            raise EnvironmentFailed("an environment has to be reset before it is stepped")
        workdir = self._places.find_workdir(self._task)
        enter = f"cd {shlex.quote(workdir)} || exit 1; " if workdir else ""
        exports = format_exports({**self._task.environment.env, **phase.env})
        shell = f"{exports}{enter}exec bash -c {shlex.quote(command)}"
        return await self._place.run(shell, seconds, "" if phase.user is None else str(phase.user))

    async def _run_tests(self) -> tuple[float, dict[str, float]]:
        """Run the tests as they came with the task. Returns the reward, and the other
        rewards as metrics."""
        empty = (
            "rm -rf /logs/verifier; mkdir -p /tests -m 777 /logs/verifier && find /tests "
            "-mindepth 1 -delete"
        )
        await self._run_command(empty, OUR_SECONDS, _AS_ROOT)
        assert self._place is not None
        await self._place.unpack(
            await asyncio.to_thread(pack_folder, self._task.folder / "tests"), "/tests"
        )
        verifier = self._task.verifier
        run_tests = "/tests/test.sh > /logs/verifier/test-stdout.txt 2>&1"
        tested = await self._run_command(
            run_tests, verifier.timeout_sec or VERIFIER_SECONDS, verifier
        )
        read_rewards = (
            "cat /logs/verifier/reward.json 2> /dev/null || cat "
            "/logs/verifier/reward.txt 2> /dev/null"
        )
        written = (await self._run_command(read_rewards, OUR_SECONDS, _AS_ROOT)).output
        rewards = parse_rewards(written) if tested.exit_code is not None else {}
        if len(rewards) > 1 and "reward" not in rewards:
            raise EnvironmentFailed(
                f"{self._task.folder}: its tests wrote {', '.join(rewards)}, and no `reward`"
            )
        without = {"tests_without_reward": float(not rewards)}
        reward = rewards.pop("reward") if "reward" in rewards else sum(rewards.values())
        return reward, {**rewards, **without}


def make_harbor(target: str, config: EnvConfig) -> EnvironmentFactory:
    """Return a factory of the tasks in a folder. Raises `ConfigError` for wrong `env.args`, and for
    tasks that cannot be played on this machine, which it names."""
    try:
        settings = msgspec.convert(config.reveal_args(), HarborConfig)
    except msgspec.ValidationError as error:
        raise ConfigError(f"`env.args` of {config.name!r}: {error}") from error
    folders = sorted(path.parent for path in resolve_user_path(target).rglob("task.toml"))
    if not folders:
        raise ConfigError(f"`env.name` = {config.name!r}: no task.toml in {target} or below it")
    variables = filter_variables(config.variables)
    tasks = []
    problems = {}
    for folder in folders:
        try:
            tasks.append(load_task(folder, variables))
        except (OSError, ValueError) as error:
            problems[folder.name] = f" ({error})"
    places = TaskPlaces(settings.images)
    hint = "mend or remove them"
    if not problems:
        problems, hint = _find_place_problems(tasks, places)
    if problems:
        listed = ", ".join(f"{name}{why}" for name, why in list(problems.items())[:8]) + (
            ", …" if len(problems) > 8 else ""
        )
        raise ConfigError(
            f"`env.name` = {config.name!r}: {len(problems)} of its {len(folders)} tasks cannot "
            f"run: {listed}: {hint}"
        )
    return lambda: HarborEnvironment(tasks, places, settings)


def _find_place_problems(
    tasks: Sequence[HarborTask], places: TaskPlaces
) -> tuple[dict[str, str], str]:
    """Return the names of the tasks for which this machine has no place, each with a reason of its
    own, and what to do about it."""
    named = [task.folder.name for task in tasks if places.needs_docker(task)]
    if named:
        why = run_on_own_loop(find_docker_problem())
        if why:
            hint = (
                f"they need images, and there is no Docker ({why}): start it, or set "
                "`env.args.images` = false if they"
            )
            return dict.fromkeys(named, ""), f"{hint} need nothing that this machine lacks"
    local = {
        task.folder.name: places.find_workdir(task)
        for task in tasks
        if not places.needs_docker(task)
    }
    if local and not run_on_own_loop(can_confine()):
        hint = (
            "without an image they need namespaces, which this machine forbids: give them an "
            "image, and Docker"
        )
        return dict.fromkeys(local, ""), hint
    hint = "outside of a container a workdir is in a folder that this machine lacks, such as /app"
    return {
        name: f" (its workdir is {path})" for name, path in local.items() if not _is_new_top(path)
    }, hint


def _is_new_top(workdir: str) -> bool:
    """Return True if a workdir is in a top folder that this machine lacks, so that showing
    it hides nothing."""
    parts = Path(workdir).parts
    return (
        parts[:1] == ("/",)
        and len(parts) > 1
        and (parts[1] == "app" or not Path("/", parts[1]).exists())
    )
