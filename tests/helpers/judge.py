"""A judge that is called over one connection, which the module keeps, like a user's reward with its own HTTP client."""

import asyncio
import os
import socketserver
import threading
from collections.abc import Awaitable, Iterator
from contextlib import contextmanager

PORT = "R3ASYNC_TEST_JUDGE"
_kept: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = []


class Answers(socketserver.StreamRequestHandler):
    def _line(self) -> bytes:
        try:
            return self.rfile.readline()
        except ConnectionResetError:
            return b""

    def handle(self) -> None:
        while self._line():
            self.server.asked.append(1)  # type: ignore[attr-defined]  # first: a test counts once it has the answer
            self.wfile.write(b"1.0\n")


@contextmanager
def judge_answers() -> Iterator[list[int]]:
    """Start a server for `asked`. Yields the requests that it got so far."""
    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Answers) as server:
        server.daemon_threads, server.block_on_close = True, False
        server.asked = []  # type: ignore[attr-defined]
        os.environ[PORT] = str(server.server_address[1])
        threading.Thread(target=server.serve_forever, daemon=True).start()
        _kept.clear()
        try:
            yield server.asked  # type: ignore[attr-defined]
        finally:
            del os.environ[PORT]
            server.shutdown()


async def asked(completion: str, answer: str) -> float:
    if not _kept:
        _kept.append(await asyncio.open_connection("127.0.0.1", int(os.environ[PORT])))
    reader, writer = _kept[0]
    writer.write(b"what is it worth?\n")
    return float(await reader.readline())


def asked_elsewhere(completion: str, answer: str) -> Awaitable[float]:
    """Call `asked` without looking like an `async def`, as with many decorators: it is called in a process of the
    pool."""
    return asked(completion, answer)
