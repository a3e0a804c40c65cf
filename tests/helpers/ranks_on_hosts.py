"""A learner with a rank on each of two hosts, and an engine's receiver on each: what `ray/test_ranks_on_hosts.py` runs on the
host of the first rank.

`python -m tests.helpers.ranks_on_hosts MODEL RUN_DIR`: prints what was found as one line of JSON.
"""

import asyncio
import json
import os
import signal
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil

from dev.bench.transfer import MemoryPeak
from r3async.actors.rank_actor import LocalRank, RankActor
from r3async.actors.ranks import RemoteRanks
from r3async.actors.run_placements import rank_placement
from r3async.actors.version_publisher import VersionPublisher
from r3async.actors.weight_transport import build_weight_receiver, build_weight_server
from r3async.config import Config, config_from_dict, config_to_dict
from r3async.data.versions import FIRST_LINEAGE
from r3async.record.timeline import Timeline
from r3async.weights.version_reader import verify_version_file
from r3async.world import ActorOptions, ResourceBundle
from r3async.world.curve_keys import generate_keys
from r3async.world.real import REAL_WORLD

BUCKET_BYTES = 8 * 2**20
FETCH_SECONDS = 180.0
VERSIONS = 3


class MeasuredRank(RankActor):
    """A rank that measures the memory that its versions need beside its model."""

    def __init__(self, *args: Any):
        super().__init__(*args)
        self._peak = MemoryPeak()

    def begin_measuring(self) -> None:
        self._peak.begin_measuring()

    def read_memory(self) -> tuple[int, int]:
        """Return the bytes of this rank's part, and the most that was needed for it."""
        return sum(t.nbytes for t in self._learner._snapshot_memory.values()), self._peak.extra_bytes


class MeasuredRanks(RemoteRanks):
    actor_class = MeasuredRank

    def begin_measuring(self) -> None:
        self._ranks.calls.call_all("begin_measuring")

    def read_memory(self) -> list[Any]:
        return self._ranks.calls.call_all("read_memory")


class Engine:
    """A host of engines, as far as it fetches versions."""

    def __init__(self, world: Any, name: str, config: dict[str, Any], keys: Any):
        self._world, self._name, self._config, self._keys = world, name, config_from_dict(config), keys
        self._receiver: Any = None
        self._peak = MemoryPeak()

    async def fetch_version(self, publication: Any) -> dict[str, Any]:
        """Fetch a version. Returns its digest as published, of which the file was checked, and what it needed."""
        if self._receiver is None:
            import torch  # noqa: F401  # what checks the file needs it

            self._receiver = build_weight_receiver(self._config, "tcp", self._name, "run", self._keys, self._world)
        self._peak.begin_measuring()
        before = self._receiver.received_bytes
        parts = publication.transport_data
        found = await self._receiver.fetch_version(publication.manifest, parts, FETCH_SECONDS)
        memory = self._peak.extra_bytes
        verify_version_file(found)
        return {"digest": found.digest, "received": self._receiver.received_bytes - before, "memory": memory}

    async def stop_sender(self) -> int:
        """Stop the process of this host's sender, which is silent from then on."""
        (sender,) = [p for p in psutil.process_iter() if "PartSenderActor" in " ".join(p.cmdline())]
        os.kill(sender.pid, signal.SIGSTOP)
        return sender.pid

    async def close(self) -> None:
        await self._receiver.close()


def digest_of_one_host(config: Config, model: Path) -> int:
    """Return the digest of the model's weights, published by one process."""
    alone = config_from_dict(config_to_dict(config))
    alone.learner.parallel.dp = alone.learner.parallel.ep = 1
    rank = LocalRank.load(alone, model)
    rank.set_weight_transport("tcp")
    rank.snapshot_weights(0)
    digest = rank.write_version().manifest.digest
    rank.close()
    return digest


