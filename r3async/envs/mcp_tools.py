"""`mcp:TASK`: the tools of MCP servers, offered to a policy that works on environment TASK.

Servers with a `command` are started for each episode and speak over stdio, so episodes do not share
their state. Servers with a `url` are running already: each episode has its own session with them,
by streamable HTTP.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
from collections.abc import Mapping
from string import Template
from typing import Any

import msgspec

from r3async.config import ConfigError, EnvConfig
from r3async.envs import (
    Action,
    Environment,
    EnvironmentFactory,
    EnvironmentFailed,
    Message,
    StepResult,
)
from r3async.envs.pool import filter_variables
from r3async.envs.tool_call_parser import run_tool_calls

SHUTDOWN_SECONDS = 10.0
"""Seconds that servers may take to end; the package `mcp` kills them before that."""


class McpServerConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The settings of an MCP server: a `command` to start, or the `url` of a server that runs.
    Possible secrets in it are never written anywhere, see `EnvConfig`.

    Attributes:
        command: Program and arguments, which run in `directory`.
        headers: HTTP headers, in which `$NAME` stands for a variable of `environment`.
        tools: Names of the tools that are offered; None for all.
    """

    command: list[str] = []
    directory: str = ""
    url: str = ""
    headers: dict[str, str] = {}
    tools: list[str] | None = None

    def __post_init__(self) -> None:
        if bool(self.command) == bool(self.url):
            raise ValueError("a server has a `command` or a `url`")
        if self.tools == []:
            raise ValueError(
                "`tools` = [] offers no tool of the server: name some, or leave it out for all"
            )
        if self.command and shutil.which(self.command[0]) is None:
            raise ValueError(f"`command` = {self.command[:1]} names no program")
        if self.url and not self.url.startswith(("http://", "https://")):
            raise ValueError("`url` must begin with http:// or https://")

    def resolve_headers(self, variables: Mapping[str, str]) -> dict[str, str]:
        """Return the `headers` with their variables filled in. Raises `ValueError` for a variable
        that does not exist."""
        try:
            return {
                name: Template(value).substitute(variables) for name, value in self.headers.items()
            }
        except KeyError as error:
            raise ValueError(
                f"`headers` name {error.args[0]}, which is no variable of `environment`"
            ) from None


class McpConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The `env.args` of `mcp:TASK`. Time limits are in seconds.

    Attributes:
        task: Arguments of TASK.
        environment: Environment variables of all servers.
        calls: Calls per episode.
        calls_at_once: Calls per answer.
        output_characters: Characters of a result.
    """

    servers: dict[str, McpServerConfig]
    task: dict[str, Any] = {}
    environment: dict[str, str] = {}
    calls: int = 16
    calls_at_once: int = 8
    call_timeout: float = 20.0
    start_timeout: float = 30.0
    output_characters: int = 8192

    def __post_init__(self) -> None:
        if not self.servers:
            raise ValueError("`servers` names no server")
        for server in self.servers.values():
            server.resolve_headers(self.environment)
        for name in (
            "calls",
            "calls_at_once",
            "call_timeout",
            "start_timeout",
            "output_characters",
        ):
            if not getattr(self, name) > 0:
                raise ValueError(f"`{name}` = {getattr(self, name)!r} must be above 0")


def make_mcp(target: str, config: EnvConfig) -> EnvironmentFactory:
    """Return a factory of environments with MCP tools. Raises `ConfigError` for wrong `env.args`,
    an unknown TASK, or if the package `mcp` is missing."""
    from r3async.envs.factory import build_environment_factory, import_optional_package

    import_optional_package("mcp", config, extra="mcp")
    try:
        settings = msgspec.convert(config.reveal_args(), McpConfig)
    except msgspec.ValidationError as error:
        raise ConfigError(f"`env.args` of {config.name!r}: {error}") from error
    inner = build_environment_factory(
        msgspec.structs.replace(config, name=target, args=settings.task)
    )
    return lambda: McpEnvironment(inner(), settings, filter_variables(config.variables))


class McpServers:
    """The MCP servers of one episode, from `start` to `stop`. A separate task holds the
    connections, because the task that opened them must close them."""

    def __init__(self, settings: McpConfig, variables: Mapping[str, str]):
        self.tools: list[dict[str, Any]] = []
        self._settings = settings
        self._variables = {**variables, **settings.environment}
        self._tool_owners: dict[str, tuple[Any, str]] = {}
        """Client of each tool and the tool's name on its server, by the name that
        the policy knows."""
        self._is_started = False
        self._stop_requested = asyncio.Event()
        self._connection_task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Start the servers. Raises `EnvironmentFailed` for a server that does not start in time,
        or a tool name that occurs twice."""
        loop = asyncio.get_running_loop()
        started: asyncio.Future[None] = loop.create_future()
        self._connection_task = asyncio.create_task(self._run_connections(started))
        seconds = self._settings.start_timeout
        done, _ = await asyncio.wait(
            [started, self._connection_task], timeout=seconds, return_when=asyncio.FIRST_COMPLETED
        )
        if started in done:
            return
        why = f"took longer than `start_timeout` = {seconds:g} s"
        if self._connection_task in done:
            error = self._connection_task.exception()
            if error is not None:
                why = f"failed: {_describe_root_cause(error)}"
        await self.stop()
        raise EnvironmentFailed(
            f"the MCP servers {', '.join(self._settings.servers)} could not start: that {why}"
        )

    async def _run_connections(self, started: asyncio.Future[None]) -> None:
        from mcp import Client

        async with contextlib.AsyncExitStack() as stack:
            for name, server in self._settings.servers.items():
                transport = await (
                    self._open_http_transport(server, stack)
                    if server.url
                    else self._open_stdio_transport(server, stack)
                )
                await self._register_tools(
                    name, server, await stack.enter_async_context(Client(transport))
                )
            self._is_started = True
            started.set_result(None)
            await self._stop_requested.wait()

    async def _open_stdio_transport(
        self, server: McpServerConfig, stack: contextlib.AsyncExitStack
    ) -> Any:
        from mcp import StdioServerParameters
        from mcp.client.stdio import stdio_client

        errors = stack.enter_context(await asyncio.to_thread(open, os.devnull, "w"))
        parameters = StdioServerParameters(
            command=server.command[0],
            args=server.command[1:],
            env=self._variables,
            cwd=server.directory or None,
        )
        return stdio_client(parameters, errlog=errors)

    async def _open_http_transport(
        self, server: McpServerConfig, stack: contextlib.AsyncExitStack
    ) -> Any:
        from mcp.client.streamable_http import create_mcp_http_client, streamable_http_client

        headers = server.resolve_headers(self._settings.environment)
        client = await stack.enter_async_context(create_mcp_http_client(headers))
        return streamable_http_client(server.url, http_client=client)

    async def _register_tools(self, name: str, server: McpServerConfig, client: Any) -> None:
        found = []
        cursor = None
        while True:
            page = await client.list_tools(cursor=cursor)
            found += page.tools
            cursor = page.next_cursor
            if cursor is None:
                break
        missing = sorted(set(server.tools or ()) - {tool.name for tool in found})
        if missing:
            raise EnvironmentFailed(f"server {name!r} has no tool {missing[0]!r}")
        for tool in found:
            if server.tools and tool.name not in server.tools:
                continue
            if tool.name in self._tool_owners:
                raise EnvironmentFailed(
                    f"two servers have a tool {tool.name!r}: name the tools of each server"
                )
            self._tool_owners[tool.name] = (client, tool.name)
            function = {
                "name": tool.name,
                "description": tool.description or "",
                "parameters": tool.input_schema,
            }
            self.tools.append({"type": "function", "function": function})

    async def call_tool(self, name: str, arguments: dict[str, Any]) -> str:
        """Call a tool and return its text. Raises `ValueError` for a tool that does not exist, and
        whatever the server or the loss of it raises."""
        if name not in self._tool_owners:
            raise ValueError(f"there is no tool {name!r}, only {', '.join(self._tool_owners)}")
        client, known = self._tool_owners[name]
        result = await client.call_tool(known, arguments)
        text = "\n".join(
            part.text if part.type == "text" else f"[{part.type}]" for part in result.content
        )
        return f"error: {text}" if result.is_error else text

    async def stop(self) -> None:
        """End the servers. Idempotent."""
        if self._connection_task is None:
            return
        holding = self._connection_task
        self._connection_task = None
        if self._is_started:
            self._stop_requested.set()
        else:
            holding.cancel()
        # One request is enough: the task closes stdin, terminates and then kills the servers,
        # each within seconds.
        done, _ = await asyncio.wait([holding], timeout=SHUTDOWN_SECONDS)
        for task in done:
            if not task.cancelled():
                task.exception()  # retrieve it: the error is known, or comes too late to matter


def _describe_root_cause(error: BaseException) -> str:
    while isinstance(error, BaseExceptionGroup) and error.exceptions:
        error = error.exceptions[0]
    return str(error) or repr(error)


class McpEnvironment:
    """An environment that adds the tools of MCP servers to `inner_env`: an answer with calls is
    answered by their results, any other by `inner_env`."""

    def __init__(self, inner_env: Environment, settings: McpConfig, variables: Mapping[str, str]):
        self._inner_env = inner_env
        self._settings = settings
        self._variables = variables
        self._servers = McpServers(settings, variables)
        self._call_count = 0
        for name in ("size", "oracle", "random_answer", "takes_tokens"):
            if hasattr(inner_env, name):
                setattr(self, name, getattr(inner_env, name))

    @property
    def tools(self) -> list[dict[str, Any]]:
        return [*getattr(self._inner_env, "tools", ()), *self._servers.tools]

    async def reset(self, task_seed: int) -> list[Message]:
        await self._servers.stop()
        self._servers = McpServers(self._settings, self._variables)
        self._call_count = 0
        await self._servers.start()
        return await self._inner_env.reset(task_seed)

    async def step(self, action: Action) -> StepResult:
        settings = self._settings
        left = settings.calls - self._call_count
        results = await run_tool_calls(
            action.text,
            self._servers.tools if left > 0 else (),
            self._servers.call_tool,
            seconds=settings.call_timeout,
            max_calls=min(settings.calls_at_once, left),
            max_characters=settings.output_characters,
            thinking=action.thinking,
        )
        if not results:
            return await self._inner_env.step(action)
        self._call_count += len(results)
        return StepResult(0.0, results, metrics={"tool_calls": len(results)})

    async def close(self) -> None:
        await self._servers.stop()
        close = getattr(self._inner_env, "close", None)
        if close is not None:
            waiting = close()
            if asyncio.iscoroutine(waiting):
                await waiting
