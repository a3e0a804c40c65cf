"""One notion of loopback, and IPv6 addresses with and without brackets."""

import asyncio
import contextlib
import json
import socket
import threading
from pathlib import Path
from types import SimpleNamespace

import aiohttp
import msgspec
import psutil
import pytest
import torch
import zmq

from r3async.actors.weight_transport import (
    build_part_server,
    build_weight_receiver,
    build_weight_sender,
    build_weight_server,
)
from r3async.config import TransportConfig, config_from_dict, is_loopback_host
from r3async.config.observe import ObserveConfig
from r3async.config.supervise import TimeLimits
from r3async.config.weights import WeightsConfig
from r3async.record.prometheus import MetricsEndpoint
from r3async.weights.nccl import (
    NcclReceiver,
    NcclSender,
    Up,
    decode_nccl_message,
    encode_nccl_message,
    open_nccl_socket,
    request_receive_offer,
)
from r3async.weights.version_reader import verify_version_file
from r3async.world.curve_keys import generate_keys
from r3async.world.real import RealWorld
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


class SenderThread(threading.Thread):
    """A process that sends, as far as the messages go: it reports that it is up and keeps what it is told."""

    def __init__(self, endpoint: str, link: str):
        super().__init__(daemon=True)
        self.endpoint, self.link, self.jobs = endpoint, link, []
        self.start()

    def run(self) -> None:
        with zmq.Context() as context, open_nccl_socket(context, zmq.DEALER, self.endpoint) as dealer:
            dealer.connect(self.endpoint)
            dealer.send(encode_nccl_message(Up(self.link)))
            self.jobs.append(decode_nccl_message(dealer.recv()))

    def poll(self) -> None:
        return None

    def kill(self) -> None:
        self.join(120)


@needs_ipv6
@pytest.mark.parametrize("host", ["::1", "[::1]"])
def test_workers_and_senders_meet_over_ipv6(tmp_path, host):
    processes: list[SenderThread] = []

    def start(endpoint: str, link: str) -> SenderThread:
        processes.append(SenderThread(endpoint, link))
        return processes[-1]

    settings = WeightsConfig(bucket_bytes=1 << 20), TimeLimits(base_install=10.0)
    with contextlib.closing(NcclSender(tmp_path, host, *settings, start)) as sender:
        offer = sender.publish_tensors(1, {"weight": torch.zeros(2)}, torch.float32)
        assert offer.transport_data[0].startswith("tcp://[::1]:")
        manifest = asyncio.run(NcclReceiver("g0").fetch_version(offer.manifest, offer.transport_data, 10.0))
        answer = request_receive_offer(manifest, 0, 1)
        assert answer.host == "::1", "what sockets take"
        processes[0].join(120)
    assert (processes[0].jobs[0].host, processes[0].jobs[0].port) == ("::1", answer.port)


def world_at(address: str) -> RealWorld:
    """The real world on a host that others reach at `address`."""
    world = RealWorld()
    world.actors = SimpleNamespace(host_address=lambda interface: address)
    return world


def listening_addresses() -> set[tuple[str, int]]:
    found = psutil.Process().net_connections("tcp")
    return {tuple(each.laddr) for each in found if each.status == psutil.CONN_LISTEN}


@needs_ipv6
@pytest.mark.parametrize("host", ["::", "[::]"])
async def test_weights_are_fetched_and_relayed_over_ipv6(tmp_path, host):
    world, (server_keys, client_keys) = world_at("::1"), generate_keys()
    config = config_from_dict({"transport": {"host": host}, "weights": {"directory": str(tmp_path / "here")}})
    elsewhere = config_from_dict({"transport": {"host": host}, "weights": {"directory": str(tmp_path / "there")}})
    before = listening_addresses()
    store, server = build_weight_sender(config, "tcp", world), build_weight_server(config, "tcp", server_keys, world)
    receiver = build_weight_receiver(elsewhere, "tcp", "g0", "run", client_keys, world)
    try:
        published = store.publish_tensors(1, {"weight": torch.arange(3.0)}, torch.float32)
        manifest = msgspec.structs.replace(published.manifest, path="/elsewhere")
        part = server.offer_version(manifest, *published.transport_data)
        assert part.endpoint.startswith("tcp://[::1]:")
        verify_version_file(await receiver.fetch_version(manifest, [part], 10.0))
        assert {address for address, _ in listening_addresses() - before} == {"::"}, "the server, and the relay"
    finally:
        await receiver.close()
        await server.close()
        store.close()


@needs_ipv6
async def test_other_hosts_of_the_learner_serve_their_parts_over_ipv6():
    server_keys, _ = generate_keys()
    server = build_part_server(config_from_dict({}), server_keys, world_at("::1"))
    endpoint = server.bind_socket()
    assert endpoint.startswith("tcp://[::1]:")
    with socket.create_connection(("::1", int(endpoint.rpartition(":")[2])), timeout=5):
        pass
    await server.close()


@pytest.mark.parametrize("host", ["*", "0.0.0.0", "::", "[::]"])
def test_senders_from_gpus_listen_where_they_are_reached(tmp_path, host):
    config = config_from_dict({"transport": {"host": host}, "weights": {"directory": str(tmp_path)}})
    with contextlib.closing(build_weight_sender(config, "nccl", world_at("127.0.0.1"))) as sender:
        offer = sender.publish_tensors(1, {"weight": torch.zeros(2)}, torch.float32)
    assert offer.transport_data[0].startswith("tcp://127.0.0.1:")


@needs_ipv6
@pytest.mark.parametrize("host", ["::1", "[::1]"])
def test_prometheus_is_named_with_the_brackets_of_ipv6(tmp_path, host):
    endpoint = MetricsEndpoint("learner", tmp_path, ObserveConfig(prometheus_host=host, prometheus_port=0))
    described = json.loads(endpoint.target_file.read_text())
    endpoint.close()
    assert described[0]["targets"] == [f"[::1]:{endpoint.port}"]
