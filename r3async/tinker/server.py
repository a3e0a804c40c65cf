"""The HTTP server of the Tinker API: paths, keys and errors. It listens on loopback by default and
answers nothing without its key."""

from __future__ import annotations

import asyncio
import inspect
import secrets
from collections.abc import Awaitable, Callable, Iterable
from typing import Any

from aiohttp import web

from r3async.config import ConfigError, bracket_ipv6, strip_brackets
from r3async.rollout.endpoint.connections import limit_connections, make_runner
from r3async.tinker.protocol import (
    PROTOBUF,
    ApiError,
    CreateSampler,
    Named,
    SampleRequest,
    decode_request,
    encode_result,
)
from r3async.tinker.service import TinkerService
from r3async.world.threads import run_off_loop

KEY_PREFIX = "tml-"
"""The SDK takes no other key."""
MAX_BODY_BYTES = 256 * 2**20
"""An SDK sends about 5 MB at a time, but a single datum whole."""
MAX_CONNECTIONS = 4096
READ_SECONDS = 60.0
SHUTDOWN_SECONDS = 2.0
ROOT = "/api/v1/"
CLIENT_CONFIG = {
    "parallel_fwdbwd_chunks": True,
    "fwdbwd_max_chunk_len": 1024,
    "proto_compress_fwdbwd": False,
    "sample_use_retrieve_futures": False,
    "custom_loss_server_side": False,
}
"""How the SDK is to speak to this server."""
MODEL_PATHS = (
    "create_model",
    "forward",
    "forward_backward",
    "optim_step",
    "save_weights",
    "save_weights_for_sampler",
    "load_weights",
)

Handler = Callable[[web.Request], Awaitable[web.Response]]


