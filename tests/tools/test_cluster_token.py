"""A cluster that asks for a token: whom it is given to, and whom not."""

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import ray

from r3async.tools.submit.jobs import _use_local_token
from tests.helpers.cli import Said, run_program
from tests.helpers.cluster import beside_python, clean_home

TOKEN = "c0ffee" * 8


class Dashboard(BaseHTTPRequestHandler):
    """What Ray's dashboard answers with and without its token."""

    seen: list[str]

    def do_GET(self) -> None:
        given = self.headers.get("Authorization") or ""
        self.seen.append(given)
        if given != f"Bearer {TOKEN}":
            return self._answer(401 if not given else 403, b"Unauthorized")
        body = {"ray_version": ray.__version__, "version": "4"} if self.path == "/api/version" else []
        return self._answer(200, json.dumps(body).encode())

    def _answer(self, code: int, body: bytes) -> None:
        self.send_response(code)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def dashboard() -> Iterator[tuple[str, list[str]]]:
    """Its address, and what it was given as a token in each request."""
    seen: list[str] = []
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Asking", (Dashboard,), {"seen": seen}))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}", seen
    server.shutdown()
    server.server_close()


def list_jobs(address: str, environment: dict[str, str]) -> Said:
    command = [beside_python("r3async"), "submit", "list", "--address", address]
    return run_program(command, cwd=Path(environment["HOME"]), environment=environment)


def keep_token(environment: dict[str, str]) -> None:
    """As `ray.init` of a local run does."""
    file = Path(environment["HOME"], ".ray", "auth_token")
    file.parent.mkdir()
    file.write_text(TOKEN)


def test_a_cluster_of_this_machine_that_asks_gets_the_token_that_ray_keeps(dashboard):
    address, seen = dashboard
    with clean_home() as environment:
        refused = list_jobs(address, environment)
        assert (refused.returncode, "wants a token" in refused.stderr, set(seen)) == (2, True, {""}), refused.stderr
        keep_token(environment)
        seen.clear()
        listed = list_jobs(address, environment)
        assert (listed.returncode, listed.stdout) == (0, ""), listed.stderr
        assert (seen[0], seen[-1]) == ("", f"Bearer {TOKEN}"), "it is sent to who asks only"


def test_what_a_person_says_of_tokens_counts(dashboard):
    address, seen = dashboard
    with clean_home() as environment:
        keep_token(environment)
        refused = list_jobs(address, environment | {"RAY_AUTH_MODE": "disabled"})
        assert (refused.returncode, "wants a token" in refused.stderr, set(seen)) == (2, True, {""}), refused.stderr


def test_no_other_machine_is_given_the_token(monkeypatch, tmp_path):
    monkeypatch.delenv("RAY_AUTH_MODE", raising=False)
    monkeypatch.setenv("RAY_AUTH_TOKEN", TOKEN)
    for address in ("http://cluster.example:8265", "192.0.2.7:6379", "https://[2001:db8::1]"):
        assert not _use_local_token(address)
