"""Weights between hosts: each has them bit by bit, once, whatever is lost, damaged or killed on the way."""

import asyncio
import math
import os
import tracemalloc
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest
import torch
import zmq
from hypothesis import given, settings
from hypothesis import strategies as st

from r3async.actors.run_setup import RunSetup
from r3async.config import config_to_dict, load_config
from r3async.rollout.engine import CorruptWeightsError, InstallReport
from r3async.weights import delta, relay, tcp
from r3async.weights.delta import VersionDigest, digest_version
from r3async.weights.host_cache import HostVersionCache
from r3async.weights.interfaces import PublishedPart, TransferOffer
from r3async.weights.manifest import WeightError
from r3async.weights.relay import (
    FANOUT,
    ROOT_ADDRESS,
    ChunkServer,
    Get,
    Gone,
    Join,
    Place,
    RelayTree,
    RelayTrees,
    decode_relay_message,
)
from r3async.weights.tcp import TcpReceiver, TcpServer
from r3async.weights.version_reader import iter_verified_tensors, verify_version_file
from r3async.weights.version_store import DeltaVersionStore
from r3async.world.disk import write_at
from r3async.world.real import REAL_WORLD, RealWorld
from r3async.world.zmq_sockets import ZeroMqSockets
from tests.helpers.playing import GeneratorOnEngine
from tests.helpers.serving import renderer
from tests.helpers.transport import CLIENT_KEYS, SERVER_KEYS, KeepingSender


def tensors(step: int, elements: int = 300_000, lr: float = 3e-6) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    weights = torch.randn(elements, generator=generator) * 0.02
    for _ in range(step):
        weights += torch.randn(elements, generator=generator).sign() * lr
    return {"w": weights, "bias": torch.full((3,), float(step))}


class Learner:
    def __init__(self, directory: Path):
        self.publisher = DeltaVersionStore(directory / "learner")
        self.server = TcpServer("127.0.0.1", SERVER_KEYS)

    def publish(self, step: int, dtype: torch.dtype = torch.bfloat16, **how):
        publication = self.publisher.publish_tensors(step, tensors(step, **how), dtype)
        return publication.manifest, [self.server.offer_version(publication.manifest, *publication.transport_data)]

    async def close(self):
        await self.server.close()
        self.publisher.close()


def hidden(manifest):
    """As on another host, where the learner's path is nothing."""
    return msgspec.structs.replace(manifest, path=f"/elsewhere{manifest.path}")


@pytest.fixture
async def learner(tmp_path):
    learner = Learner(tmp_path)
    yield learner
    await learner.close()


@pytest.fixture
async def make(tmp_path, learner):
    """Make the receiver of a generator on a host."""
    opened: list[TcpReceiver] = []

    def make(folder, generator="g0", name="127.0.0.1"):
        own = {"host": "127.0.0.1", "name": name}
        opened.append(TcpReceiver(tmp_path / folder, "run-1", f"{folder}-{generator}", CLIENT_KEYS, **own))
        return opened[-1]

    yield make
    for receiver in opened:
        await receiver.close()


async def fetch(receiver: TcpReceiver, manifest, parts, timeout: float = 20.0):
    found = await receiver.fetch_version(hidden(manifest), parts, timeout)
    verify_version_file(found)
    return found


def same(one, other) -> bool:
    return Path(one.path).read_bytes() == Path(other.path).read_bytes()


async def test_hosts_get_the_file_and_then_what_changed(learner, make):
    receivers = [make(f"h{i}") for i in range(3)]
    for step in range(4):
        manifest, parts = learner.publish(step)
        before = [r.received_bytes for r in receivers]
        found = await asyncio.gather(*(fetch(r, manifest, parts) for r in receivers))
        assert all(same(each, manifest) for each in found)
        got = [r.received_bytes - b for r, b in zip(receivers, before, strict=True)]
        if step:
            assert got == [parts[0].parts[0].delta_bytes] * 3
            assert got[0] < manifest.nbytes / 10
        else:
            assert got == [parts[0].nbytes] * 3
        for each in found:
            folder = Path(each.path).parent
            assert len(list(folder.glob("version-*"))) <= 2
            assert not list(folder.glob(".version-*"))


