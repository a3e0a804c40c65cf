"""Tools of an environment: parsing the calls in a policy's answer, as Hermes and Qwen write them, and running MCP
servers."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import secrets
import shutil
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from string import Template
from typing import Any

import msgspec

from r3async.config import ConfigError, EnvConfig
from r3async.envs import Action, Environment, EnvironmentFactory, EnvironmentFailed, Message, StepResult
from r3async.envs.pool import filter_variables
from r3async.untrusted import MalformedError, decode_json

# Two forms are read: `<tool_call>{"name": …, "arguments": {…}}</tool_call>` as Hermes and Qwen write it, any number of
# times; and an answer that is only that JSON object, or a list of them (`parameters` is accepted for `arguments`).
_CALL_OPEN_TAG, _CALL_CLOSE_TAG = "<tool_call>", "</tool_call>"
_JSON_TEXT = re.compile(r'(?:[^"<\\]++|"(?:[^"\\]++|\\.)*+")*+', re.DOTALL)
"""Text that may be JSON, up to the first `<` or backslash that is in no string."""
_THINK_TAG = re.compile("</?think>")
_FENCED_BLOCK = re.compile(r"```(?:json)?[^\S\n]*\n(.*?)\n?```", re.DOTALL)
ToolCall = tuple[str, dict[str, Any]]
"""Tool call: the name of the tool and its arguments."""


def parse_tool_calls(
    text: str, tools: Sequence[Mapping[str, Any]], *, thinking: bool = False
) -> tuple[str, list[dict[str, Any]]]:
    """Return `content, tool_calls` of an answer, in OpenAI's shape.

    Reasoning is part of the content, whatever it contains. The whole text is content if any call cannot be parsed or
    names a tool that was not offered, or if there are no `tools`. With `thinking`, the answer begins inside reasoning
    that its prompt opened.
    """
    thoughts, spoken = split_reasoning(text, thinking=thinking)
    content, calls = _read_calls(spoken, tools)
    if not calls or not {name for name, _ in calls} <= list_tool_names(tools):
        return text, []
    return (thoughts + content).strip(), [_to_openai_call(*call) for call in calls]


def split_reasoning(text: str, *, thinking: bool = False) -> tuple[str, str]:
    """Return the reasoning of an answer, with `<think>` and `</think>`, and the rest of the text.

    A `</think>` that nothing opened ends reasoning that the prompt opened; `thinking` says that the prompt did so, for
    an answer that was cut before its `</think>`. A tag in the arguments of a call does not count. Time is linear in the
    length of the answer.
    """
    thoughts: list[str] = []
    spoken: list[str] = []
    calls = _CallSearch(text)
    begin = at = 0
    while tag := _THINK_TAG.search(text, at):
        at = tag.end()
        if not thinking and (end := calls.find_end(begin, tag.start())):
            at = end
        elif tag[0] == "</think>":
            if not thinking:
                thoughts += spoken
                spoken = []
            thoughts.append(text[begin:at])
            begin, thinking = at, False
        elif not thinking:
            spoken.append(text[begin : tag.start()])
            begin, thinking = tag.start(), True
    (thoughts if thinking else spoken).append(text[begin:])
    return "".join(thoughts), "".join(spoken)


class _CallSearch:
    """A search for the calls around places in a text, which must be asked for in order.

    Each tag is found once, and the text behind each opening tag is read once, up to the first `<` in no string.
    That may be behind later opening tags only if they are in strings. Of two tags of which one is in a string of the
    other, only one can be so again in a third. So all searches together take time that is linear in the text's length.
    """

    def __init__(self, text: str):
        self._text = text
        self._start, self._next_start = -1, text.find(_CALL_OPEN_TAG)
        """The last opening tag before the place, and the first one behind it; -1 if there is none."""
        self._end = 0
        """The first closing tag behind the place; -1 if there is none."""
        self._call_end = -1
        """The closing tag of the call that begins at `_start`; -1 if none begins there."""

    def find_end(self, begin: int, at: int) -> int:
        """Return the end of the call whose arguments contain `text[at]`; 0 if no call that begins behind `begin`
        does."""
        while 0 <= self._next_start <= at - len(_CALL_OPEN_TAG):
            self._start = self._next_start
            self._next_start = self._text.find(_CALL_OPEN_TAG, self._start + len(_CALL_OPEN_TAG))
            self._call_end = -2
        if 0 <= self._end < at:
            self._end = self._text.find(_CALL_CLOSE_TAG, at)
        if self._start < begin or self._end < 0:
            return 0
        if self._call_end == -2:
            self._call_end = self._read_call(self._start + len(_CALL_OPEN_TAG))
        return self._end + len(_CALL_CLOSE_TAG) if self._end == self._call_end else 0

    def _read_call(self, start: int) -> int:
        """Return the place of the closing tag behind the call that begins at `start`; -1 if none does."""
        end = _JSON_TEXT.match(self._text, start).end()  # type: ignore[union-attr]
        is_closed = self._text.startswith(_CALL_CLOSE_TAG, end)
        return end if is_closed and _parse_tagged_call(self._text[start:end]) is not None else -1


def _read_calls(spoken: str, tools: Sequence[Mapping[str, Any]]) -> tuple[str, list[ToolCall]]:
    """Return the text beside the calls, and the calls; no calls if one cannot be parsed, or if there are no `tools`. A
    call in tags may name a tool that was not offered."""
    if not tools:
        return spoken, []
    if blocks := list(_find_tagged_blocks(spoken)):
        calls = [
            _parse_tagged_call(spoken[start + len(_CALL_OPEN_TAG) : stop - len(_CALL_CLOSE_TAG)])
            for start, stop in blocks
        ]
        beside = zip([0, *(stop for _, stop in blocks)], [*(start for start, _ in blocks), len(spoken)], strict=True)
        read = [call for call in calls if call is not None]
        return "".join(spoken[a:b] for a, b in beside), read if len(read) == len(calls) else []
    bare = spoken.strip()
    if fenced := _FENCED_BLOCK.fullmatch(bare):
        bare = fenced[1]
    try:
        value = decode_json(bare)
    except MalformedError:
        return spoken, []
    found = [_parse_call(item) for item in (value if isinstance(value, list) else [value])]
    offered = list_tool_names(tools)
    read = [call for call in found if call is not None and call[0] in offered]
    return "", read if len(read) == len(found) else []


def _find_tagged_blocks(text: str) -> Iterator[tuple[int, int]]:
    """Yield the begin and the end of each `<tool_call>…</tool_call>`. A regular expression for both tags would read the
    rest of the text for every unclosed tag, which takes seconds for an answer of open tags alone."""
    at = 0
    while (start := text.find(_CALL_OPEN_TAG, at)) >= 0 and (end := text.find(_CALL_CLOSE_TAG, start)) >= 0:
        at = end + len(_CALL_CLOSE_TAG)
        yield start, at


def list_tool_names(tools: Sequence[Mapping[str, Any]]) -> set[str]:
    """Return the names of the tools, in OpenAI's shape or bare, that have one."""
    functions = [tool.get("function", tool) for tool in tools]
    names = [function.get("name") if isinstance(function, Mapping) else None for function in functions]
    return {name for name in names if isinstance(name, str)}


