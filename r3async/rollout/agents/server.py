"""The endpoint: HTTP around sessions. Loopback by default, and nothing is answered without a key."""

from __future__ import annotations

import asyncio
import functools
import itertools
import json
import logging
import secrets
import socket
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from aiohttp import web

from r3async.config import ConfigError, EpisodeConfig, ServingConfig, bare_host, in_url
from r3async.rollout.agents.anthropic_messages import MESSAGES, anthropic_error, anthropic_models, read_count
from r3async.rollout.agents.chat_completions import (
    CHAT,
    DONE,
    completion_answer,
    completion_events,
    read_completion,
)
from r3async.rollout.agents.protocol import (
    Answer,
    Asked,
    Edge,
    Refused,
    Sampled,
    openai_error,
    stop_strings,
)
from r3async.rollout.agents.responses import RESPONSES
from r3async.rollout.agents.session import Session, closed_refusal
from r3async.rollout.agents.tool_parsers import Parse, builtin, tool_parser
from r3async.rollout.chat import ChatRenderer
from r3async.rollout.engines import Engine
from r3async.rollout.episode import EpisodeTask
from r3async.transport.sockets import off_loop
from r3async.untrusted import Malformed, decode_json, whole_number
from r3async.world.real import REAL

STOP_SECONDS = 2.0
MAX_HEADERS = 64
MAX_HEADER_BYTES = 8190
"""Of one header, and of the request line."""
AIOHTTP_LOG = logging.getLogger(f"{__name__}.aiohttp")
AIOHTTP_LOG.setLevel(logging.CRITICAL)
"""What handlers raise is reported. The rest is what comes from strangers and is no HTTP, with a traceback each."""

EDGES = {"/v1/chat/completions": CHAT, "/v1/responses": RESPONSES, "/v1/messages": MESSAGES}
COUNT = "/v1/messages/count_tokens"
_KINDS = (*(edge.kind for edge in EDGES.values()), "cmpl")
"""What the ids of answers begin with."""


class OutsideTask(EpisodeTask, frozen=True):
    """An episode that no lease asked for; it is never trained. `group_index` counts them."""

    @property
    def trajectory_id(self) -> str:
        return f"outside{self.group_index}"


def limit_connections(server: web.Server, most: int) -> set[web.RequestHandler]:
    """Have `server` keep at most `most` connections: beyond them, each new one takes the place of the oldest that is not in the
    set which this returns, and is closed at once if all are."""
    admitted: set[web.RequestHandler] = set()
    accept, forget = server.connection_made, server.connection_lost

    def connection_made(handler: web.RequestHandler, transport: asyncio.Transport) -> None:
        transports = {other: other.transport for other in server.connections}
        open_ones = {other: at for other, at in transports.items() if at is not None and not at.is_closing()}
        if len(open_ones) >= most:
            next((at for other, at in open_ones.items() if other not in admitted), transport).abort()
        accept(handler, transport)

    def connection_lost(handler: web.RequestHandler, exc: BaseException | None = None) -> None:
        admitted.discard(handler)
        forget(handler, exc)

    server.connection_made = connection_made  # type: ignore[method-assign]
    server.connection_lost = connection_lost  # type: ignore[method-assign]
    return admitted


