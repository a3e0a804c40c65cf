"""Hosts that pass weights on, in virtual time: those that others cannot reach, or whose copies are damaged, cost a host two
waits at most, after which the learner serves it."""

import asyncio
from pathlib import Path

import pytest

from dev.simulation.world import Simulation
from r3async.weights import relay, tcp
from r3async.weights.interfaces import PublishedPart
from r3async.weights.manifest import TensorEntry, WeightManifest
from tests.helpers.transport import CLIENT_KEYS, SERVER_KEYS

BAD = tuple(f"host-{number}" for number in range(1, 7))
CHUNKS = 40


class Transfer:
    """A learner that publishes versions without deltas, and eight hosts that fetch each.

    Attributes:
        known_as: Names by which others know hosts, if not by their own.
        seconds: Virtual seconds until all hosts had each version.
        moved: For each version, how many times each host asked for another parent.
    """

    def __init__(self, monkeypatch, hosts: int = 8):
        monkeypatch.setattr(relay, "CHUNK_BYTES", 1000)
        names = [f"host-{number}" for number in range(1, 1 + hosts)]
        self.simulation = Simulation(0, hosts=("learner", *names), max_callbacks=2_000_000, max_seconds=3600.0)
        self.learner = self.simulation.begin_process("learner", self.simulation.hosts["learner"])
        self.processes = {name: self.simulation.begin_process(name, self.simulation.hosts[name]) for name in names}
        self.receivers: dict[str, tcp.TcpReceiver] = {}
        self.known_as: dict[str, str] = {}
        self.seconds: list[float] = []
        self.moved: list[dict[str, int]] = []

    def run(self, versions: int, trouble) -> None:
        try:
            self.simulation.loop.run_until_complete(self._publish(versions, trouble))
        finally:
            self.simulation.close()

    async def _within(self, process, work):
        return await self.simulation.loop.create_task(work, context=process.context.copy())

    async def _publish(self, versions: int, trouble) -> None:
        trouble(self)
        await self._within(self.learner, self._begin_learner())
        for name, process in self.processes.items():
            await self._within(process, self._begin_host(name))
        for version in range(versions):
            manifest, source = await self._within(self.learner, self._write_version(version))
            before = {name: receiver.parent_changes for name, receiver in self.receivers.items()}
            began = self.simulation.loop.now
            await asyncio.gather(
                *(
                    self._within(process, self.receivers[name].fetch_version(manifest, [source], 3000.0))
                    for name, process in self.processes.items()
                )
            )
            self.seconds.append(self.simulation.loop.now - began)
            self.moved.append({name: r.parent_changes - before[name] for name, r in self.receivers.items()})

    async def _begin_learner(self) -> None:
        self.server = tcp.TcpServer("learner", SERVER_KEYS, self.learner.world)

    async def _begin_host(self, name: str) -> None:
        options = {"host": name, "name": self.known_as.get(name, name), "world": self.processes[name].world}
        self.receivers[name] = tcp.TcpReceiver(Path("/memory"), "run", name, CLIENT_KEYS, **options)

    async def _write_version(self, version: int):
        files, path = self.learner.world.files, Path(f"/weights/version-{version}.safetensors")
        if version == 0:
            files.create_directory(path.parent)
        with files.open(path, create=True) as file:
            nbytes = file.append([bytes([version]) * (CHUNKS * relay.CHUNK_BYTES)])
        entry = TensorEntry("uint8", (nbytes,), version)
        manifest = WeightManifest(version, f"/elsewhere/{path.name}", {"w": entry}, nbytes)
        return manifest, self.server.offer_version(manifest, PublishedPart(str(path), nbytes))


def unreachable(transfer: Transfer) -> None:
    """Others know the bad hosts by a name that leads nowhere; they reach the others."""
    transfer.known_as = dict.fromkeys(BAD, "nowhere")


def damaged(transfer: Transfer) -> None:
    network = transfer.simulation.network
    network.is_damaged = lambda route, frames: route.source in BAD and len(frames) > 1


@pytest.mark.parametrize("fanout", [1, 2])
@pytest.mark.parametrize("trouble", [unreachable, damaged])
def test_however_many_hosts_fail_as_parents_each_of_the_others_waits_twice_at_most(monkeypatch, trouble, fanout):
    monkeypatch.setattr(relay, "FANOUT", fanout)
    transfer = Transfer(monkeypatch)
    transfer.run(3, trouble)
    for seconds, moved in zip(transfer.seconds, transfer.moved, strict=True):
        assert max(moved.values()) <= 2
        assert seconds < 2 * (tcp.MAX_SILENCE_SECONDS + tcp.RETRY_SECONDS)