def _parse_tagged_call(text: str) -> ToolCall | None:
    try:
        return _parse_call(decode_json(text.strip()))
    except MalformedError:
        return None


def _parse_call(value: Any) -> ToolCall | None:
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        return None
    arguments = value.get("arguments", value.get("parameters", {}))
    return (value["name"], arguments) if isinstance(arguments, dict) else None


def _to_openai_call(name: str, arguments: dict[str, Any]) -> dict[str, Any]:
    return {
        "id": f"call_{secrets.token_hex(12)}",
        "type": "function",
        "function": {"name": name, "arguments": msgspec.json.encode(arguments).decode()},
    }


async def run_tool_calls(
    text: str,
    tools: Sequence[Mapping[str, Any]],
    call_tool: Callable[[str, dict[str, Any]], Awaitable[str]],
    *,
    seconds: float,
    max_calls: int = 8,
    max_characters: int = 8192,
    thinking: bool = False,
) -> list[Message]:
    """Run the tool calls in an answer at the same time. Returns one message for each call, in order; none if there are
    no calls.

    Errors, time-outs, and output that is cut off are reported to the policy, as are calls beyond `max_calls`, which are
    not made.

    Args:
        call_tool: Function of name and arguments that returns the tool's text.
        seconds: Time limit of each call.
        max_characters: Characters of a tool's text that the policy gets.
        thinking: See `Action.thinking`.
    """
    _, calls = _read_calls(split_reasoning(text, thinking=thinking)[1], tools)

    async def run_one_call(index: int, name: str, arguments: dict[str, Any]) -> str:
        if index >= max_calls:
            return f"error: not called, an answer may have {max_calls} calls"
        try:
            async with asyncio.timeout(seconds):
                said = await call_tool(name, arguments)
        except TimeoutError:
            return f"error: {name} took longer than {seconds:g} s"
        except Exception as error:
            return f"error: {str(error) or repr(error)}"[:max_characters]
        cut = len(said) - max_characters
        return said if cut <= 0 else f"{said[:max_characters]}\n[{cut} characters left out]"

    results = await asyncio.gather(*(run_one_call(i, *each) for i, each in enumerate(calls)))
    return [Message("tool", said, name=name) for said, (name, _) in zip(results, calls, strict=True)]


