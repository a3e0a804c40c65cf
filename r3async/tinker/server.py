"""The HTTP server of the Tinker API: paths, keys and errors. It listens on loopback by default and
answers nothing without its key."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import msgspec
from aiohttp import web

from r3async.config import ConfigError, bracket_ipv6, strip_brackets
from r3async.rollout.endpoint.connections import limit_connections, make_runner
from r3async.tinker import protocol
from r3async.tinker.backend import TinkerBackend
from r3async.tinker.protocol import PROTOBUF, ApiError, build_error_body, decode_request
from r3async.tinker.service import KEPT_BYTES, TinkerService
from r3async.transport.null_socket import run_off_loop
from r3async.world import EventReporter, World, ignore_event
from r3async.world.real import REAL_WORLD

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

Handler = Callable[[web.Request], Awaitable[web.Response]]


class _Metadata(msgspec.Struct):
    user_metadata: dict[str, Any] | None = None


class _SessionId(msgspec.Struct):
    session_id: str


class _ModelId(msgspec.Struct):
    model_id: str


class _RequestId(msgspec.Struct):
    request_id: str


class _TinkerPath(msgspec.Struct):
    tinker_path: str


class TinkerServer:
    """A server of a backend. `key` is one of its own if it is empty.

    Raises `ConfigError` for a key that the SDK does not take.
    """

    def __init__(
        self,
        backend: TinkerBackend,
        directory: Path,
        *,
        key: str = "",
        host: str = "127.0.0.1",
        port: int = 0,
        kept_bytes: int = KEPT_BYTES,
        report_event: EventReporter = ignore_event,
        world: World = REAL_WORLD,
    ):
        if key and not key.startswith(KEY_PREFIX):
            raise ConfigError(f"the key must begin with {KEY_PREFIX!r}: the SDK takes no other")
        self.key = key or KEY_PREFIX + secrets.token_urlsafe(32)
        self.base_url = ""
        """What clients export as `TINKER_BASE_URL`; known after `start`."""
        self.service = TinkerService(
            backend, directory, world, kept_bytes=kept_bytes, report_event=report_event
        )
        self._host = host
        self._port = port
        self._world = world
        self._report_event = report_event
        self._runner: web.AppRunner | None = None
        self._sweeper: asyncio.Task[None] | None = None
        self._admitted: set[web.RequestHandler] = set()

    async def start(self) -> None:
        """Start to listen. Raises `ConfigError` if that is not possible."""
        app = web.Application(client_max_size=MAX_BODY_BYTES, middlewares=[self._handle_errors])
        for path, post in self._list_posts().items():
            app.router.add_post(ROOT + path, post)
        for path, get in self._list_gets().items():
            app.router.add_get(ROOT + path, get)
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
        """Stop to listen, and end what runs. Saved weights and kept sequences stay."""
        if self._sweeper is not None:
            self._sweeper.cancel()
        if self._runner is not None:
            await self._runner.cleanup()
        await self.service.close()

    def _list_posts(self) -> dict[str, Handler]:
        return {
            "client/config": _answer(CLIENT_CONFIG),
            "client/dynamic_config": _answer({"sample_cancel_enabled": True}),
            "telemetry": _answer({"status": "accepted"}),
            "create_session": self._create_session,
            "session_heartbeat": self._heartbeat,
            "sessions/{session_id}/finish": self._finish_session,
            "create_model": self._create_model,
            "get_info": self._get_info,
            "forward": self._train,
            "forward_backward": self._train,
            "optim_step": self._optim_step,
            "save_weights": self._save_weights,
            "save_weights_for_sampler": self._save_weights_for_sampler,
            "load_weights": self._load_weights,
            "weights_info": self._weights_info,
            "create_sampling_session": self._create_sampler,
            "asample": self._sample,
            "retrieve_future": self._retrieve_future,
            "cancel_future": self._cancel_future,
        }

    def _list_gets(self) -> dict[str, Handler]:
        served = self.service.backend.served
        model = {
            "model_name": served.name,
            "max_context_length": served.max_tokens,
            "trainable": True,
            "sampleable": True,
        }
        return {
            "healthz": _answer({"status": "ok"}),
            "get_server_capabilities": _answer({"supported_models": [model]}),
            "samplers/{sampler_id}": self._get_sampler,
            "training_runs": self._list_runs,
            "training_runs/{model_id}": self._get_run,
            "training_runs/{model_id}/checkpoints": self._list_weights,
            "checkpoints": self._list_weights,
            "sessions": self._list_sessions,
            "sessions/{session_id}": self._get_session,
        }

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
            if error.number is not None:
                self.service.refuse(error.number, error)
            refused = error
        except web.HTTPException as error:
            what = f"{request.method} {request.path}"
            refused = ApiError(f"{what} is not supported: {error.reason}", status=error.status)
        except Exception as error:
            self._report_event("tinker_request_failed", path=request.path, error=repr(error))
            refused = ApiError(f"internal error: {error!r}", status=500, category="server")
        response = web.json_response(build_error_body(refused), status=refused.status)
        if request.protocol not in self._admitted or request.content.exception() is not None:
            response.force_close()
        return response

    async def _read(self, request: web.Request, kind: type[Any]) -> Any:
        body = await request.read()
        return await run_off_loop(self._world.threads, len(body), decode_request, body, kind)

    async def _train(self, request: web.Request) -> web.Response:
        body = await request.read()
        is_proto = PROTOBUF in request.content_type
        parse = protocol.parse_proto_training if is_proto else protocol.parse_json_training
        training = await run_off_loop(self._world.threads, len(body), parse, body)
        return _promise(self.service.train(training), training.model_id)

    async def _create_session(self, request: web.Request) -> web.Response:
        metadata = (await self._read(request, _Metadata)).user_metadata
        session_id = self.service.open_session(metadata)
        return web.json_response({"type": "create_session", "session_id": session_id})

    async def _heartbeat(self, request: web.Request) -> web.Response:
        body: _SessionId = await self._read(request, _SessionId)
        self.service.sessions.find_session(body.session_id)
        return web.json_response({"type": "session_heartbeat"})

    async def _finish_session(self, request: web.Request) -> web.Response:
        await self.service.close_session(request.match_info["session_id"])
        return web.json_response({})

    async def _create_model(self, request: web.Request) -> web.Response:
        return _promise(*self.service.create_model(await self._read(request, protocol.CreateModel)))

    async def _get_info(self, request: web.Request) -> web.Response:
        body: _ModelId = await self._read(request, _ModelId)
        return web.json_response(self.service.describe_model(body.model_id))

    async def _optim_step(self, request: web.Request) -> web.Response:
        body: protocol.OptimStep = await self._read(request, protocol.OptimStep)
        return _promise(self.service.optim_step(body), body.model_id)

    async def _save_weights(self, request: web.Request) -> web.Response:
        body: protocol.SaveWeights = await self._read(request, protocol.SaveWeights)
        return _promise(self.service.save_weights(body), body.model_id)

    async def _save_weights_for_sampler(self, request: web.Request) -> web.Response:
        body: protocol.SaveWeights = await self._read(request, protocol.SaveWeights)
        return _promise(self.service.save_weights_for_sampler(body), body.model_id)

    async def _load_weights(self, request: web.Request) -> web.Response:
        return _promise(*self.service.load_weights(await self._read(request, protocol.LoadWeights)))

    async def _weights_info(self, request: web.Request) -> web.Response:
        body: _TinkerPath = await self._read(request, _TinkerPath)
        return web.json_response(self.service.describe_weights(body.tinker_path))

    async def _create_sampler(self, request: web.Request) -> web.Response:
        sampler_id = await self.service.create_sampler(
            await self._read(request, protocol.CreateSampler)
        )
        return web.json_response(
            {"type": "create_sampling_session", "sampling_session_id": sampler_id}
        )

    async def _sample(self, request: web.Request) -> web.Response:
        request_id, names = self.service.sample(await self._read(request, protocol.SampleRequest))
        return web.json_response({"request_id": request_id, "sample_sequence_ids": names})

    async def _retrieve_future(self, request: web.Request) -> web.Response:
        body: _RequestId = await self._read(request, _RequestId)
        result = await self.service.futures.poll(body.request_id)
        if result is None:
            again = {"type": "try_again", "request_id": body.request_id, "queue_state": "active"}
            return web.json_response(again)
        if isinstance(result, ApiError):
            status = result.status if result.status == 410 else 200
            return web.json_response(build_error_body(result), status=status)
        protobuf = PROTOBUF in request.headers.get("accept", "")
        data, content_type = protocol.encode_result(result, protobuf=protobuf)
        return web.Response(body=data, content_type=content_type)

    async def _cancel_future(self, request: web.Request) -> web.Response:
        body: _RequestId = await self._read(request, _RequestId)
        self.service.futures.cancel(body.request_id)
        return web.json_response({})

    # -- listings ----------------------------------------------------------------------------------

    async def _get_sampler(self, request: web.Request) -> web.Response:
        sampler = self.service.find_sampler(request.match_info["sampler_id"])
        return web.json_response(
            {
                "sampler_id": sampler.sampler_id,
                "base_model": self.service.backend.served.name,
                "model_path": sampler.model_path,
            }
        )

    async def _list_runs(self, request: web.Request) -> web.Response:
        models = list(self.service.sessions.models.values())
        shown, cursor = _select_page(request, models)
        runs = [self.service.describe_run(model) for model in shown]
        return web.json_response({"training_runs": runs, "cursor": cursor})

    async def _get_run(self, request: web.Request) -> web.Response:
        model = self.service.sessions.models.get(request.match_info["model_id"])
        if model is None:
            raise ApiError("there is no such training run, or no more", status=404)
        return web.json_response(self.service.describe_run(model))

    async def _list_weights(self, request: web.Request) -> web.Response:
        found = await self.service.list_weights(request.match_info.get("model_id"))
        shown, cursor = _select_page(request, found)
        return web.json_response({"checkpoints": shown, "cursor": cursor})

    async def _delete_weights(self, request: web.Request) -> web.Response:
        await self.service.delete_weights(**request.match_info)
        return web.json_response({})

    async def _list_sessions(self, request: web.Request) -> web.Response:
        shown, _ = _select_page(request, list(self.service.sessions.sessions))
        return web.json_response({"sessions": shown})

    async def _get_session(self, request: web.Request) -> web.Response:
        session = self.service.sessions.find_session(request.match_info["session_id"])
        models = self.service.sessions.models.values()
        samplers = self.service.sessions.samplers.values()
        of_session = session.session_id
        return web.json_response(
            {
                "training_run_ids": [m.model_id for m in models if m.session_id == of_session],
                "sampler_ids": [s.sampler_id for s in samplers if s.session_id == of_session],
            }
        )


def _answer(body: dict[str, Any]) -> Handler:
    async def handle(request: web.Request) -> web.Response:
        return web.json_response(body)

    return handle


def _promise(request_id: str, model_id: str) -> web.Response:
    return web.json_response({"request_id": request_id, "model_id": model_id})


def _select_page(request: web.Request, items: list[Any]) -> tuple[list[Any], dict[str, int]]:
    try:
        offset = int(request.query.get("offset", "0"))
        limit = int(request.query.get("limit", "100"))
    except ValueError:
        raise ApiError("offset and limit have to be numbers") from None
    if offset < 0 or limit < 0:
        raise ApiError("offset and limit must be 0 or more")
    cursor = {"offset": offset, "limit": limit, "total_count": len(items)}
    return items[offset : offset + limit], cursor
