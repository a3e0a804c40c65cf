"""A learner whose ranks are on two hosts: each host has its part of a version's file, and engines fetch from both.

With Ray and namespaces: `ray/test_ranks_on_hosts.py`.
"""

import asyncio
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest

from r3async.actors.rank_actor import LocalRank
from r3async.actors.rank_calls import RankCalls, RankProcesses
from r3async.actors.ranks import RemoteRanks
from r3async.actors.version_publisher import VersionPublisher
from r3async.actors.weight_transport import choose_weight_backend
from r3async.config import ConfigError, load_config
from r3async.learner import LearnerError
from r3async.weights import tcp
from r3async.weights.delta import digest_version
from r3async.weights.sharded_store import PartFolder
from r3async.weights.tcp import PartServer, TcpReceiver, TcpServer
from r3async.weights.version_reader import iter_verified_tensors, verify_version_file
from r3async.world.disk import write_at
from r3async.world.real import REAL_WORLD
from tests.helpers.transport import CLIENT_KEYS, SERVER_KEYS
from tests.unit.test_ranked_writing import Backend, Called

HOSTS = ("here", "there", "there")
"""Host of each rank."""


class Rank:
    """A rank's actor, with its host's part folder and sender in this process."""

    def __init__(self, config, rank, directory):
        self.local, self._directory = LocalRank(config, Backend(rank)), directory
        self.folder = None
        self.servers = []
        """The senders that were started; the last one serves."""

    def call_method(self, name, *args):
        return getattr(self.local, name)(*args)

    def call_part_folder(self, name, *args):
        if self.folder is None:
            self.folder = PartFolder(self._directory)
        return getattr(self.folder, name)(*args)

    def serve_parts(self, keys, paths):
        if not self.servers:
            self.servers.append(PartServer("127.0.0.1", keys))
        self.servers[-1].serve_files(paths)
        return self.servers[-1].bind_socket()


class Actors(Called):
    def begin_call(self, actor, method, *args, concurrency_group="", **kwargs):
        return SimpleNamespace(value=getattr(actor, method)(*args, **kwargs))


class Learner:
    def __init__(self, directory: Path, hosts=HOSTS):
        overrides = ["learner.parallel.dp=3", "generator.dtype=bfloat16", f"weights.directory={directory / 'here'}"]
        config = load_config("quickstart", overrides)
        self.ranks = [Rank(config, rank, directory / host) for rank, host in enumerate(hosts)]
        processes = list(enumerate(hosts))
        self.remote = RemoteRanks(config, RankProcesses(RankCalls(Actors(), self.ranks), 7, processes))
        self.remote.set_weight_transport("tcp", SERVER_KEYS)
        self.server = TcpServer("127.0.0.1", SERVER_KEYS)
        self.sender_rank = self.ranks[1]

    def publish(self, version):
        for rank in self.ranks:
            rank.local.snapshot_weights(version)
        offer = self.remote.write_version()
        return offer.manifest, [self.server.offer_version(offer.manifest, *offer.transport_data)]

    def step(self):
        for rank in self.ranks:
            rank.local.backend.step()

    def watch_senders(self, report_event):
        """Have the version writer of a learner watch the senders. Its calls are made on this event loop."""
        lane, config = SimpleNamespace(run=call_here), load_config("quickstart")
        served = {"server": self.server, "remote_ranks": self.remote, "report_event": report_event}
        writer = VersionPublisher(REAL_WORLD, config, None, None, self.remote, lane, lane, None, 10.0, **served)
        writer.begin_watching()
        return writer

    async def close(self):
        for server in (self.server, *self.sender_rank.servers):
            await server.close()
        self.remote.close()


async def call_here(function, *args):
    return function(*args)


@pytest.fixture
async def learner(tmp_path):
    learner = Learner(tmp_path)
    yield learner
    await learner.close()


@pytest.fixture
async def make(tmp_path):
    opened = []

    def make(host, name="g0"):
        opened.append(TcpReceiver(tmp_path / host, "run", name, CLIENT_KEYS, host="127.0.0.1", name="127.0.0.1"))
        return opened[-1]

    yield make
    for receiver in opened:
        await receiver.close()


def whole(learner):
    return {name: t for rank in learner.ranks for name, t in rank.local.backend.iter_full_weights()}


async def test_engines_put_the_parts_of_all_hosts_together_and_their_deltas_too(learner, make, tmp_path):
    receivers = [make(f"engines{i}") for i in range(3)]
    for version in range(3):
        manifest, parts = learner.publish(version)
        found = await asyncio.gather(*(r.fetch_version(manifest, parts, 20.0) for r in receivers))
        for each in found:
            verify_version_file(each)
            assert digest_version(each) == digest_version(manifest)
            exact = whole(learner)
            read = dict(iter_verified_tensors(each))
            assert read.keys() == exact.keys()
            assert all((read[name] == t.to(read[name].dtype)).all() for name, t in exact.items())
            assert manifest.nbytes == sum(t.nbytes for t in read.values())
        assert [part.base is not None for part in parts[0].parts] == [version > 0] * 2
        learner.step()
    # A host writes and keeps its own ranks' part alone, of the last two versions.
    for host, ranks in (("here", learner.ranks[:1]), ("there", learner.ranks[1:])):
        own = sum(4 * t.numel() for r in ranks for _, t in r.local.backend.iter_full_weights())
        files = sorted(tmp_path.glob(f"{host}/weights-*/version-*.safetensors"))
        assert [path.stem for path in files] == ["version-1", "version-2"]
        assert all(path.stat().st_size < own for path in files)  # most of it is in bfloat16
    whole_bytes = parts[0].nbytes
    assert [r.received_bytes < 1.3 * whole_bytes for r in receivers] == [True] * 3