# `mcp:TASK`: the tools of MCP servers, offered to the policy while it works on the tasks of environment TASK.
#
# Servers with a `command` are started for each episode and speak over stdio, so episodes do not share their state.
# Servers with a `url` are running already: each episode has its own session with them, by streamable HTTP.


SHUTDOWN_SECONDS = 10.0
"""Seconds that servers may take to end; the package `mcp` kills them before that."""


class McpServerConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The settings of an MCP server: a `command` to start, or the `url` of a server that runs. Possible secrets in it
    are never written anywhere, see `EnvConfig`.

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
            raise ValueError("`tools` = [] offers no tool of the server: name some, or leave it out for all")
        if self.command and shutil.which(self.command[0]) is None:
            raise ValueError(f"`command` = {self.command[:1]} names no program")
        if self.url and not self.url.startswith(("http://", "https://")):
            raise ValueError("`url` must begin with http:// or https://")

    def resolve_headers(self, variables: Mapping[str, str]) -> dict[str, str]:
        """Return the `headers` with their variables filled in. Raises `ValueError` for a variable that does not
        exist."""
        try:
            return {name: Template(value).substitute(variables) for name, value in self.headers.items()}
        except KeyError as error:
            raise ValueError(f"`headers` name {error.args[0]}, which is no variable of `environment`") from None


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
        for name in ("calls", "calls_at_once", "call_timeout", "start_timeout", "output_characters"):
            if not getattr(self, name) > 0:
                raise ValueError(f"`{name}` = {getattr(self, name)!r} must be above 0")


def make_mcp(target: str, config: EnvConfig) -> EnvironmentFactory:
    """Return a factory of environments with MCP tools. Raises `ConfigError` for wrong `env.args`, an unknown TASK, or
    if the package `mcp` is missing."""
    from r3async.envs.factory import build_environment_factory, import_optional_package

    import_optional_package("mcp", config, extra="mcp")
    try:
        settings = msgspec.convert(config.reveal_args(), McpConfig)
    except msgspec.ValidationError as error:
        raise ConfigError(f"`env.args` of {config.name!r}: {error}") from error
    inner = build_environment_factory(msgspec.structs.replace(config, name=target, args=settings.task))
    return lambda: McpEnvironment(inner(), settings, filter_variables(config.variables))