async def test_a_host_that_applies_a_delta_has_one_block_of_it_in_memory(learner, make):
    """Glibc keeps what a thread freed, so two blocks at once are two for each thread that ever applied a part."""
    receiver, elements = make("h0"), 6_500_000  # four blocks
    manifest, parts = learner.publish(0, elements=elements)
    await fetch(receiver, manifest, parts)
    manifest, parts = learner.publish(1, elements=elements, lr=3e-7)
    assert parts[0].parts[0].delta_bytes < manifest.nbytes / 10
    tracemalloc.start()
    try:
        await receiver.fetch_version(hidden(manifest), parts, 20.0)
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    print(f"{most:,} bytes at most, a block has {delta.DELTA_BLOCK_BYTES:,}")
    assert most < 2 * delta.DELTA_BLOCK_BYTES


async def test_a_host_without_the_base_gets_the_whole_file_and_dense_changes_have_no_delta(learner, make):
    first, late = make("h0"), make("h1")
    for step in range(3):
        manifest, parts = learner.publish(step)
        await fetch(first, manifest, parts)
    assert parts[0].parts[0].base is not None
    before = late.received_bytes
    assert same(await fetch(late, manifest, parts), manifest)
    assert late.received_bytes - before == parts[0].nbytes
    # A host that missed a version has another base.
    for step in (3, 4):
        manifest, parts = learner.publish(step)
        await fetch(first, manifest, parts)
    before = late.received_bytes
    await fetch(late, manifest, parts)
    assert late.received_bytes - before == parts[0].nbytes
    manifest, parts = learner.publish(5, torch.float32)
    assert parts[0].parts[0].base is None
    manifest, parts = learner.publish(6, torch.float32, lr=1e-3)
    assert parts[0].parts[0].base is None
    assert same(await fetch(first, manifest, parts), manifest)


async def test_engines_of_a_host_share_one_file_which_one_of_them_fetches(learner, make):
    receivers = [make("h0", f"g{i}") for i in range(8)]
    for step in range(3):
        manifest, parts = learner.publish(step)
        found = await asyncio.gather(*(fetch(r, manifest, parts) for r in receivers))
        assert len({each.path for each in found}) == 1
        assert sum(r.received_bytes > 0 for r in receivers) <= 3
    assert sum(r.received_bytes for r in receivers) == learner.server.sent_bytes
    # A generator that was restarted finds what its host has.
    again = make("h0", "g0")
    await fetch(again, manifest, parts)
    assert again.received_bytes == 0
    # One that uses an old version keeps it.
    old = await fetch(again, manifest, parts)
    for step in (3, 4, 5):
        manifest, parts = learner.publish(step)
        await fetch(receivers[0], manifest, parts)
    verify_version_file(old)


async def test_one_that_waits_for_the_file_of_its_host_ends_when_it_stops(learner, make, tmp_path):
    waiting = make("h0")
    manifest, parts = learner.publish(0)
    (folder,) = tmp_path.glob("h0/weights-*")
    other = HostVersionCache(folder.parent, folder.name.removeprefix("weights-"))
    with other.claim_fetch() as mine:  # as another generator of the host does
        assert mine
        waits = asyncio.ensure_future(fetch(waiting, manifest, parts))
        await asyncio.sleep(0.05)
        other.close()
        await waiting.close()
        assert not folder.exists(), "that was the last of the host"
        with pytest.raises(WeightError, match="stops"):
            await waits
    with pytest.raises(WeightError, match="stops"):
        await fetch(waiting, manifest, parts)


async def test_one_that_fetches_ends_when_it_stops(learner, make, tmp_path):
    manifest, parts = learner.publish(0)
    await learner.close()  # nothing arrives
    receiver = make("h0")
    fetches = asyncio.ensure_future(fetch(receiver, manifest, parts))
    await asyncio.sleep(0.2)
    assert list(tmp_path.glob("h0/*/.version-*"))
    await receiver.close()
    with pytest.raises(WeightError, match="stops"):
        await fetches


