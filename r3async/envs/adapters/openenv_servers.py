"""`openenv:URL`: the environment of a running OpenEnv server, one session an episode.

Only its WebSocket protocol is spoken here: the package `openenv-core` is needed where
the server runs.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from typing import Any

import msgspec

from r3async.config import ConfigError, EnvConfig, did_you_mean
from r3async.envs import (
    Action,
    EnvironmentFactory,
    EnvironmentFailed,
    EnvironmentProtocolError,
    Message,
    StepResult,
)
from r3async.envs.tool_call_parser import parse_tool_calls, split_reasoning
from r3async.untrusted import MalformedError, decode_json
from r3async.world.processes import run_on_own_loop

MAX_MESSAGE_BYTES = 16 * 2**20
CAPACITY_PAUSE_SECONDS = 0.2
"""Pause between two attempts to get a session of a server whose sessions are all taken."""
CLOSE_SECONDS = 1.0
ACT_TOOL = "act"
"""Name of the tool whose arguments are the action, for an action of several fields."""


class OpenEnvConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The `env.args` of `openenv:URL`.

    Attributes:
        prompt: Text before the first observation.
        observation: Field of the observation that the policy reads; empty for all fields
            that are not empty.
        action: Field of the action that the answer's text fills; empty for the only one, or the
            only required one.
        reset: What the environment's `reset` gets besides the seed.
        invalid_reward: Reward of an answer that is no action.
        invalid_limit: Number of such answers after which the episode ends.
    """

    prompt: str = ""
    observation: str = ""
    action: str = ""
    reset: dict[str, Any] = {}
    invalid_reward: float = 0.0
    invalid_limit: int = 3


class ServerSchemas(msgspec.Struct, frozen=True):
    """JSON schemas of a server's actions and observations."""

    action: dict[str, Any]
    observation: dict[str, Any]


class ReplyData(msgspec.Struct, frozen=True):
    """The data of a reply: the outcome of a reset or a step, or an error's code, message,
    and invalid fields."""

    observation: dict[str, Any] = {}
    reward: float | bool | None = None
    done: bool = False
    code: str = ""
    message: str = ""
    errors: list[dict[str, Any]] = []


class ServerReply(msgspec.Struct, frozen=True):
    type: str
    data: ReplyData


class ActionForm(msgspec.Struct, frozen=True):
    """The way in which an answer becomes an action.

    Attributes:
        field: Field of the action that the text fills; empty if answers call tools.
        takes_text: False if the text is JSON, such as a number.
        tools: The tool whose arguments are the action.
        serves_tools: True if the server has tools of its own (an MCP environment) and lists them
            after the reset.
    """

    field: str = ""
    takes_text: bool = True
    tools: list[dict[str, Any]] = []
    serves_tools: bool = False


def choose_action_form(schema: dict[str, Any], chosen: str) -> ActionForm:
    """Return how an answer becomes an action of this JSON schema. Raises `ConfigError` if the
    action lacks the field `chosen`."""
    fields = {
        name: field for name, field in schema.get("properties", {}).items() if name != "metadata"
    }
    _check_field("action", chosen, fields)
    if {"tool_name", "arguments"} <= fields.keys():
        return ActionForm(serves_tools=True)
    required = [name for name in schema.get("required", []) if name in fields]
    candidates = [chosen] if chosen else list(fields) if len(fields) == 1 else required
    if len(candidates) == 1:
        field = fields[candidates[0]]
        return ActionForm(
            candidates[0],
            "string" in [kind.get("type") for kind in (field, *field.get("anyOf", []))],
        )
    described = {
        "name": ACT_TOOL,
        "description": "Act.",
        "parameters": {**schema, "properties": fields},
    }
    return ActionForm(tools=[{"type": "function", "function": described}])


def _check_field(setting: str, name: str, fields: dict[str, Any]) -> None:
    if name and name not in fields:
        raise ConfigError(
            f"`env.args.{setting}`: the server's {setting} has no field {name!r}; "
            f"{did_you_mean(name, fields)}"
        )