class McpServers:
    """The MCP servers of one episode, from `start` to `stop`. A separate task holds the connections, because the task
    that opened them must close them."""

    def __init__(self, settings: McpConfig, variables: Mapping[str, str]):
        self.tools: list[dict[str, Any]] = []
        self._settings = settings
        self._variables = {**variables, **settings.environment}
        self._tool_owners: dict[str, tuple[Any, str]] = {}
        """Client of each tool and the tool's name on its server, by the name that the policy knows."""
        self._is_started, self._stop_requested = False, asyncio.Event()
        self._connection_task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Start the servers. Raises `EnvironmentFailed` for a server that does not start in time, or a tool name that
        occurs twice."""
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
        if self._connection_task in done and (error := self._connection_task.exception()) is not None:
            why = f"failed: {_describe_root_cause(error)}"
        await self.stop()
        raise EnvironmentFailed(f"the MCP servers {', '.join(self._settings.servers)} could not start: that {why}")

    async def _run_connections(self, started: asyncio.Future[None]) -> None:
        from mcp import Client

        async with contextlib.AsyncExitStack() as stack:
            for name, server in self._settings.servers.items():
                transport = await (
                    self._open_http_transport(server, stack)
                    if server.url
                    else self._open_stdio_transport(server, stack)
                )
                await self._register_tools(name, server, await stack.enter_async_context(Client(transport)))
            self._is_started = True
            started.set_result(None)
            await self._stop_requested.wait()

    async def _open_stdio_transport(self, server: McpServerConfig, stack: contextlib.AsyncExitStack) -> Any:
        from mcp import StdioServerParameters
        from mcp.client.stdio import stdio_client

        errors = stack.enter_context(await asyncio.to_thread(open, os.devnull, "w"))
        parameters = StdioServerParameters(
            command=server.command[0], args=server.command[1:], env=self._variables, cwd=server.directory or None
        )
        return stdio_client(parameters, errlog=errors)

    async def _open_http_transport(self, server: McpServerConfig, stack: contextlib.AsyncExitStack) -> Any:
        from mcp.client.streamable_http import create_mcp_http_client, streamable_http_client

        headers = server.resolve_headers(self._settings.environment)
        client = await stack.enter_async_context(create_mcp_http_client(headers))
        return streamable_http_client(server.url, http_client=client)

    async def _register_tools(self, name: str, server: McpServerConfig, client: Any) -> None:
        found, cursor = [], None
        while True:
            page = await client.list_tools(cursor=cursor)
            found += page.tools
            if (cursor := page.next_cursor) is None:
                break
        if missing := sorted(set(server.tools or ()) - {tool.name for tool in found}):
            raise EnvironmentFailed(f"server {name!r} has no tool {missing[0]!r}")
        for tool in found:
            if server.tools and tool.name not in server.tools:
                continue
            if tool.name in self._tool_owners:
                raise EnvironmentFailed(f"two servers have a tool {tool.name!r}: name the tools of each server")
            self._tool_owners[tool.name] = (client, tool.name)
            function = {"name": tool.name, "description": tool.description or "", "parameters": tool.input_schema}
            self.tools.append({"type": "function", "function": function})

    async def call_tool(self, name: str, arguments: dict[str, Any]) -> str:
        """Call a tool and return its text. Raises `ValueError` for a tool that does not exist, and whatever the server
        or the loss of it raises."""
        if name not in self._tool_owners:
            raise ValueError(f"there is no tool {name!r}, only {', '.join(self._tool_owners)}")
        client, known = self._tool_owners[name]
        result = await client.call_tool(known, arguments)
        text = "\n".join(part.text if part.type == "text" else f"[{part.type}]" for part in result.content)
        return f"error: {text}" if result.is_error else text

    async def stop(self) -> None:
        """End the servers. Idempotent."""
        if self._connection_task is None:
            return
        holding, self._connection_task = self._connection_task, None
        if self._is_started:
            self._stop_requested.set()
        else:
            holding.cancel()
        # One request is enough: the task closes stdin, terminates and then kills the servers, each within seconds.
        done, _ = await asyncio.wait([holding], timeout=SHUTDOWN_SECONDS)
        for task in done:
            if not task.cancelled():
                task.exception()  # retrieve it: the error is known, or comes too late to matter


def _describe_root_cause(error: BaseException) -> str:
    while isinstance(error, BaseExceptionGroup) and error.exceptions:
        error = error.exceptions[0]
    return str(error) or repr(error)


class McpEnvironment:
    """An environment that adds the tools of MCP servers to `inner_env`: an answer with calls is answered by their
    results, any other by `inner_env`."""

    def __init__(self, inner_env: Environment, settings: McpConfig, variables: Mapping[str, str]):
        self._inner_env, self._settings, self._variables = inner_env, settings, variables
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
        self._servers, self._call_count = McpServers(self._settings, self._variables), 0
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
        if close is not None and asyncio.iscoroutine(waiting := close()):
            await waiting