async def test_the_learners_host_reads_the_learners_file(learner, make):
    manifest, parts = learner.publish(0)
    assert await make("h0").fetch_version(manifest, parts, 5.0) == manifest
    assert learner.server.sent_bytes == 0


async def test_the_learner_sends_a_version_to_few_hosts_however_many_there_are(learner, make, monkeypatch):
    monkeypatch.setattr(relay, "CHUNK_BYTES", 2**14)
    receivers = [make(f"h{i}") for i in range(9)]
    manifest, parts = learner.publish(0)
    found = await asyncio.gather(*(fetch(r, manifest, parts) for r in receivers))
    assert all(same(each, manifest) for each in found)
    assert learner.server.sent_bytes < 5 * parts[0].nbytes  # some were done before others asked


async def test_a_base_that_is_corrupt_is_replaced_by_the_whole_file(learner, make):
    receiver = make("h0")
    manifest, parts = learner.publish(0)
    write_at(Path((await fetch(receiver, manifest, parts)).path), 5000, [b"??"])
    manifest, parts = learner.publish(1)
    assert same(await fetch(receiver, manifest, parts), manifest)
    assert receiver.received_bytes > 2 * manifest.nbytes


class Verifying:
    """An engine that reads what it installs, as far as to see whether it is what was published."""

    version, suspects_all, routing = -1, False, None

    async def start(self):
        pass

    async def install_version(self, manifest, timeout):
        try:
            verify_version_file(manifest)
            if self.suspects_all:
                raise WeightError("tensor 'w' is corrupt")
        except WeightError as error:
            raise CorruptWeightsError(str(error)) from error
        self.version, self.manifest = manifest.version, manifest
        return InstallReport(manifest.version, 0.1, 0.0)


async def test_a_file_of_a_host_folder_that_is_damaged_is_fetched_again(learner, make, tmp_path, monkeypatch):
    monkeypatch.setattr("r3async.actors.generator.prepare_process", lambda *args: None)
    first, second = make("h0"), make("h0", "g1")
    monkeypatch.setattr("r3async.actors.generator.build_weight_receiver", lambda *args: second)
    manifest, parts = learner.publish(0)
    publication = TransferOffer(hidden(msgspec.structs.replace(manifest, lineage=1)), parts)
    write_at(Path((await fetch(first, manifest, parts)).path), 5000, [b"??"])
    engine, setup = Verifying(), RunSetup("run", config_to_dict(load_config("quickstart")), str(tmp_path))
    actor = GeneratorOnEngine(engine, renderer(), REAL_WORLD, setup, "g1", "nowhere")
    monkeypatch.setattr(actor, "make_sender", lambda *args: KeepingSender())
    await actor.start()
    await actor.connect_to_learner("", "tcp", CLIENT_KEYS)
    assert ((await actor.install_version(publication)).version, engine.version) == (0, 0)
    assert same(engine.manifest, manifest)
    assert "weights_fetched_again" in (tmp_path / "events.jsonl").read_text()
    # Where that does not help it is not done for ever.
    engine.suspects_all, before = True, second.received_bytes
    with pytest.raises(CorruptWeightsError, match="is corrupt"):
        await actor.install_version(publication)
    assert second.received_bytes - before == parts[0].nbytes


async def test_what_does_not_come_in_time_says_which_setting(learner, make):
    manifest, parts = learner.publish(0)
    await learner.server.close()
    with pytest.raises(TimeoutError, match=r"version 0 did not arrive within 1 s \(supervise.patience\)"):
        await fetch(make("h0"), manifest, parts, 1.0)


async def test_a_version_that_is_not_kept_is_refused_by_name(learner, make):
    manifest, parts = learner.publish(0)
    for step in (1, 2, 3):
        learner.publish(step)
    with pytest.raises(WeightError, match="version-0 of the weights any more"):
        await fetch(make("h0"), manifest, parts)