class OpenEnvEnvironment:
    """A session of an OpenEnv server, which plays its environment there. The task seed is the
    seed of its reset.

    Rewards are the server's, unchanged. What the server refuses as an action is answered by its
    reason. Where the server has tools, an answer without a call ends the episode.
    """

    def __init__(self, url: str, form: ActionForm, settings: OpenEnvConfig, config: EnvConfig):
        self.tools = form.tools
        self._url = url
        self._form = form
        self._settings = settings
        self._config = config
        self._client: Any = None
        self._socket: Any = None
        self._invalid_count = 0

    async def reset(self, task_seed: int) -> list[Message]:
        self._invalid_count = 0
        # Environments may give the seed to numpy, which takes 32 bits.
        begun = await self._begin_session({**self._settings.reset, "seed": task_seed % 2**31})
        if begun.done:
            raise EnvironmentFailed(f"{self._url}: the episode was over after `reset`")
        if self._form.serves_tools:
            listed = (await self._ask_server("step", {"type": "list_tools"})).data.observation
            self.tools = [_to_openai_tool(tool) for tool in listed.get("tools", [])]
        text = "\n".join(
            filter(None, [self._settings.prompt, self._render_observation(begun.observation)])
        )
        if not text:
            raise EnvironmentProtocolError(
                f"{self._url}: `reset` shows nothing: set `env.args.prompt`"
            )
        return [Message("user", text)]

    async def step(self, action: Action) -> StepResult:
        acts = self._parse_actions(action)
        if not acts and self._form.serves_tools:
            return StepResult(0.0, done=True)
        if not acts:
            return self._refuse_answer(0.0, [], Message("user", f"error: call the tool {ACT_TOOL}"))
        reward = 0.0
        messages = list[Message]()
        for name, data in acts:
            reply = (await self._ask_server("step", data)).data
            said = (
                f"error: {_describe_refusal(reply)}"
                if reply.code
                else self._render_observation(reply.observation)
            )
            message = Message("tool" if name else "user", said, name=name)
            if reply.code:
                return self._refuse_answer(reward, messages, message)
            reward += float(reply.reward or 0.0)
            if reply.done:
                return StepResult(reward, done=True)
            messages.append(message)
        return StepResult(reward, messages)

    def _refuse_answer(
        self, reward: float, messages: list[Message], refusal: Message
    ) -> StepResult:
        self._invalid_count += 1
        ends = self._invalid_count >= self._settings.invalid_limit
        return StepResult(
            reward + self._settings.invalid_reward, [] if ends else [*messages, refusal], ends
        )

    async def close(self) -> None:
        """End the session; the server closes its environment."""
        socket = self._socket
        client = self._client
        self._socket = None
        self._client = None
        if socket is not None:
            # Without a goodbye the server's log has a traceback for every session.
            with contextlib.suppress(OSError):
                async with asyncio.timeout(CLOSE_SECONDS):
                    await socket.send_json({"type": "close"})
                    await socket.receive()
            await socket.close()
        if client is not None:
            await client.close()

    def _parse_actions(self, action: Action) -> list[tuple[str, dict[str, Any]]]:
        """Return the actions of an answer, each with the name of the tool that it calls,
        if it calls one."""
        form = self._form
        if form.field:
            text = split_reasoning(action.text, thinking=action.thinking)[1].strip()
            return [("", {form.field: text if form.takes_text else _decode_or_keep(text)})]
        _, calls = parse_tool_calls(action.text, self.tools, thinking=action.thinking)
        acts = [
            (call["function"]["name"], decode_json(call["function"]["arguments"])) for call in calls
        ]
        if not form.serves_tools:
            return acts
        return [
            (name, {"type": "call_tool", "tool_name": name, "arguments": given})
            for name, given in acts
        ]

    def _render_observation(self, observation: dict[str, Any]) -> str:
        if self._form.serves_tools and (
            observation.get("error") or observation.get("result") is not None
        ):
            return _render_tool_result(observation)
        field = self._settings.observation
        if field:
            return _render_value(observation.get(field, ""))
        shown = {
            name: value for name, value in observation.items() if value not in (None, "", [], {})
        }
        return _render_value(next(iter(shown.values())) if len(shown) == 1 else shown or "")

    async def _begin_session(self, reset: dict[str, Any]) -> ReplyData:
        """Return the server's reply to `reset` in a new session, as soon as one is free."""
        deadline = time.monotonic() + self._config.start_timeout
        while True:
            await self.close()
            await self._connect(deadline)
            reply = (await self._ask_server("reset", reset)).data
            if not reply.code:
                return reply
            if time.monotonic() > deadline:
                raise EnvironmentFailed(
                    f"{self._url}: no session was free within env.start_timeout = "
                    f"{self._config.start_timeout:g} s: give its `create_app` a larger "
                    "`max_concurrent_envs`, or run fewer episodes at once"
                )
            await asyncio.sleep(CAPACITY_PAUSE_SECONDS)

    async def _connect(self, deadline: float) -> None:
        import aiohttp

        self._client = aiohttp.ClientSession()
        closing = aiohttp.ClientWSTimeout(ws_close=CLOSE_SECONDS)
        place = f"ws{self._url.removeprefix('http')}/ws"
        try:
            async with asyncio.timeout(max(deadline - time.monotonic(), CAPACITY_PAUSE_SECONDS)):
                self._socket = await self._client.ws_connect(
                    place, max_msg_size=MAX_MESSAGE_BYTES, timeout=closing
                )
        except (aiohttp.ClientError, OSError) as error:  # a time-out is an `OSError`, too
            await self.close()
            raise EnvironmentFailed(
                f"{self._url}: no session: {str(error) or type(error).__name__}"
            ) from error

    async def _ask_server(self, kind: str, data: dict[str, Any]) -> ServerReply:
        """Return the server's reply: an outcome, or an error if the action was invalid or no
        session is free. Raises `EnvironmentFailed` for any other error."""
        import aiohttp

        if self._socket is None:
            raise EnvironmentFailed(f"{self._url}: `{kind}` without a session")
        seconds = self._config.step_timeout
        try:
            async with asyncio.timeout(seconds):
                await self._socket.send_json({"type": kind, "data": data})
                received = await self._socket.receive()
            if received.type is not aiohttp.WSMsgType.TEXT:
                raise ConnectionError("the server ended the session")
            reply = decode_json(received.data, ServerReply)
        except TimeoutError as error:
            await self.close()
            raise EnvironmentFailed(
                f"{self._url}: `{kind}` took longer than env.step_timeout = {seconds:g} s"
            ) from error
        except (aiohttp.ClientError, OSError, MalformedError) as error:
            await self.close()
            raise EnvironmentFailed(f"{self._url}: `{kind}` got no answer: {error}") from error
        if reply.data.code and (kind, reply.data.code) not in _EXPECTED_ERRORS:
            raise EnvironmentFailed(
                f"{self._url}: `{kind}` failed there: {reply.data.code}: {reply.data.message}"
            )
        return reply


