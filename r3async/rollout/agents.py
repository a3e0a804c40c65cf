"""Agents that play episodes in place of an environment: a Python function, a command, or
an outside client.

`env.name = "agent:module:function"` calls `function(base_url, api_key, task_seed, **env.args)` once
per episode, in a separate thread if it is not `async`; its return value, if any, is the reward.
`env.name = "agent-command"` runs `env.args.command` once per episode. `env.name = "agent-outside"`
waits until a client with the token requests an episode.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import os
import re
import shutil
import sys
import threading
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from r3async.config import ConfigError, EnvConfig, Secret, did_you_mean, reveal_secrets
from r3async.config.user_code import import_object
from r3async.data.tokens import Trajectory
from r3async.envs.pool import filter_variables
from r3async.rollout.endpoint.session import AgentSession
from r3async.rollout.episode import EpisodeError, EpisodeTask
from r3async.untrusted import MalformedError, decode_json_object
from r3async.world.kept_programs import KeptProgram

if TYPE_CHECKING:
    from r3async.rollout.endpoint.server import AgentServer


FUNCTION_AGENT_PREFIX = "agent:"
COMMAND_AGENT = "agent-command"
OUTSIDE_AGENT = "agent-outside"
AGENT_NAMES = (COMMAND_AGENT, OUTSIDE_AGENT)
OUTPUT_TAIL_BYTES = 16_384
TERMINATION_SECONDS = 5.0
"""Seconds that processes have to end after SIGTERM, before they are killed."""
PIPE_CAPACITY_BYTES = 2**20
"""Bytes that a pipe holds at most."""

PlayEpisode = Callable[[EpisodeTask], Awaitable[Trajectory]]
PlayAgent = Callable[["AgentServer", AgentSession], Awaitable[float | None]]
"""Coroutine function that plays one episode and returns its reward, or None if it
does not know it."""


def is_agent(env: EnvConfig) -> bool:
    """Return True if `env.name` names an agent and not an environment."""
    return env.name.startswith("agent-") or env.name.startswith(FUNCTION_AGENT_PREFIX)


def make_agent(env: EnvConfig) -> PlayAgent:
    """Return the agent that plays `env`'s episodes. Raises `ConfigError` for an unknown name or
    wrong `env.args`."""
    if env.name.startswith(FUNCTION_AGENT_PREFIX):
        return FunctionAgent(env)
    if env.name == COMMAND_AGENT:
        return CommandAgent(**_parse_command_args(env.args), variables=env.variables)
    if env.name == OUTSIDE_AGENT:
        if env.args:
            raise ConfigError(f"`env.args` = {env.args}: agent-outside takes none")
        return play_outside
    hint = did_you_mean(
        env.name, AGENT_NAMES, f"there are agent:module:function, {', '.join(AGENT_NAMES)}"
    )
    raise ConfigError(f"`env.name` = {env.name!r}: no such agent; {hint}")


class FunctionAgent:
    """A user's function that knows nothing of r3async.

    A call raises `EpisodeError` if the function exits the interpreter, and otherwise whatever the
    function raises.
    """

    def __init__(self, env_config: EnvConfig):
        name = env_config.name
        args = env_config.args
        path = name.removeprefix(FUNCTION_AGENT_PREFIX)
        if ":" not in path:
            raise ConfigError(f"`env.name` = {name!r} must be agent:module:function")
        try:
            self._function = import_object(path)
            inspect.signature(self._function).bind(base_url="", api_key="", task_seed=0, **args)
        except (ImportError, AttributeError, ValueError) as error:
            raise ConfigError(f"`env.name` = {name!r} cannot be loaded: {error}") from error
        except TypeError as error:
            raise ConfigError(
                f"`env.name` = {name!r} is called with base_url, api_key, task_seed and "
                f"`env.args`: {error}"
            ) from error
        self._env_config = env_config

    async def __call__(self, server: AgentServer, session: AgentSession) -> float | None:
        arguments = {
            "base_url": server.base_url,
            "api_key": session.key,
            "task_seed": session.task.task_seed,
            **self._env_config.reveal_args(),
        }
        if inspect.iscoroutinefunction(self._function):
            try:
                return await self._function(**arguments)
            except SystemExit as error:  # it would end this process, and every episode in it
                raise EpisodeError(
                    f"the agent of {session.task.trajectory_id} ended with {error!r}"
                ) from error
        return await run_in_thread(
            lambda: self._function(**arguments), name=session.task.trajectory_id
        )


async def run_in_thread(work: Callable[[], Any], name: str) -> Any:
    """Run `work()` in a new thread and return its result.

    A blocked agent cannot be interrupted: if this call is cancelled, the thread goes on and
    nobody waits for it.
    """
    loop = asyncio.get_running_loop()
    done: asyncio.Future[Any] = loop.create_future()

    def resolve_future(method: Callable[[Any], None], value: Any) -> None:
        def set_unless_done() -> None:
            if not done.done():
                method(value)

        with contextlib.suppress(RuntimeError):  # the loop has ended, and nobody waits
            loop.call_soon_threadsafe(set_unless_done)

    def run() -> None:
        try:
            result = work()
        except (SystemExit, KeyboardInterrupt, StopIteration) as error:
            ended = EpisodeError(f"the agent of {name} ended with {error!r}")
            ended.__cause__ = error
            resolve_future(done.set_exception, ended)
        except BaseException as error:
            resolve_future(done.set_exception, error)
        else:
            resolve_future(done.set_result, result)

    threading.Thread(target=run, name=f"agent-{name}", daemon=True).start()
    return await done


def _parse_command_args(args: Mapping[str, Any]) -> dict[str, Any]:
    unknown = set(args) - {"command", "directory", "environment"}
    command = args.get("command")
    if unknown:
        raise ConfigError(
            f"`env.args.{min(unknown)}`: agent-command takes `command`, and may take `directory` "
            "and `environment`"
        )
    if (
        not isinstance(command, list)
        or not command
        or not all(isinstance(word, str | Secret) for word in command)
    ):
        raise ConfigError(
            f"`env.args.command` = {command!r} must be a list of words, for example "
            '["python", "agent.py"]'
        )
    if shutil.which(str(command[0]), path=_build_search_path()) is None:
        raise ConfigError(f"`env.args.command`: there is no program {command[0]!r}")
    directory = args.get("directory", "")
    if directory and not Path(directory).is_dir():
        raise ConfigError(f"`env.args.directory` = {directory!r} is not a directory")
    script = _find_script(command)
    if script and not (Path(directory) / script).is_file():
        raise ConfigError(
            f"`env.args.command`: there is no file {script!r} in {directory or os.getcwd()!r}; "
            "`env.args.directory` is where the command runs"
        )
    environment = args.get("environment", {})
    if not isinstance(environment, Mapping) or not all(
        isinstance(v, Secret) for v in environment.values()
    ):
        raise ConfigError("`env.args.environment` must be a table of texts")
    return {"command": command, "directory": directory, "environment": environment}


def _find_script(command: Sequence[str | Secret]) -> str:
    """Return the script that an interpreter of Python is to run; empty if that is not clear."""
    words = [str(word) for word in command[:2]]
    is_python = re.fullmatch(r"python[\d.]*", Path(words[0]).name)
    return words[1] if is_python and len(words) > 1 and words[1].endswith(".py") else ""


def _build_search_path() -> str:
    """Return PATH behind the running interpreter's directory, so that `python` is the one that
    has our packages."""
    return os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])


class CommandAgent:
    """A program that is run once per episode.

    Its environment has OPENAI_BASE_URL, OPENAI_API_KEY, the same for ANTHROPIC, and
    R3ASYNC_TASK_SEED, besides `environment` and the variables of this process that
    `filter_variables(variables)` lets through.

    The reward is the last line of its output, if that is `{"reward": x}`. A call raises
    `EpisodeError` with the end of the program's stderr if it exits with a code other than 0. When
    the program exits, and when the call is cancelled, all processes that it started are ended.
    """

    def __init__(
        self,
        command: Sequence[str | Secret],
        directory: str = "",
        environment: Mapping[str, Secret] | None = None,
        variables: Sequence[str] = (),
    ):
        self._command = list(command)
        self._directory = directory or None
        self._inherited_variables = list(variables)
        self._extra_environment = dict(environment or {})

    async def __call__(self, server: AgentServer, session: AgentSession) -> float | None:
        first, *words = reveal_secrets(self._command, "env.args.command")
        program = shutil.which(first, path=_build_search_path()) or first
        with (
            contextlib.closing(_OutputTail()) as output,
            contextlib.closing(_OutputTail()) as errors,
        ):
            running = KeptProgram(
                [program, *words],
                grace=TERMINATION_SECONDS,
                cwd=self._directory,
                env=self._build_environment(server, session),
                stdout=output.write_fd,
                stderr=errors.write_fd,
            )
            try:
                code = await running.wait_async()
                # Read before the program's other processes are terminated, which may write too.
                said = output.read()
                complained = errors.read()
            finally:
                await running.end_async()
        if code:
            output_end = (complained.strip() or said.strip() or "no output")[-1000:]
            *before, last = output_end.splitlines()  # the last line of a traceback names the error
            raise EpisodeError(
                "\n".join(
                    [f"{' '.join(map(str, self._command))!r} exited with {code}: {last}", *before]
                )
            )
        return parse_last_reward(said)

    def _build_environment(self, server: AgentServer, session: AgentSession) -> dict[str, str]:
        host = urlsplit(server.base_url).hostname or ""
        # The endpoint is on this machine: the program must not reach it through a proxy.
        direct = ",".join(
            filter(None, [os.environ.get("NO_PROXY", os.environ.get("no_proxy", "")), host])
        )
        return {
            **filter_variables(self._inherited_variables),
            "PATH": _build_search_path(),
            "NO_PROXY": direct,
            "no_proxy": direct,
            **reveal_secrets(self._extra_environment, "env.args.environment"),
            "OPENAI_BASE_URL": server.base_url,
            "OPENAI_API_KEY": session.key,
            "ANTHROPIC_BASE_URL": server.base_url.removesuffix("/v1"),
            "ANTHROPIC_API_KEY": session.key,
            "R3ASYNC_TASK_SEED": str(session.task.task_seed),
        }


class _OutputTail:
    """A pipe that keeps the last `OUTPUT_TAIL_BYTES` written to it.

    It does not wait for end-of-file: a process that the program started may hold the write
    end open for ever.
    """

    def __init__(self) -> None:
        self._read_fd, self.write_fd = os.pipe()
        os.set_blocking(self._read_fd, False)
        self._tail = b""
        asyncio.get_running_loop().add_reader(self._read_fd, self._drain_pipe)

    def read(self) -> str:
        """Return the end of everything written so far."""
        self._drain_pipe()
        return self._tail.decode(errors="replace")

    def _drain_pipe(self) -> None:
        with contextlib.suppress(BlockingIOError):
            data = os.read(self._read_fd, PIPE_CAPACITY_BYTES)
            self._tail = (self._tail + data)[-OUTPUT_TAIL_BYTES:]

    def close(self) -> None:
        asyncio.get_running_loop().remove_reader(self._read_fd)
        os.close(self._read_fd)
        os.close(self.write_fd)


def parse_last_reward(output: str) -> float | None:
    """Return the reward in the last line of a program's output, or None if that line has none."""
    lines = output.strip().splitlines()
    try:
        return decode_json_object(lines[-1]).get("reward") if lines else None
    except MalformedError:
        return None


async def play_outside(server: AgentServer, session: AgentSession) -> float | None:
    """Offer the session to outside clients and wait until the one that takes it, with the
    token, has closed it."""
    server.offer_session(session)
    await session.closed.wait()
    return None
