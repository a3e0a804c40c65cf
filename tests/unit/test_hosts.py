"""One notion of loopback, and IPv6 addresses with and without brackets."""

import socket
from pathlib import Path

import aiohttp
import pytest

from r3async.config import TransportConfig, config_from_dict, is_loopback_host
from tests.helpers.serving import answer_ids, ready, renderer, serving
from tests.helpers.transport import Inbox, deliver_all, make_trajectory, receiving, sending

ROOT = Path(__file__).parents[2]


def has_ipv6() -> bool:
    with socket.socket(socket.AF_INET6) as probe:
        try:
            probe.bind(("::1", 0))
        except OSError:
            return False
    return True


needs_ipv6 = pytest.mark.skipif(not has_ipv6(), reason="this machine has no ::1")


@pytest.mark.parametrize(
    "host", ["localhost", "127.0.0.1", "127.9.9.9", "::1", "[::1]", "::ffff:127.0.0.1", "[::ffff:127.0.0.1]"]
)
def test_every_section_takes_the_same_hosts_for_loopback(host):
    assert is_loopback_host(host)
    config_from_dict({"serving": {"host": host}, "transport": {"host": host}})


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "[::]", "*", "10.0.0.1", "::ffff:10.0.0.1", "localhost.example", ""])
def test_what_others_can_reach_is_not_loopback(host):
    assert not is_loopback_host(host)


def test_there_is_one_is_loopback():
    files = [p for room in ("r3async", "actors", "tools") for p in (ROOT / room).rglob("*.py")]
    homes = [p for p in files if "def is_loopback_host" in p.read_text()]
    assert len(homes) == 1, homes


@needs_ipv6
@pytest.mark.parametrize("host", ["::1", "[::1]"])
async def test_trajectories_arrive_over_ipv6(host):
    config, inbox = TransportConfig(host=host, ack_timeout=0.3), Inbox()
    async with receiving(inbox, config) as (_, endpoint), sending(endpoint, config) as sender:
        assert endpoint.startswith("tcp://[::1]:")
        await deliver_all(sender, [make_trajectory(1)])
    assert inbox.once({"t1"})


@needs_ipv6
async def test_the_endpoint_listens_on_bracketed_ipv6():
    chat = renderer()
    async with serving(await ready(answer_ids(chat, "hi")), chat, host="[::1]", enabled=True) as server:
        assert server.base_url.startswith("http://[::1]:")
        headers = {"Authorization": f"Bearer {server.token}"}
        async with aiohttp.ClientSession() as http, http.get(f"{server.base_url}/models", headers=headers) as answer:
            assert answer.status == 200
