"""The HTTP server of the endpoint. It listens on loopback by default and answers
nothing without a key."""

from __future__ import annotations

import asyncio
import functools
import itertools
import json
import secrets
import socket
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any

from aiohttp import web

from r3async.config import ConfigError, EpisodeConfig, ServingConfig, bracket_ipv6, strip_brackets
from r3async.rollout.endpoint.anthropic_messages import (
    MESSAGES_DIALECT,
    build_anthropic_error,
    build_anthropic_models,
    parse_count_request,
)
from r3async.rollout.endpoint.chat_completions import (
    CHAT_DIALECT,
    STREAM_DONE,
    build_completion_body,
    iter_completion_events,
    parse_completion_request,
)
from r3async.rollout.endpoint.connections import limit_connections, make_runner
from r3async.rollout.endpoint.protocol import (
    AgentRequest,
    AgentResponse,
    ApiDialect,
    ApiError,
    SampledAnswer,
    build_openai_error,
    parse_stop_strings,
    refuse_unknown_fields,
)
from r3async.rollout.endpoint.responses import RESPONSES_DIALECT
from r3async.rollout.endpoint.session import AgentSession, build_closed_error
from r3async.rollout.endpoint.tool_parser_choice import (
    ParseToolCalls,
    parse_builtin,
    select_tool_parser,
)
from r3async.rollout.episode import EpisodeTask
from r3async.rollout.play_context import PlayContext
from r3async.untrusted import MalformedError, decode_json, format_value, to_bounded_int
from r3async.world.real import REAL_WORLD
from r3async.world.threads import run_off_loop

SHUTDOWN_SECONDS = 2.0
READ_SECONDS = 30.0
"""Seconds that a connection may take for the head of a request, and for its body."""
MAX_BODY_BYTES = 4 * 2**20
"""Maximum size of one request."""
MAX_MESSAGES = 1024
"""Maximum number of messages, and of tools, in one request."""
MODEL_NAME = "policy"
"""Name of the model in `/v1/models`. Requests may name any."""

DIALECT_BY_PATH = {
    "/v1/chat/completions": CHAT_DIALECT,
    "/v1/responses": RESPONSES_DIALECT,
    "/v1/messages": MESSAGES_DIALECT,
}
COUNT_TOKENS_PATH = "/v1/messages/count_tokens"
_ANSWER_ID_PREFIXES = (*(edge.id_prefix for edge in DIALECT_BY_PATH.values()), "cmpl")
"""Prefixes of the ids of answers."""


class OutsideTask(EpisodeTask, frozen=True):
    """An episode that belongs to no lease and is never trained. `group_index` counts them."""

    @property
    def trajectory_id(self) -> str:
        return f"outside{self.group_index}"