_EXPECTED_ERRORS = (("step", "VALIDATION_ERROR"), ("reset", "CAPACITY_REACHED"))


def _decode_or_keep(text: str) -> Any:
    try:
        return decode_json(text)
    except MalformedError:
        return text  # the server says what it wants instead


def _describe_refusal(refused: ReplyData) -> str:
    faults = [
        f"{'.'.join(map(str, fault.get('loc', ())))}: {fault.get('msg', '')}"
        for fault in refused.errors
    ]
    return "; ".join(faults) or refused.message


def _to_openai_tool(tool: dict[str, Any]) -> dict[str, Any]:
    described = {
        "name": tool["name"],
        "description": tool.get("description", ""),
        "parameters": tool["input_schema"],
    }
    return {"type": "function", "function": described}


def _render_tool_result(observation: dict[str, Any]) -> str:
    error = observation.get("error")
    if error:
        return f"error: {error.get('message', error)}"
    result = observation["result"]
    parts = result.get("content") if isinstance(result, dict) else None
    if not isinstance(parts, list):
        return _render_value(result)
    return "\n".join(
        part["text"] if part.get("type") == "text" else f"[{part.get('type')}]" for part in parts
    )


def _render_value(value: Any) -> str:
    return value if isinstance(value, str) else msgspec.json.encode(value).decode()


def make_openenv(target: str, config: EnvConfig) -> EnvironmentFactory:
    """Return a factory of sessions with a running server. Raises `ConfigError` if none answers at
    the URL, or for wrong `env.args`."""
    url = target.rstrip("/")
    if not url.startswith(("http://", "https://")):
        raise ConfigError(
            f"`env.name` = {config.name!r}: the address of a server begins with http:// or https://"
        )
    try:
        settings = msgspec.convert(config.reveal_args(), OpenEnvConfig)
    except msgspec.ValidationError as error:
        raise ConfigError(f"`env.args` of {config.name!r}: {error}") from error
    try:
        schemas = run_on_own_loop(_fetch_schemas(url, config.start_timeout))
    except (OSError, MalformedError) as error:
        raise ConfigError(
            f"`env.name` = {config.name!r}: no OpenEnv server answers at {url}/schema "
            f"({str(error) or type(error).__name__}): start it, or give the address that it prints"
        ) from error
    _check_field("observation", settings.observation, schemas.observation.get("properties", {}))
    form = choose_action_form(schemas.action, settings.action)
    return lambda: OpenEnvEnvironment(url, form, settings, config)


async def _fetch_schemas(url: str, seconds: float) -> ServerSchemas:
    import aiohttp

    try:
        async with (
            asyncio.timeout(seconds),
            aiohttp.ClientSession() as client,
            client.get(f"{url}/schema") as answer,
        ):
            return decode_json(await answer.read(), ServerSchemas)
    except aiohttp.ClientError as error:
        raise OSError(str(error)) from error