async def test_ranks_whose_hosts_take_turns_write_one_file_of_all_weights(make, tmp_path):
    learner = Learner(tmp_path, ("here", "there", "here"))
    manifest, parts = learner.publish(0)
    found = await make("engines").fetch_version(manifest, parts, 20.0)
    read, exact = dict(iter_verified_tensors(found)), whole(learner)
    assert read.keys() == exact.keys()
    assert all((read[name] == t.to(read[name].dtype)).all() for name, t in exact.items())
    await learner.close()


async def test_a_part_whose_delta_is_missing_is_fetched_whole(learner, make):
    receiver = make("engines")
    await receiver.fetch_version(*learner.publish(0), 20.0)
    learner.step()
    manifest, (source,) = learner.publish(1)
    broken = [source.parts[0], msgspec.structs.replace(source.parts[1], base=None)]
    before = receiver.received_bytes
    found = await receiver.fetch_version(manifest, [msgspec.structs.replace(source, parts=tuple(broken))], 20.0)
    verify_version_file(found)
    assert receiver.received_bytes - before == broken[0].delta_bytes + broken[1].nbytes


async def test_a_delta_that_does_not_fit_costs_its_part_alone(learner, make):
    receiver = make("engines")
    fetched = await receiver.fetch_version(*learner.publish(0), 20.0)
    write_at(Path(fetched.path), fetched.nbytes - 1, [b"!"])  # in the second part
    learner.step()
    manifest, (source,) = learner.publish(1)
    before = receiver.received_bytes
    verify_version_file(await receiver.fetch_version(manifest, [source], 20.0))
    assert receiver.received_bytes - before == sum(p.delta_bytes for p in source.parts) + source.parts[1].nbytes


async def test_a_sender_that_sends_nothing_is_reported_and_its_successor_serves_the_rest(learner, make, monkeypatch):
    monkeypatch.setattr(tcp, "RETRY_SECONDS", 0.1)
    monkeypatch.setattr(tcp, "MAX_SILENCE_SECONDS", 0.2)
    manifest, parts = learner.publish(0)
    (sender,) = learner.sender_rank.servers
    await sender.close()
    fetching = asyncio.create_task(make("engines").fetch_version(manifest, parts, 20.0))
    reports = []

    def report_event(event, **fields):
        if event == "weights_stalled":
            assert not fetching.done()
            learner.sender_rank.servers.append(PartServer("127.0.0.1", SERVER_KEYS))
        reports.append((event, fields))

    watching = learner.watch_senders(report_event)
    verify_version_file(await fetching)
    (stalled, silent), (going_on, successor) = reports
    assert (stalled, going_on) == ("weights_stalled", "weights_go_on")
    assert (successor["host"], successor["replaced"]) == ("there", True)
    assert successor["sender"] != silent["sender"]
    await watching.close()


async def test_the_watch_of_senders_ends_when_their_rank_is_lost(learner, make, monkeypatch):
    """The loss ends the step, which makes the ranks and their senders anew."""
    monkeypatch.setattr(tcp, "RETRY_SECONDS", 0.1)
    monkeypatch.setattr(tcp, "MAX_SILENCE_SECONDS", 0.2)
    manifest, parts = learner.publish(0)
    await learner.sender_rank.servers[0].close()

    def lose_rank(keys, paths):
        raise LearnerError("rank 1 was lost")

    learner.sender_rank.serve_parts = lose_rank
    reports = []
    others = asyncio.all_tasks()
    watching = learner.watch_senders(lambda event, **fields: reports.append(event))
    (watch,) = asyncio.all_tasks() - others
    fetching = asyncio.create_task(make("engines").fetch_version(manifest, parts, 20.0))
    await asyncio.wait_for(watch, 120)
    assert reports == ["weights_stalled"]
    fetching.cancel()
    await watching.close()


async def test_a_failed_version_is_joined_from_all_hosts(learner, tmp_path):
    manifest, _ = learner.publish(0)
    learner.remote.join_parts(learner.server.list_parts(manifest), tmp_path / "joined")
    verify_version_file(msgspec.structs.replace(manifest, path=str(tmp_path / "joined")))
    with pytest.raises(OSError, match="not kept any more"):
        learner.remote.join_parts([], tmp_path / "gone")


@pytest.mark.parametrize("backend", ["nccl", "shared_memory"])
def test_transports_from_one_host_are_refused_by_name(backend):
    config = load_config("quickstart", [f"weights.backend={backend}"])
    with pytest.raises(
        ConfigError, match=rf'weights.backend="{backend}".* are on here, there, .*weights.backend="tcp"'
    ):
        choose_weight_backend(config, {"here", "there"}, ["0"], [["1"]], ["here", "there", "there"])