async def test_two_hundred_versions_later_the_digest_is_the_learners(learner, make):
    receiver, other = make("h0"), make("h0", "g1")
    weights, generator = tensors(0, 20_000)["w"], torch.Generator().manual_seed(2)
    for version in range(200):
        weights = weights + torch.randn(20_000, generator=generator).sign() * 3e-6
        publication = learner.publisher.publish_tensors(version, {"w": weights}, torch.bfloat16)
        parts = [learner.server.offer_version(publication.manifest, *publication.transport_data)]
        found = await fetch(receiver, publication.manifest, parts)
    assert digest_version(found) == digest_version(publication.manifest)
    assert torch.equal(dict(iter_verified_tensors(found))["w"], weights.bfloat16())
    assert receiver.received_bytes < 200 * publication.manifest.nbytes / 5
    await fetch(other, publication.manifest, parts)


def assert_reaches_learner(parents: dict[str, str], address: str) -> None:
    """Fail if a host gets a stream from itself, through others: its address, and then those of its parents."""
    seen = [address]
    while (address := parents[address]) != ROOT_ADDRESS:
        assert address not in seen
        seen.append(address)


@settings(max_examples=300)
@given(st.lists(st.tuples(st.integers(0, 12), st.sampled_from(["join", "done", "failed"])), max_size=200))
def test_a_tree_has_no_circle_and_no_host_serves_too_many(events):
    tree, trees, receiving = RelayTree(), RelayTrees(), {}
    parents, parents_by_message = {}, {}
    for number, what in events:
        name = f"n{number}"
        address = f"tcp://n{number}:1" if number % 7 else ROOT_ADDRESS  # every seventh host passes nothing on
        if what == "done":
            tree.finish_node(name)
            receiving.pop(name, None)
            continue
        failed = parents.get(address, ROOT_ADDRESS) if what == "failed" else ROOT_ADDRESS
        avoid = [failed] if failed != ROOT_ADDRESS else []
        parents[address] = receiving[name] = tree.place_node(name, address, avoid)
        assert parents[address] not in avoid
        assert_reaches_learner(parents, address)
        parents_by_message[address] = trees.handle_join(name, Join("s", address, tuple(avoid))).parent
        assert_reaches_learner(parents_by_message, address)
        children = Counter(receiving.values())
        assert all(count <= FANOUT for address, count in children.items() if address != ROOT_ADDRESS)


def place_hosts(trees: RelayTrees, names, reaches) -> dict[str, int]:
    """Let hosts fetch a stream one after the other, each until it has it. Returns how many parents failed each."""
    failures = {}
    for name in names:
        avoid: list[str] = []
        while (parent := trees.handle_join(name, Join("s", f"tcp://{name}", tuple(avoid))).parent) != ROOT_ADDRESS:
            if reaches(name, parent):
                break
            avoid.append(parent)
        trees.handle_received(name, relay.Done("s", parent))
        failures[name] = len(avoid)
    return failures


@pytest.fixture
def busy():
    """A learner that sends to two hosts as long as the test takes."""
    trees = RelayTrees()
    for name in ("g0", "g1"):
        trees.handle_join(name, Join("s", f"tcp://{name}"))
    return trees


LATER = [f"h{number}" for number in range(8)]


@pytest.mark.parametrize("neighbours", [(), ("h1", "h3", "h5", "h7")])
def test_a_parent_that_one_host_avoids_gets_no_further_child_though_some_hosts_reach_it(busy, neighbours):
    failures = place_hosts(busy, LATER, lambda name, parent: parent != "tcp://g0" or name in neighbours)
    assert sum(failures.values()) == 1, "each costs 5 s, one after another"


def test_a_host_that_two_parents_failed_is_served_by_the_learner(busy):
    failures = place_hosts(busy, LATER, lambda name, parent: False)
    assert max(failures.values()) == 2
    assert failures["h0"] == 2, "both"
    for name in ("g0", "g1"):  # each failed one host, once
        busy.handle_join(name, Join("next", f"tcp://{name}"))
    assert busy.handle_join("h0", Join("next", "tcp://h0")).parent == "tcp://g0"