async def run(model: Path, run_dir: Path) -> dict[str, Any]:
    from r3async.learner.micro_batches import pack_samples
    from tests.helpers import models as hm
    from tests.helpers.learner import settings
    from tests.helpers.parity import LENGTHS, of_rank

    config = settings(
        learner__parallel={"dp": 2, "ep": 2},
        learner__lr=1e-6,
        routing__replay="off",
        transport__host="0.0.0.0",
        weights__directory="/dev/shm/weights",
        weights__bucket_bytes=BUCKET_BYTES,
        generator__dtype="bfloat16",
    )
    world, found = REAL_WORLD, dict[str, Any](events=[], versions=[])
    world.actors.join_cluster(None, 4)

    def report(event: str, **facts: Any) -> None:
        found["events"].append({"event": event, **facts})

    reserved = world.actors.reserve_bundles(
        lambda nodes: [ResourceBundle(1.0, node_id=n.node_id) for n in sorted(nodes, key=lambda n: not n.is_local) * 2],
        60.0,
    )
    places = [
        replace(rank_placement(config), same_node=False, reserved_bundle=(reserved, number)) for number in range(2)
    ]
    ranks = MeasuredRanks.load(config, model, run_dir, places, world, report)
    found["hosts"] = [host for _, host in ranks.processes]
    server_keys, client_keys = generate_keys()
    engines = [
        world.actors.spawn_actor(
            Engine, f"g{n}", config_to_dict(config), client_keys, name=f"g{n}",
            actor_options=ActorOptions(1, reserved_bundle=(reserved, 2 + n)),
        )
        for n in range(2)
    ]  # fmt: skip
    torch_lane, writer_lane = world.threads.new_worker("torch"), world.threads.new_worker("writer")
    server = build_weight_server(config, "tcp", server_keys, world)
    timeline = Timeline(run_dir, "learner", enabled=False, world=world)
    writer = VersionPublisher(
        world, config, FIRST_LINEAGE, timeline, ranks, torch_lane, writer_lane, None, 120.0, server, ranks, report
    )
    await torch_lane.run(ranks.set_weight_transport, "tcp", server_keys)
    writer.begin_watching()
    samples = hm.make_samples(3, LENGTHS, temperature=0.8, routes=False)
    shares = [of_rank(pack_samples(samples, 48), rank, 2) for rank in range(2)]

    async def train(version: int) -> None:
        await torch_lane.run(lambda: ranks.run_minibatches([shares], version=version))

    for version in range(VERSIONS):
        if version:
            await train(version)
        ranks.begin_measuring()
        await writer.copy_weights(version, with_probe_scores=False)
        writing = asyncio.create_task(writer.write_version())
        if version:
            await train(version)  # beside it
        published = (await writing).publication
        fetched = await asyncio.gather(*(engine.call("fetch_version", published) for engine in engines))
        ranked = ranks.read_memory()
        (source,) = published.transport_data
        found["versions"].append(
            {
                "digest": published.manifest.digest,
                "nbytes": source.nbytes,
                "parts": [[p.nbytes, p.delta_bytes] for p in source.parts],
                "engines": fetched,
                "ranks": ranked,
            }
        )
    found["one_host"] = digest_of_one_host(config, model)

    await train(VERSIONS)
    await writer.copy_weights(VERSIONS, with_probe_scores=False)
    published = (await writer.write_version()).publication
    await engines[1].call("stop_sender")
    fetching = asyncio.gather(*(engine.call("fetch_version", published) for engine in engines))
    steps = 0
    while not fetching.done() and steps < 3:  # a step waits for no sender
        await train(VERSIONS + 1)
        steps += not fetching.done()
    found["steps_without_sender"] = steps
    found["after"] = [published.manifest.digest, *(each["digest"] for each in await fetching)]
    for engine in engines:
        await engine.call("close")
    await writer.close()
    await torch_lane.run(ranks.close)
    found["left"] = [n for n in world.files.list_names(Path("/dev/shm/weights")) if n.startswith("weights-")]
    world.actors.leave_cluster()
    return found


if __name__ == "__main__":
    print("FOUND " + json.dumps(asyncio.run(run(Path(sys.argv[1]), Path(sys.argv[2])))), flush=True)
