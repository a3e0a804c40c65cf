"""Serve the page of ongoing runs on this machine's loopback: `r3async report --serve`.

A request needs the token of the printed address. Host names of other machines are refused, so that
no web page can send requests through its reader's browser. Runs are read only while somebody looks
at them; see `views/live.py`.
"""

from __future__ import annotations

import asyncio
import hmac
import ipaddress
import secrets
import signal
import time
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import typer
from aiohttp import web

from r3async.rollout.endpoint.connections import limit_connections, make_runner
from r3async.views.episode_search import EpisodeQuery
from r3async.views.live import LiveRun
from r3async.views.report import LivePage, render_comparison_page, render_run_page
from r3async.views.report_tables import make_names_distinct
from r3async.views.templates import TEMPLATE_DIRECTORY

LOOPBACK_HOST = "127.0.0.1"
SHUTDOWN_SECONDS = 1.0
READ_TIMEOUT_SECONDS = 30.0
MAX_CONNECTIONS = 64
RESPONSE_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'unsafe-inline'; img-src data: blob:; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}
"""Headers of every response.

A page runs only our scripts, sends no requests elsewhere, and stays out of caches and
other pages' frames.
"""

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class LivePageServer:
    """The web server of live pages.

    Args:
        runs: Directories of runs; with several, the first page compares them.
        print_line: Called with a line about each page that could not be made.
    """

    def __init__(
        self, runs: Sequence[Path], token: str, print_line: Callable[[str], Any] = lambda line: None
    ):
        self.token = token
        self._print_line = print_line
        self._admitted_connections: set[web.RequestHandler] = set()
        """Connections that have sent the token."""
        self._runs = [LiveRun(run_dir) for run_dir in runs]
        self._read_lock = asyncio.Lock()
        """Lock around reading, because each request updates what is known of a run."""

    async def start(self, port: int) -> web.AppRunner:
        """Serve on a port of loopback until the returned runner is cleaned up. Raises `OSError` for
        a port that is not free."""
        runner = make_runner(
            self._build_app(), read_timeout=READ_TIMEOUT_SECONDS, shutdown_timeout=SHUTDOWN_SECONDS
        )
        await runner.setup()
        self._admitted_connections = limit_connections(runner, MAX_CONNECTIONS)
        try:
            await web.TCPSite(runner, LOOPBACK_HOST, port, backlog=MAX_CONNECTIONS).start()
        except OSError as error:
            await runner.cleanup()
            raise OSError(
                f"port {port} of {LOOPBACK_HOST} cannot be opened: "
                f"{error.strerror or error}; choose another"
            ) from error
        return runner

    def _build_app(self) -> web.Application:
        app = web.Application(middlewares=[self._guard_request])
        app.router.add_get("/", self.serve_page)
        app.router.add_get("/page", self.serve_page)
        app.router.add_get("/episodes", self.serve_episodes)
        app.router.add_get("/episode", self.serve_episode)
        app.router.add_get("/{name:uplot.js|report.js|live.js}", self.serve_script)
        app.on_cleanup.append(self._close_runs)
        return app

    @web.middleware
    async def _guard_request(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        if not _is_loopback(request.headers.get("Host", "")):
            answer: web.StreamResponse = web.Response(
                status=403, text="this page answers to the names of loopback only"
            )
        elif not hmac.compare_digest(request.query.get("token", "").encode(), self.token.encode()):
            answer = web.Response(
                status=403, text="the address lacks its token; it is where r3async was started"
            )
        else:
            self._admitted_connections.add(request.protocol)
            try:
                answer = await handler(request)
            except web.HTTPException as refusal:
                answer = web.Response(status=refusal.status, text=refusal.text)
            except Exception as error:
                self._print_line(f"{request.path} could not be made: {error!r}")
                answer = web.Response(status=500, text=f"the page could not be made: {error!r}")
        if request.protocol not in self._admitted_connections:
            answer.force_close()  # a client without the token must not hold a connection
        answer.headers.update(
            {name: value for name, value in RESPONSE_HEADERS.items() if name not in answer.headers}
        )
        return answer

    async def _close_runs(self, _: web.Application) -> None:
        for run in self._runs:
            run.close()

    async def serve_page(self, request: web.Request) -> web.StreamResponse:
        """Serve a whole page as it is now, with the processor time it took; 204 if the reader's
        `cursor` is current."""
        one = self._parse_run_number(request)
        async with self._read_lock:
            text, spent = await asyncio.to_thread(
                self._render_page, one, request.query.get("cursor", "")
            )
        if text is None:
            return web.Response(status=204)
        return web.Response(
            text=text,
            content_type="text/html",
            headers={"Server-Timing": f"cpu;dur={1000 * spent:.0f}"},
        )

    async def serve_episodes(self, request: web.Request) -> web.StreamResponse:
        run = self._find_single_run(request)
        words = {name: word for name, word in request.query.items() if name not in ("token", "run")}
        try:
            query = EpisodeQuery.from_params(words)
        except ValueError as error:
            raise web.HTTPBadRequest(text=str(error)) from error
        async with self._read_lock:
            text = await asyncio.to_thread(run.render_episode_list, query)
        return web.Response(text=text, content_type="text/html")

    async def serve_episode(self, request: web.Request) -> web.StreamResponse:
        run = self._find_single_run(request)
        group = bool(request.query.get("group"))
        async with self._read_lock:
            text = await asyncio.to_thread(
                run.render_episode, request.query.get("key", ""), group=group
            )
        if text is None:
            raise web.HTTPNotFound(text="there is no such episode, or not any more")
        return web.Response(text=text, content_type="text/html")

    async def serve_script(self, request: web.Request) -> web.StreamResponse:
        name = request.match_info["name"]
        path = TEMPLATE_DIRECTORY / ("uplot/uPlot.iife.min.js" if name == "uplot.js" else name)
        text = await asyncio.to_thread(path.read_text, "utf-8")
        kept = {"Cache-Control": "private, max-age=3600"} if name == "uplot.js" else {}
        return web.Response(text=text, content_type="text/javascript", headers=kept)

    def _parse_run_number(self, request: web.Request) -> int | None:
        """Return the number of a run; None for the comparison of all."""
        word = request.query.get("run", "" if len(self._runs) > 1 else "0")
        if not word:
            return None
        if not (word.isdecimal() and len(word) < 10 and int(word) < len(self._runs)):
            raise web.HTTPNotFound(text=f"there is no run {word}")
        return int(word)

    def _find_single_run(self, request: web.Request) -> LiveRun:
        number = self._parse_run_number(request)
        if number is None:
            raise web.HTTPBadRequest(text="episodes are those of one run")
        return self._runs[number]

    def _render_page(self, run_number: int | None, known_cursor: str) -> tuple[str | None, float]:
        """Render a page, blocking. Returns it (None if the reader has it) and this thread's
        processor seconds."""
        began = time.thread_time()
        runs = self._runs if run_number is None else [self._runs[run_number]]
        cursor = ".".join(str(run.read_new()) for run in runs)
        if cursor == known_cursor:
            return None, 0.0
        names = make_names_distinct(
            [run.name for run in self._runs], [run.run_dir for run in self._runs]
        )
        links = [(name, f"run={number}") for number, name in enumerate(names)]
        links = [("compared", "run="), *links] if len(names) > 1 else links
        gone = [run.name for run in runs if run.is_gone]
        live = LivePage(
            self.token, cursor, f"run={'' if run_number is None else run_number}", links, gone
        )
        records = [run.make_record() for run in runs]
        text = (
            render_comparison_page(records, live)
            if run_number is None
            else render_run_page(records[0], live)
        )
        return text, time.thread_time() - began


def _is_loopback(host: str) -> bool:
    """Return whether the `Host` of a request is a loopback name, with any port: a tunnel
    may use another."""
    name = host.rpartition(":")[0] if not host.endswith("]") and ":" in host else host
    if name == "localhost":
        return True
    try:
        return ipaddress.ip_address(name.strip("[]")).is_loopback
    except ValueError:
        return False


def serve_live_pages(runs: Sequence[Path], port: int, print_line: Callable[[str], Any]) -> None:
    """Serve until SIGINT or SIGTERM. Raises `OSError` for a port that is not free.

    Args:
        port: The port; 0 for any free one.
        print_line: Called with the address.
    """
    asyncio.run(_run_server(runs, port, print_line))


async def _run_server(runs: Sequence[Path], port: int, print_line: Callable[[str], Any]) -> None:
    pages = LivePageServer(runs, secrets.token_urlsafe(24), partial(typer.echo, err=True))
    stop = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    runner = await pages.start(port)
    try:
        print_line(f"http://{LOOPBACK_HOST}:{runner.addresses[0][1]}/?token={pages.token}")
        await stop.wait()
    finally:
        await runner.cleanup()