class AgentServer:
    """A server of one engine's sessions, on its event loop.

    `open_session` and `close_session` are for the process that plays leased episodes. If
    `serving.enabled`, a client with `token` may take an episode that waits for an agent
    (`offer_session`), or begin a new one that is not trained. Internal errors are reported.
    """

    def __init__(
        self,
        settings: EpisodeConfig,
        serving: ServingConfig,
        context: PlayContext,
    ):
        self.settings = settings
        self.serving = serving
        self.base_url = ""
        """URL of the endpoint, which ends in `/v1`; known after `start`."""
        self.token = serving.token.reveal("serving.token") or secrets.token_urlsafe(32)
        self.context = context
        self._parse_tool_calls: ParseToolCalls = parse_builtin
        self._sessions: dict[str, AgentSession] = {}
        self._outside_keys: set[str] = set()
        self._offered_sessions: deque[AgentSession] = deque()
        self._outside_numbers = itertools.count()
        self._runner: web.AppRunner | None = None
        self._admitted_connections: set[web.RequestHandler] = set()
        """Connections that have sent a valid key, or the token."""

    async def start(self) -> None:
        """Start to listen.

        Raises `ConfigError` if `serving.host` and `serving.port`, or `serving.tool_parser`,
        are not available.
        """
        self._parse_tool_calls = await select_tool_parser(
            self.serving.tool_parser,
            self.context.engine,
            self.context.renderer,
            self.context.report_event,
        )
        app = web.Application(client_max_size=MAX_BODY_BYTES, middlewares=[self._handle_errors])
        for path, edge in DIALECT_BY_PATH.items():
            app.router.add_post(path, functools.partial(self._handle_conversation, edge))
        app.router.add_post(COUNT_TOKENS_PATH, self._handle_count_tokens)
        app.router.add_post("/v1/completions", self._handle_completion)
        app.router.add_get("/v1/models", self._handle_models)
        app.router.add_get("/v1/models/{name}", self._handle_models)
        app.router.add_post("/v1/r3async/reward", self._handle_reward)
        app.router.add_get("/v1/r3async/session", self._handle_session)
        app.router.add_post("/v1/r3async/sessions", self._handle_new_session)
        # An agent that hangs up aborts its request.
        self._runner = make_runner(
            app,
            read_timeout=READ_SECONDS,
            shutdown_timeout=SHUTDOWN_SECONDS,
            handler_cancellation=True,
        )
        await self._runner.setup()
        self._admitted_connections = limit_connections(self._runner, self.serving.max_connections)
        host = self.serving.host
        port = self.serving.port
        try:
            await web.TCPSite(
                self._runner, strip_brackets(host), port, backlog=self.serving.max_connections
            ).start()
        except OSError as error:
            await self._runner.cleanup()
            raise ConfigError(
                f"`serving.host` = {host!r}, `serving.port` = {port} cannot be listened on: "
                f"{error.strerror or error}; port 0 takes a free one"
            ) from error
        bound = self._runner.addresses[0]
        reach = {"0.0.0.0": socket.gethostname(), "::": socket.gethostname()}.get(
            bound[0], bound[0]
        )
        self.base_url = f"http://{bracket_ipv6(reach)}:{bound[1]}/v1"

    async def stop(self) -> None:
        """Close every session and the socket; running requests are aborted."""
        for session in list(self._sessions.values()):
            self.close_session(session)
        if self._runner is not None:
            await self._runner.cleanup()

    # -- in this process ---------------------------------------------------------------------------

    def open_session(self, task: EpisodeTask) -> AgentSession:
        """Open a session for an episode. The client with its key plays it."""
        session = AgentSession(
            task,
            self.settings,
            self.context,
            default_reward=self.serving.unrewarded,
            parse_tool_calls=self._parse_tool_calls,
        )
        self._sessions[session.key] = session
        return session

    def close_session(self, session: AgentSession) -> None:
        """Close a session, so that its key is unknown from now on. Idempotent."""
        session.close()
        self._sessions.pop(session.key, None)
        self._outside_keys.discard(session.key)
        if session in self._offered_sessions:
            self._offered_sessions.remove(session)

    def offer_session(self, session: AgentSession) -> None:
        """Offer a session to the next client that requests an episode with the token."""
        self._offered_sessions.append(session)

    # -- over HTTP ---------------------------------------------------------------------------------

    @web.middleware
    async def _handle_errors(self, request: web.Request, handler: Any) -> web.StreamResponse:
        try:
            return await handler(request)
        except ApiError as error:
            refused = error
        except web.HTTPException as error:
            refused = ApiError(
                f"{request.method} {request.path}: {error.reason}", status=error.status
            )
        except Exception as error:
            if not _is_disconnected(request):
                self.context.report_event("serving_failed", path=request.path, error=repr(error))
            refused = ApiError(f"internal error: {error!r}", status=500, error_type="server_error")
        # The official clients read this header to decide whether to retry.
        headers = {"x-should-retry": "true" if refused.can_retry else "false"}
        write = build_anthropic_error if _is_anthropic_client(request) else build_openai_error
        response = web.json_response(write(refused), status=refused.status, headers=headers)
        if refused.status == 401:
            self._admitted_connections.discard(request.protocol)
        if request.content.exception() is not None:
            response.force_close()  # nothing behind a body that cannot be read is a request
        if request.protocol not in self._admitted_connections:
            # A client without a key must not hold one of `serving.max_connections`.
            response.force_close()
        return response

    def _read_key(self, request: web.Request) -> str:
        if "x-api-key" in request.headers:
            return request.headers["x-api-key"].strip()
        kind, _, key = request.headers.get("Authorization", "").partition(" ")
        return key.strip() if kind.lower() == "bearer" else ""

    def _require_session(self, request: web.Request) -> AgentSession:
        session = self._sessions.get(self._read_key(request))
        if session is None:
            raise build_closed_error()
        self._admitted_connections.add(request.protocol)
        return session

    async def _read_body(self, request: web.Request) -> Any:
        try:
            async with asyncio.timeout(READ_SECONDS):
                body = await request.read()
        except TimeoutError:
            raise ApiError(f"the body took longer than {READ_SECONDS:g} s", status=408) from None
        except web.RequestPayloadError as error:
            raise ApiError(f"the body cannot be read: {' '.join(str(error).split())}") from error
        try:
            return await run_off_loop(REAL_WORLD.threads, len(body), decode_json, body)
        except MalformedError as error:
            raise ApiError(f"the body is not JSON: {error}") from error

    def _check_list_lengths(self, **lists: Sequence[Any]) -> None:
        for name, items in lists.items():
            if len(items) > MAX_MESSAGES:
                raise ApiError(
                    f"{len(items)} {name}, more than the {MAX_MESSAGES} of a request", param=name
                )

    async def _handle_conversation(
        self, dialect: ApiDialect, request: web.Request
    ) -> web.StreamResponse:
        session = self._require_session(request)
        asked = dialect.parse_request(
            await self._read_body(request), self.settings, session.stored_conversations
        )
        self._check_list_lengths(messages=asked.messages, tools=asked.tools)
        async with session.answer_chat(session.parse_messages(asked.messages), asked) as (
            sampled,
            message,
        ):
            answer = self._build_response(dialect.id_prefix, sampled, message)
            body = dialect.build_body(asked, answer)
            events = dialect.iter_events(asked, body) if asked.stream else None
            response = await _send_answer(request, body, events, dialect.stream_end)
            if asked.stored_conversation is not None:
                session.stored_conversations[answer.id] = [*asked.stored_conversation, message]
        return response

    async def _handle_completion(self, request: web.Request) -> web.StreamResponse:
        session = self._require_session(request)
        asked = parse_completion_request(await self._read_body(request), self.settings)
        async with session.answer_completion(
            asked.single_prompt, asked.max_tokens, parse_stop_strings(asked.stop)
        ) as sampled:
            body = build_completion_body(asked, self._build_response("cmpl", sampled, {}))
            events = iter_completion_events(asked, body) if asked.stream else None
            return await _send_answer(request, body, events, STREAM_DONE)

    async def _handle_count_tokens(self, request: web.Request) -> web.Response:
        session = self._require_session(request)
        asked: AgentRequest = parse_count_request(await self._read_body(request), self.settings)
        self._check_list_lengths(messages=asked.messages, tools=asked.tools)
        return web.json_response({"input_tokens": await session.count_prompt_tokens(asked)})

    def _build_response(
        self, id_prefix: str, sampled: SampledAnswer, message: dict[str, Any]
    ) -> AgentResponse:
        return AgentResponse(
            f"{id_prefix}-{sampled.answer_name}",
            MODEL_NAME,
            sampled,
            message,
            lambda: [self.context.renderer.decode([token]) for token in sampled.token_ids],
        )

    async def _handle_models(self, request: web.Request) -> web.Response:
        if not self._has_token(request):
            self._require_session(request)
        if _is_anthropic_client(request) and "name" not in request.match_info:
            return web.json_response(build_anthropic_models(MODEL_NAME))
        model = {
            "id": MODEL_NAME,
            "object": "model",
            "created": 0,
            "owned_by": "r3async",
        }
        name = request.match_info.get("name")
        if name:
            if name != model["id"]:
                raise ApiError(
                    f"The model {name!r} does not exist", status=404, code="model_not_found"
                )
            return web.json_response(model)
        return web.json_response({"object": "list", "data": [model]})

    async def _handle_reward(self, request: web.Request) -> web.Response:
        """Handle `{"reward": x}` for the episode, with `"turn": i` (or `"id"`, an answer's
        id) for one answer.

        `"done": true` ends the episode.
        """
        session = self._require_session(request)
        body = await self._read_body(request)
        if not isinstance(body, dict) or not ("reward" in body or body.get("done")):
            raise ApiError(
                'the body must be {"reward": number}, and may have "turn" or "id", and "done"',
                param="reward",
            )
        refuse_unknown_fields(body, ("reward", "turn", "id", "done"))
        turn = body.get("turn")
        if turn is None and "id" in body:
            turn = _find_turn(body["id"], session)
        try:
            if "reward" in body:
                session.set_reward(body["reward"], turn)
        except ValueError as error:
            raise ApiError(str(error), param="reward") from error
        summary = self._summarize_session(session)
        if body.get("done"):
            self.close_session(session)
        return web.json_response(summary)

    async def _handle_session(self, request: web.Request) -> web.Response:
        return web.json_response(self._summarize_session(self._require_session(request)))

    def _summarize_session(self, session: AgentSession) -> dict[str, Any]:
        return {
            "episode": session.task.trajectory_id,
            "task_seed": session.task.task_seed,
            "turns": session.turn_count,
            "reward": session.total_reward if session.is_rewarded else None,
        }

    def _has_token(self, request: web.Request) -> bool:
        # A header may be any bytes; those that are no text are surrogates.
        shown = self._read_key(request).encode(errors="surrogateescape")
        admitted = self.serving.enabled and secrets.compare_digest(shown, self.token.encode())
        if admitted:
            self._admitted_connections.add(request.protocol)
        return admitted

    async def _handle_new_session(self, request: web.Request) -> web.Response:
        """Answer with a new session that is not trained, given `task_seed`; else with the next
        episode that waits."""
        if not self._has_token(request):
            message = (
                "this takes the token of serving.token"
                if self.serving.enabled
                else "serving.enabled is false"
            )
            raise ApiError(
                message, status=401, code="invalid_api_key", error_type="authentication_error"
            )
        body = await self._read_body(request) if request.can_read_body else {}
        if not isinstance(body, dict):
            raise ApiError('the body must be {"task_seed": number}, {} or empty', param="task_seed")
        refuse_unknown_fields(body, ("task_seed",))
        seed = body.get("task_seed")
        if seed is None:
            if not self._offered_sessions:
                raise ApiError(
                    (
                        'no episode waits for an agent (the run\'s env.name is "agent-outside", '
                        "and it has one): ask again"
                    ),
                    status=503,
                    error_type="server_error",
                    code="no_episode",
                    can_retry=True,
                )
            session = self._offered_sessions.popleft()
        else:
            try:
                seed = to_bounded_int(seed, 0, 2**63 - 1)
            except ValueError as error:
                raise ApiError(f"task_seed {error}", param="task_seed") from error
            if len(self._outside_keys) >= self.serving.max_sessions:
                raise ApiError(
                    f"serving.max_sessions = {self.serving.max_sessions} are open",
                    status=429,
                    code="too_many_sessions",
                )
            session = self.open_session(OutsideTask(next(self._outside_numbers), 0, seed))
            self._outside_keys.add(session.key)
            asyncio.get_running_loop().call_later(
                self.settings.timeout, self.close_session, session
            )
        response = web.json_response(
            {"key": session.key, "base_url": self.base_url, **self._summarize_session(session)}
        )
        try:
            await _send_response(request, response)
        except BaseException:
            # No client has its key: it waits for the next client, or ends.
            if session.key in self._outside_keys:
                self.close_session(session)
            elif not session.closed.is_set():
                self._offered_sessions.appendleft(session)
            raise
        return response