class TinkerServer:
    """A server that answers with what a service does. `key` is one of its own if it is empty.

    Raises `ConfigError` for a key that the SDK does not take.
    """

    def __init__(
        self, service: TinkerService, *, key: str = "", host: str = "127.0.0.1", port: int = 0
    ):
        if key and not key.startswith(KEY_PREFIX):
            raise ConfigError(f"the key must begin with {KEY_PREFIX!r}: the SDK takes no other")
        self.key = key or KEY_PREFIX + secrets.token_urlsafe(32)
        self.base_url = ""
        """What clients export as `TINKER_BASE_URL`; known after `start`."""
        self.service = service
        self._host = host
        self._port = port
        self._runner: web.AppRunner | None = None
        self._sweeper: asyncio.Task[None] | None = None
        self._admitted: set[web.RequestHandler] = set()

    async def start(self) -> None:
        """Continue what an earlier server took, and listen. Raises `ConfigError` if that is not
        possible."""
        await self.service.training.recover()
        app = web.Application(client_max_size=MAX_BODY_BYTES, middlewares=[self._handle_errors])
        for path, handle in self._list_posts().items():
            app.router.add_post(ROOT + path, handle)
        for path, handle in self._list_gets().items():
            app.router.add_get(ROOT + path, handle)
        app.router.add_delete(
            ROOT + "training_runs/{model_id}/checkpoints/{checkpoint_id:.+}", self._delete_weights
        )
        self._runner = make_runner(
            app, read_timeout=READ_SECONDS, shutdown_timeout=SHUTDOWN_SECONDS
        )
        await self._runner.setup()
        self._admitted = limit_connections(self._runner, MAX_CONNECTIONS)
        try:
            await web.TCPSite(self._runner, strip_brackets(self._host), self._port).start()
        except OSError as error:
            await self._runner.cleanup()
            raise ConfigError(
                f"{self._host}, port {self._port} cannot be listened on: "
                f"{error.strerror or error}; port 0 takes a free one"
            ) from error
        bound = self._runner.addresses[0]
        self.base_url = f"http://{bracket_ipv6(bound[0])}:{bound[1]}"
        self._sweeper = asyncio.create_task(self.service.sweep(), name="tinker sweep")

    async def stop(self) -> None:
        """Stop to listen, and end what runs."""
        if self._sweeper is not None:
            self._sweeper.cancel()
        if self._runner is not None:
            await self._runner.cleanup()
        await self.service.close()

    def _list_posts(self) -> dict[str, Handler]:
        service = self.service
        posts: dict[str, Handler] = {
            "client/config": _answer(CLIENT_CONFIG),
            "client/dynamic_config": _answer({"sample_cancel_enabled": True}),
            "telemetry": _answer({"status": "accepted"}),
            "create_session": self._read_and(Named, service.open_session),
            "session_heartbeat": self._read_and(Named, service.see_heartbeat),
            "sessions/{session_id}/finish": self._finish_session,
            "get_info": self._read_and(Named, service.describe_model),
            "weights_info": self._read_and(Named, service.describe_weights),
            "create_sampling_session": self._read_and(
                CreateSampler, service.sampling.create_sampler
            ),
            "asample": self._read_and(SampleRequest, service.sampling.sample),
            "retrieve_future": self._retrieve_future,
            "cancel_future": self._read_and(Named, service.cancel),
        }
        return posts | dict.fromkeys(MODEL_PATHS, self._submit)

    def _list_gets(self) -> dict[str, Handler]:
        served = self.service.parts.backend.served
        model = {
            "model_name": served.name,
            "max_context_length": served.max_tokens,
            "trainable": True,
            "sampleable": True,
        }
        return {
            "healthz": _answer({"status": "ok"}),
            "get_server_capabilities": _answer({"supported_models": [model]}),
            "samplers/{sampler_id}": self._match_and(self.service.describe_sampler),
            "training_runs": self._list_runs,
            "training_runs/{model_id}": self._match_and(self.service.describe_run),
            "training_runs/{model_id}/checkpoints": self._list_weights,
            "checkpoints": self._list_weights,
            "sessions": self._list_sessions,
            "sessions/{session_id}": self._match_and(self.service.describe_session),
        }

    def _read_and(self, kind: type[Any], function: Callable[[Any], Any]) -> Handler:
        """Return a handler that answers what the function returns for a body of that kind."""

        async def handle(request: web.Request) -> web.Response:
            body = await self._read(request, kind)
            found = function(body)
            return web.json_response(await found if inspect.isawaitable(found) else found)

        return handle

    def _match_and(self, function: Callable[..., dict[str, Any]]) -> Handler:
        """Return a handler that answers what the function returns for the parts of the path."""

        async def handle(request: web.Request) -> web.Response:
            return web.json_response(function(**request.match_info))

        return handle

    # -- requests ----------------------------------------------------------------------------------

    @web.middleware
    async def _handle_errors(self, request: web.Request, handler: Any) -> web.StreamResponse:
        try:
            key = request.headers.get("x-api-key", "").strip()
            if not secrets.compare_digest(key.encode(), self.key.encode()):
                raise ApiError("the key (x-api-key) is not the server's", status=401)
            self._admitted.add(request.protocol)
            return await handler(request)
        except ApiError as error:
            refused = error
        except web.HTTPException as error:
            what = f"{request.method} {request.path}"
            refused = ApiError(f"{what} is not supported: {error.reason}", status=error.status)
        except Exception as error:
            self.service.parts.report_event(
                "tinker_request_failed", path=request.path, error=repr(error)
            )
            refused = ApiError(f"internal error: {error!r}", status=500, category="server")
        body = encode_result(refused, protobuf=False).body
        response = web.Response(body=body, content_type="application/json", status=refused.status)
        if request.protocol not in self._admitted or request.content.exception() is not None:
            response.force_close()
        return response

    async def _read(self, request: web.Request, kind: type[Any]) -> Any:
        body = await request.read()
        threads = self.service.parts.world.threads
        return await run_off_loop(threads, len(body), decode_request, body, kind)

    async def _submit(self, request: web.Request) -> web.Response:
        path = request.path.removeprefix(ROOT)
        protobuf = PROTOBUF in request.content_type
        body = await request.read()
        request_id, model_id = await self.service.training.submit(path, body, protobuf=protobuf)
        return web.json_response({"request_id": request_id, "model_id": model_id})

    async def _finish_session(self, request: web.Request) -> web.Response:
        await self.service.close_session(request.match_info["session_id"])
        return web.json_response({})

    async def _retrieve_future(self, request: web.Request) -> web.Response:
        body: Named = await self._read(request, Named)
        protobuf = PROTOBUF in request.headers.get("accept", "")
        answer = await self.service.poll(body.request_id, protobuf=protobuf)
        if answer is None:
            again = {"type": "try_again", "request_id": body.request_id, "queue_state": "active"}
            return web.json_response(again)
        return web.Response(body=answer.body, content_type=answer.content_type)

    # -- listings ----------------------------------------------------------------------------------

    async def _list_runs(self, request: web.Request) -> web.Response:
        shown, cursor = _select_page(request, self.service.training.models)
        runs = [self.service.describe_run(model_id) for model_id in shown]
        return web.json_response({"training_runs": runs, "cursor": cursor})

    async def _list_weights(self, request: web.Request) -> web.Response:
        found = await self.service.list_weights(request.match_info.get("model_id"))
        shown, cursor = _select_page(request, found)
        return web.json_response({"checkpoints": shown, "cursor": cursor})

    async def _delete_weights(self, request: web.Request) -> web.Response:
        await self.service.delete_weights(**request.match_info)
        return web.json_response({})

    async def _list_sessions(self, request: web.Request) -> web.Response:
        shown, _ = _select_page(request, self.service.parts.sessions.sessions)
        return web.json_response({"sessions": shown})


def _answer(body: dict[str, Any]) -> Handler:
    async def handle(request: web.Request) -> web.Response:
        return web.json_response(body)

    return handle


def _select_page(request: web.Request, items: Iterable[Any]) -> tuple[list[Any], dict[str, int]]:
    found = list(items)
    try:
        offset = int(request.query.get("offset", "0"))
        limit = int(request.query.get("limit", "100"))
    except ValueError:
        raise ApiError("offset and limit have to be numbers") from None
    if offset < 0 or limit < 0:
        raise ApiError("offset and limit must be 0 or more")
    cursor = {"offset": offset, "limit": limit, "total_count": len(found)}
    return found[offset : offset + limit], cursor