class AgentServer:
    """Serves sessions of one engine, on its event loop.

    `open` and `close` are for the process that plays leased episodes. If `serving.enabled`, whoever has `token` may take an
    episode that waits for an agent (`offer`), or begin one of his own that is not trained. `report(event, **fields)` gets
    errors of our own.
    """

    def __init__(
        self,
        engine: Engine,
        renderer: ChatRenderer,
        episode: EpisodeConfig,
        serving: ServingConfig,
        *,
        generator_id: str = "",
        report: Callable[..., object] = lambda event, **fields: None,
        clock: Callable[[], float] = REAL.clock.time,
    ):
        self.settings, self.serving, self._clock = episode, serving, clock
        self.base_url = ""
        """Ends in `/v1`; known once started."""
        self.token = serving.token.reveal("serving.token") or secrets.token_urlsafe(32)
        self._engine, self._renderer = engine, renderer
        self._parse: Parse = builtin
        self._generator_id, self._report = generator_id, report
        self._sessions: dict[str, Session] = {}
        self._outside: set[str] = set()
        self._offered: deque[Session] = deque()
        self._serial = itertools.count()
        self._runner: web.AppRunner | None = None
        self._admitted: set[web.RequestHandler] = set()
        """Connections that have shown a key, or the token."""

    async def start(self) -> None:
        """Listen. Raises `ConfigError` if `serving.host` and `serving.port`, or `serving.tool_parser`, cannot be had."""
        self._parse = await tool_parser(self.serving.tool_parser, self._engine, self._renderer, self._report)
        app = web.Application(client_max_size=self.serving.max_body_bytes, middlewares=[self._answer_errors])
        for path, edge in EDGES.items():
            app.router.add_post(path, functools.partial(self._converse, edge))
        app.router.add_post(COUNT, self._count)
        app.router.add_post("/v1/completions", self._complete)
        app.router.add_get("/v1/models", self._models)
        app.router.add_get("/v1/models/{name}", self._models)
        app.router.add_post("/v1/r3async/reward", self._reward)
        app.router.add_get("/v1/r3async/session", self._describe)
        app.router.add_post("/v1/r3async/sessions", self._begin)
        # An agent that hangs up aborts what it asked for. A connection has `keepalive_timeout` for the head of each request.
        self._runner = web.AppRunner(
            app,
            handler_cancellation=True,
            access_log=None,
            logger=AIOHTTP_LOG,
            shutdown_timeout=STOP_SECONDS,
            keepalive_timeout=self.serving.read_timeout,
            max_line_size=MAX_HEADER_BYTES,
            max_field_size=MAX_HEADER_BYTES,
            max_headers=MAX_HEADERS,
            lingering_time=STOP_SECONDS,
        )
        await self._runner.setup()
        assert self._runner.server is not None
        self._admitted = limit_connections(self._runner.server, self.serving.max_connections)
        host, port = self.serving.host, self.serving.port
        try:
            await web.TCPSite(self._runner, bare_host(host), port, backlog=self.serving.max_connections).start()
        except OSError as error:
            await self._runner.cleanup()
            raise ConfigError(
                f"`serving.host` = {host!r}, `serving.port` = {port} cannot be listened on: {error.strerror or error}; "
                "port 0 takes a free one"
            ) from error
        bound = self._runner.addresses[0]
        reach = {"0.0.0.0": socket.gethostname(), "::": socket.gethostname()}.get(bound[0], bound[0])
        self.base_url = f"http://{in_url(reach)}:{bound[1]}/v1"

    async def stop(self) -> None:
        """Close every session and the socket; running requests are aborted."""
        for session in list(self._sessions.values()):
            self.close(session)
        if self._runner is not None:
            await self._runner.cleanup()

    # -- in this process -----------------------------------------------------------------------------------------

    def open(self, task: EpisodeTask) -> Session:
        """Begin an episode; whoever has its key plays it."""
        session = Session(
            task,
            self._engine,
            self._renderer,
            self.settings,
            generator_id=self._generator_id,
            unrewarded=self.serving.unrewarded,
            parse=self._parse,
            clock=self._clock,
            report=self._report,
        )
        self._sessions[session.key] = session
        return session

    def close(self, session: Session) -> None:
        """End it: its key is unknown from now on. May be called twice."""
        session.close()
        self._sessions.pop(session.key, None)
        self._outside.discard(session.key)
        if session in self._offered:
            self._offered.remove(session)

    def offer(self, session: Session) -> None:
        """Hand it to the next one who asks for an episode with the token."""
        self._offered.append(session)

    # -- over HTTP -----------------------------------------------------------------------------------------------

    @web.middleware
    async def _answer_errors(self, request: web.Request, handler: Any) -> web.StreamResponse:
        try:
            return await handler(request)
        except Refused as error:
            refused = error
        except web.HTTPException as error:
            refused = Refused(f"{request.method} {request.path}: {error.reason}", status=error.status)
        except Exception as error:
            if not _has_gone(request):
                self._report("serving_failed", path=request.path, error=repr(error))
            refused = Refused(f"internal error: {error!r}", status=500, kind="server_error")
        # What the official clients look at before they try again by themselves.
        headers = {"x-should-retry": "true" if refused.again else "false"}
        write = anthropic_error if _is_anthropic(request) else openai_error
        response = web.json_response(write(refused), status=refused.status, headers=headers)
        if refused.status == 401:
            self._admitted.discard(request.protocol)
        if request.protocol not in self._admitted:
            response.force_close()  # whoever has no key has no use for one of `serving.max_connections`
        return response

    def _bearer(self, request: web.Request) -> str:
        if "x-api-key" in request.headers:
            return request.headers["x-api-key"].strip()
        kind, _, key = request.headers.get("Authorization", "").partition(" ")
        return key.strip() if kind.lower() == "bearer" else ""

    def _session(self, request: web.Request) -> Session:
        session = self._sessions.get(self._bearer(request))
        if session is None:
            raise closed_refusal()
        self._admitted.add(request.protocol)
        return session

    async def _body(self, request: web.Request) -> Any:
        seconds = self.serving.read_timeout
        try:
            async with asyncio.timeout(seconds):
                body = await request.read()
        except TimeoutError:
            raise Refused(f"the body took longer than serving.read_timeout = {seconds:g} s", status=408) from None
        try:
            return await off_loop(REAL.threads, len(body), decode_json, body)
        except Malformed as error:
            raise Refused(f"the body is not JSON: {error}") from error

    def _refuse_many(self, **lists: Sequence[Any]) -> None:
        for name, items in lists.items():
            if len(items) > self.serving.max_messages:
                raise Refused(
                    f"{len(items)} {name}, more than serving.max_messages = {self.serving.max_messages}", param=name
                )

    async def _converse(self, edge: Edge, request: web.Request) -> web.StreamResponse:
        session = self._session(request)
        asked = edge.read(await self._body(request), self.settings, session.remembered)
        self._refuse_many(messages=asked.messages, tools=asked.tools)
        async with session.chat(session.read(asked.messages), asked) as (sampled, message):
            answer = self._answer(edge.kind, sampled, message)
            body = edge.write(asked, answer)
            response = _stream(edge.events(asked, body), edge.end) if asked.stream else web.json_response(body)
            await _hand_out(request, response)
            if asked.remembered is not None:
                session.remembered[answer.id] = [*asked.remembered, message]
        return response

    async def _complete(self, request: web.Request) -> web.StreamResponse:
        session = self._session(request)
        asked = read_completion(await self._body(request), self.settings)
        async with session.complete(asked.one_prompt, asked.max_tokens, stop_strings(asked.stop)) as sampled:
            body = completion_answer(asked, self._answer("cmpl", sampled, {}))
            response = _stream(completion_events(asked, body), DONE) if asked.stream else web.json_response(body)
            await _hand_out(request, response)
        return response

    async def _count(self, request: web.Request) -> web.Response:
        session = self._session(request)
        asked: Asked = read_count(await self._body(request), self.settings)
        self._refuse_many(messages=asked.messages, tools=asked.tools)
        return web.json_response({"input_tokens": await session.count(asked)})

    def _answer(self, kind: str, sampled: Sampled, message: dict[str, Any]) -> Answer:
        return Answer(
            f"{kind}-{sampled.name}",
            self.serving.model_name,
            sampled,
            message,
            lambda: [self._renderer.decode([token]) for token in sampled.token_ids],
        )

    async def _models(self, request: web.Request) -> web.Response:
        if not self._has_token(request):
            self._session(request)
        if _is_anthropic(request) and "name" not in request.match_info:
            return web.json_response(anthropic_models(self.serving.model_name))
        model = {"id": self.serving.model_name, "object": "model", "created": 0, "owned_by": "r3async"}
        if name := request.match_info.get("name"):
            if name != model["id"]:
                raise Refused(f"The model {name!r} does not exist", status=404, code="model_not_found")
            return web.json_response(model)
        return web.json_response({"object": "list", "data": [model]})

    async def _reward(self, request: web.Request) -> web.Response:
        """`{"reward": x}` for the episode, with `"turn": i` for one answer (or `"id"`, what that answer was called);
        `"done": true` ends it."""
        session = self._session(request)
        body = await self._body(request)
        if not isinstance(body, dict) or not ("reward" in body or body.get("done")):
            raise Refused(
                'the body must be {"reward": number}, and may have "turn" or "id", and "done"', param="reward"
            )
        turn = body.get("turn")
        if turn is None and "id" in body:
            turn = _turn_of(body["id"], session)
        try:
            if "reward" in body:
                session.reward(body["reward"], turn)
        except ValueError as error:
            raise Refused(str(error), param="reward") from error
        summary = self._summary(session)
        if body.get("done"):
            self.close(session)
        return web.json_response(summary)

    async def _describe(self, request: web.Request) -> web.Response:
        return web.json_response(self._summary(self._session(request)))

    def _summary(self, session: Session) -> dict[str, Any]:
        return {
            "episode": session.task.trajectory_id,
            "task_seed": session.task.task_seed,
            "turns": session.turns,
            "reward": session.total_reward if session.rewarded else None,
        }

    def _has_token(self, request: web.Request) -> bool:
        # A header may be any bytes; those that are no text are surrogates.
        shown = self._bearer(request).encode(errors="surrogateescape")
        admitted = self.serving.enabled and secrets.compare_digest(shown, self.token.encode())
        if admitted:
            self._admitted.add(request.protocol)
        return admitted

    async def _begin(self, request: web.Request) -> web.Response:
        """With `task_seed`: a session that is not trained. Without: the next episode that waits for an agent."""
        if not self._has_token(request):
            message = "this takes the token of serving.token" if self.serving.enabled else "serving.enabled is false"
            raise Refused(message, status=401, code="invalid_api_key", kind="authentication_error")
        body = await self._body(request) if request.can_read_body else {}
        seed = body.get("task_seed") if isinstance(body, dict) else None
        if seed is None:
            if not self._offered:
                raise Refused(
                    'no episode waits for an agent (the run\'s env.name is "agent-outside", and it has one): ask again',
                    status=503,
                    kind="server_error",
                    code="no_episode",
                    again=True,
                )
            session = self._offered.popleft()
        else:
            try:
                seed = whole_number(seed, 0, 2**63 - 1)
            except ValueError as error:
                raise Refused(f"task_seed {error}", param="task_seed") from error
            if len(self._outside) >= self.serving.max_sessions:
                raise Refused(
                    f"serving.max_sessions = {self.serving.max_sessions} are open", status=429, code="too_many_sessions"
                )
            session = self.open(OutsideTask(next(self._serial), 0, seed))
            self._outside.add(session.key)
            asyncio.get_running_loop().call_later(self.settings.timeout, self.close, session)
        response = web.json_response({"key": session.key, "base_url": self.base_url, **self._summary(session)})
        try:
            await _hand_out(request, response)
        except BaseException:
            # Nobody has its key: it waits for the next one, or ends.
            if session.key in self._outside:
                self.close(session)
            elif not session.closed.is_set():
                self._offered.appendleft(session)
            raise
        return response