@pytest.mark.parametrize(("changed", "worthwhile"), [([0], True), ([0, 1, 2], False), ([1, 2, 3], False)])
def test_most_of_the_sampled_blocks_decide_whether_there_is_a_delta(tmp_path, changed, worthwhile):
    block = delta.DELTA_BLOCK_BYTES
    for name in ("before", "after"):
        with REAL_WORLD.files.open(tmp_path / name, create=True) as file:
            for number in range(delta.SAMPLED_BLOCKS):
                file.append([bytes([name == "after" and number in changed]) * block])
    with REAL_WORLD.files.open(tmp_path / "before") as before, REAL_WORLD.files.open(tmp_path / "after") as after:
        assert delta.is_delta_worthwhile(before, after) == worthwhile


def test_each_of_two_versions_in_use_stays(tmp_path):
    with DeltaVersionStore(tmp_path) as store:
        for version in range(5):
            store.write_tensors(version, {"w": torch.zeros(4)}, torch.float32, (0, 1) if version < 4 else (1,))
            left = sorted(int(path.stem.partition("-")[2]) for path in store.path.glob("version-*.safetensors"))
            assert left == ([*range(version + 1)] if version < 4 else [1, 3, 4])


def count_children(tree: RelayTree, address: str, names) -> int:
    """Place these hosts and return how many of them get that parent."""
    return [tree.place_node(name, f"tcp://{name}") for name in names].count(address)


@pytest.mark.parametrize(("address", "places"), [("tcp://g0", 0), ("tcp://g0-again", 2)])
def test_a_host_that_asks_again_keeps_its_children_and_a_new_process_has_none(address, places):
    """The first two are below the learner; each has two children."""
    tree = RelayTree()
    for name in ("g0", "g1", "a0", "a1", "b0", "b1"):
        tree.place_node(name, f"tcp://{name}")
    tree.place_node("g0", address)
    assert count_children(tree, address, ("c0", "c1", "c2")) == places
    for name in ("a0", "b0"):  # those of the process that has ended
        tree.finish_node(name)
    assert count_children(tree, address, ("d0", "d1")) == (2 if address == "tcp://g0" else 0)


def test_a_host_that_reports_twice_that_it_has_a_stream_frees_one_place():
    tree = RelayTree()
    for name in ("g0", "g1", "a0", "a1", "b0", "b1"):
        tree.place_node(name, f"tcp://{name}")
    for _ in range(2):
        tree.finish_node("a0")
    assert count_children(tree, "tcp://g0", ("c0", "c1", "c2")) == 1


def test_a_chunk_that_arrives_goes_to_each_of_the_peers_that_wait_for_it():
    class File:
        def map_bytes(self, start: int, length: int) -> bytes:
            return bytes(length)

    class Socket:
        def __init__(self) -> None:
            self.peers: list[bytes] = []

        def send(self, frames) -> int:
            self.peers.append(frames[0])
            return 0

    server, socket = relay.ChunkServer(), Socket()
    server.add_growing_stream("s", File(), 2 * relay.CHUNK_BYTES, 0)
    for peer in (b"one", b"two"):
        server.answer_request(socket, peer, relay.Get("s", 0, 2))
    server.add_chunks("s", [0], socket)
    assert socket.peers == [b"one", b"two"]
    server.add_chunks("s", [0], socket)
    assert socket.peers == [b"one", b"two"] * 2


def test_a_host_that_failed_twice_has_children_again_after_it_has_served_one():
    trees = RelayTrees()

    def place_below(stream: str, avoid: tuple[str, ...] = ()) -> str:
        for name in ("g0", "g1"):
            trees.handle_join(name, Join(stream, f"tcp://{name}"))
        trees.handle_join("g1", Join(stream, ""))  # it does not pass this one on
        return trees.handle_join("h0", Join(stream, "tcp://h0", avoid)).parent

    for stream in ("s0", "s1"):
        assert place_below(stream) == "tcp://g0"
        place_below(stream, ("tcp://g0",))
    assert place_below("s2") == ROOT_ADDRESS
    trees.handle_received("h1", relay.Done("s1", "tcp://g0"))
    assert place_below("s3") == "tcp://g0"