async def _send_answer(
    request: web.Request,
    body: dict[str, Any],
    events: Iterable[tuple[str, dict[str, Any]]] | None,
    stream_end: bytes,
) -> web.Response:
    """Send an answer as `body`, or as a stream of `events`, if the client asked for one.

    All events are in one response: the engine returns whole answers, and half an answer is useless.
    """
    if events is None:
        response = web.json_response(body)
    else:
        named = [(f"event: {name}\n" if name else "", json.dumps(data)) for name, data in events]
        text = "".join(f"{head}data: {data}\n\n" for head, data in named)
        headers = {"Content-Type": "text/event-stream", "Cache-Control": "no-cache"}
        response = web.Response(body=text.encode() + stream_end, headers=headers)
    await _send_response(request, response)
    return response


async def _send_response(request: web.Request, response: web.Response) -> None:
    """Send a response. Raises `ConnectionError` if the client has disconnected."""
    await response.prepare(request)
    await response.write_eof()


def _is_disconnected(request: web.Request) -> bool:
    return request.transport is None or request.transport.is_closing()


def _is_anthropic_client(request: web.Request) -> bool:
    """Return True if the client expects errors in Anthropic's form."""
    return "anthropic-version" in request.headers or request.path.startswith("/v1/messages")


def _find_turn(answer_id: Any, session: AgentSession) -> int:
    """Return the turn of the answer with that id. Raises `ApiError` if it is no id of an answer
    in this episode."""
    kind, _, name = answer_id.partition("-") if isinstance(answer_id, str) else ("", "", "")
    turn = session.find_turn(name) if kind in _ANSWER_ID_PREFIXES else -1
    if turn < 0:
        raise ApiError(
            f"{format_value(answer_id)} is not the id of an answer in this episode", param="id"
        )
    return turn