def _stream(events: Iterable[tuple[str, dict[str, Any]]], end: bytes) -> web.Response:
    """In one piece: the engine answers at the end of an answer, and half of one is none."""
    named = [(f"event: {name}\n" if name else "", json.dumps(data)) for name, data in events]
    text = "".join(f"{head}data: {data}\n\n" for head, data in named)
    headers = {"Content-Type": "text/event-stream", "Cache-Control": "no-cache"}
    return web.Response(body=text.encode() + end, headers=headers)


async def _hand_out(request: web.Request, response: web.Response) -> None:
    """Send it. Raises `ConnectionError` if who asked has gone."""
    await response.prepare(request)
    await response.write_eof()


def _has_gone(request: web.Request) -> bool:
    return request.transport is None or request.transport.is_closing()


def _is_anthropic(request: web.Request) -> bool:
    """Whether whoever asks reads errors in Anthropic's form."""
    return "anthropic-version" in request.headers or request.path.startswith("/v1/messages")


def _turn_of(answer_id: Any, session: Session) -> int:
    """Raises `Refused` for what is no answer's id, or that of an answer in another episode."""
    kind, _, name = str(answer_id).partition("-")
    turn = session.turn_of(name) if kind in _KINDS else -1
    if turn < 0:
        raise Refused(f"{str(answer_id)[:100]!r} is not the id of an answer in this episode", param="id")
    return turn