def test_a_parent_that_failed_in_one_stream_alone_has_children_in_the_next(busy):
    place_hosts(busy, LATER, lambda name, parent: parent != "tcp://g0")
    for name in ("g0", "g1"):
        busy.handle_join(name, Join("next", f"tcp://{name}"))
    assert busy.handle_join("h0", Join("next", "tcp://h0")).parent == "tcp://g0"


class PeersByHand(RealWorld):
    """A world without a network, in which the test says what the peers of a server say. `answers` are the server's, each
    with the peer that it is for."""

    def __init__(self) -> None:
        self.answers: list[tuple[bytes, relay.RelayMessage]] = []

    def open_sockets(self):
        async def close() -> None:
            pass

        return SimpleNamespace(bind_router=self.bind_router, close=close)

    def bind_router(self, address, on_message, **options):
        self.on_message = on_message
        return SimpleNamespace(endpoint=address, send=self.keep_answer)

    def keep_answer(self, frames) -> int:
        self.answers.append((frames[0], decode_relay_message(frames[1])))
        return 0

    def say(self, peer: bytes, message: relay.RelayMessage | bytes) -> None:
        body = message if isinstance(message, bytes) else relay.encode_relay_message(message)
        self.on_message([zmq.Frame(peer), zmq.Frame(body)])


def test_a_peer_whose_name_is_no_text_stops_nobody_behind_it(tmp_path):
    """All messages lie there when the socket is read: what one of them raised, the others waited for."""
    world = PeersByHand()
    server, part = TcpServer("127.0.0.1", SERVER_KEYS, world), part_of(0, 0, "", tmp_path)
    server.offer_version(SimpleNamespace(path=part.path), part)
    for peer in (b"\xff", b"g0", b"\xfe\x00"):
        for message in (Join(part.name, ""), relay.Done(part.name, "")):
            world.say(peer, message)
        for body in (b"\x91" * 5000, b"\xa1\xff", b"\x82\xa4type\xa4Join\xff"):
            world.say(peer, body)
    assert world.answers == [(b"g0", Place(part.name, ROOT_ADDRESS))]


async def test_what_a_message_raises_keeps_no_other_from_being_read():
    """A ZeroMQ socket says once that there is something to read."""
    wanted = [b"first", b"bad", *(b"%d" % i for i in range(5))]
    taken: list[bytes] = []
    raised: list[str] = []
    whole = asyncio.Event()

    def take(frames) -> None:
        taken.append(frames[-1].bytes)
        if len(taken) == len(wanted):
            whole.set()
        if taken[-1] == b"bad":
            raise ValueError("bad")

    asyncio.get_running_loop().set_exception_handler(lambda loop, context: raised.append(repr(context["exception"])))
    sockets = ZeroMqSockets()
    try:
        router = sockets.bind_router("tcp://127.0.0.1:*", take, keys=SERVER_KEYS, refused_peers=Counter())
        dealer = sockets.connect_dealer(router.endpoint, b"g0", lambda frames: None, keys=CLIENT_KEYS)
        async with asyncio.timeout(120):
            for each in wanted:
                dealer.send([each])
            await whole.wait()
        assert (taken, raised) == (wanted, ["ValueError('bad')"])
    finally:
        await sockets.close()


def test_the_tree_is_as_deep_as_a_logarithm():
    for hosts in (1, 2, 8, 64, 500):
        tree, depths = RelayTree(), {ROOT_ADDRESS: 0}
        for number in range(hosts):
            address = f"tcp://n{number}:1"
            depths[address] = depths[tree.place_node(f"n{number}", address)] + 1
        assert max(depths.values()) <= math.ceil(math.log2(hosts + 2)) + 1


def test_no_host_gets_a_stream_from_one_that_gets_it_from_it_through_others():
    tree = RelayTree()
    assert [tree.place_node(name, name.upper()) for name in "pa"] == [ROOT_ADDRESS] * 2
    assert tree.place_node("z", "Z", excluded={"P"}) == "A"
    tree.finish_node("p")
    assert tree.place_node("y", "Y") == ROOT_ADDRESS
    assert tree.place_node("p", "P", excluded={"A", "Y"}) == "Z", "so p gets it from a through z, which came after p"
    tree.finish_node("a")
    assert tree.place_node("w", "W") == ROOT_ADDRESS
    assert tree.place_node("a", "A", excluded={"W", "Y"}) == ROOT_ADDRESS, "though the learner serves enough"


def test_versions_of_two_lineages_that_have_one_number_are_two_files(tmp_path):
    cache = HostVersionCache(tmp_path, "run")
    one, other = VersionDigest(3, 5), VersionDigest(3, 6)
    cache.version_path(one).write_bytes(b"one")
    assert cache.acquire_version(one) == cache.version_path(one)
    assert cache.acquire_version(other) is None
    cache.close()


def part_of(version: int, number: int, endpoint: str, directory: Path) -> PublishedPart:
    path = directory / f"host-{number}" / f"version-{version}.safetensors"
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(b"weights")
    return PublishedPart(str(path), 7, endpoint=endpoint)


@pytest.fixture
async def parts_elsewhere(tmp_path):
    """A server of two versions of three parts, the last two of which another host has; all parts; and its peers."""
    world = PeersByHand()
    server = TcpServer("127.0.0.1", SERVER_KEYS, world)
    versions = [[part_of(v, n, "tcp://there:1" if n else "", tmp_path) for n in range(3)] for v in range(2)]
    for parts in versions:
        server.offer_version(SimpleNamespace(path=parts[0].path), *parts)
    yield server, versions, world
    await server.close()


async def test_a_host_that_serves_anew_serves_its_parts_of_all_versions(parts_elsewhere):
    server, _, _ = parts_elsewhere
    assert len(server.list_remote_parts("tcp://there:1")) == 4
    server.move_parts("tcp://there:1", "tcp://there:2")
    assert not server.list_remote_parts("tcp://there:1")
    assert len(server.list_remote_parts("tcp://there:2")) == 4


async def test_no_part_of_a_version_that_was_removed_is_offered_any_more(parts_elsewhere):
    server, versions, world = parts_elsewhere
    os.unlink(versions[0][0].path)
    server.serve_files({})
    for part in versions[0]:
        world.say(b"peer", Join(part.name, "tcp://h:1", ()))
    assert world.answers == [(b"peer", Gone(part.name)) for part in versions[0]]


def test_a_host_that_receives_the_second_part_of_a_version_passes_that_one_on(tmp_path):
    path, sent = tmp_path / "version", []
    path.write_bytes(b"first part" + b"second")
    socket, server = SimpleNamespace(send=sent.append), ChunkServer()
    server.add_growing_stream("second", REAL_WORLD.files.open(path), 6, start=10)
    server.add_chunks("second", [7], socket)
    server.answer_request(socket, b"peer", Get("second", 0, 1))
    ((_, head, data),) = sent
    assert (decode_relay_message(head).checksum, bytes(data)) == (7, b"second")
    server.remove_stream("second")


async def test_a_host_names_all_parents_that_failed_it(learner, make, monkeypatch):
    monkeypatch.setattr(tcp, "RETRY_SECONDS", 0.02)
    monkeypatch.setattr(tcp, "MAX_SILENCE_SECONDS", 0.02)
    manifest, parts = learner.publish(0)
    places = ["tcp://127.0.0.1:9", "tcp://127.0.0.1:13", ROOT_ADDRESS]  # at the first two is nobody
    avoided = []

    def place(trees, name, message):
        avoided.append(message.avoid)
        return Place(message.stream, places[len(message.avoid)], False)  # a join that is repeated gets the same

    monkeypatch.setattr(RelayTrees, "handle_join", place)
    assert same(await fetch(make("h0"), manifest, parts), manifest)
    assert list(dict.fromkeys(avoided)) == [
        (),
        ("tcp://127.0.0.1:9",),
        ("tcp://127.0.0.1:9", "tcp://127.0.0.1:13"),
    ]
