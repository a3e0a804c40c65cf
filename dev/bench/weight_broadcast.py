"""Weights between hosts, ours beside Ray's: the relay tree over TCP, and Ray's object store.

Each host is a network namespace of this machine with a link of `--mbit` in each direction, which
`tc` limits. One of them has a version's file; the others end with the same file on their disk, its
checksums compared. These ways take turns over the same links:

* `tree`: a `TcpServer` on the first host and a `TcpReceiver` on each other, as in a run;
* `object`: the file is one object (`ray.put`), which a process on each other host gets and writes;
* `pieces`: an object every 4 MB. Each host begins at another one, which others need later;
* `rounds`: as `object`, to one host, then two, four and so on, as many as have it by then.

It needs root, `ip` and `tc`, and starts a Ray node in each namespace. It is no part of the tests:

    python -m dev.bench.weight_broadcast --hosts 2,4,8 --gigabytes 1 --ways tree,object,tree,object

Hosts include the first. Each time is one line of JSON. Ray's stores are on disk above 9 GB in all.
"""

from __future__ import annotations

import argparse
import asyncio
import ctypes
import itertools
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import psutil
import ray
import xxhash

from dev.bench.jobs import BenchError, end_on_sigterm, start_process
from dev.bench.transfer import start_processes
from r3async.data.safetensors_header import encode_safetensors_header
from r3async.weights.interfaces import TransferOffer
from r3async.weights.manifest import TensorEntry, WeightManifest
from r3async.weights.tcp import TcpReceiver, TcpServer
from r3async.weights.version_reader import verify_version_file
from r3async.weights.version_store import DeltaVersionStore
from r3async.world.curve_keys import generate_keys

NAMESPACE = "r3wb"
BRIDGE = "r3wbbr"
CLONE_NEWNET = 0x40000000
TENSOR_BYTES = 62_500_000
PIECE_BYTES = 4_000_000
RAY_HEAD = "10.78.0.1:6379"
FETCH_SECONDS = 3000.0
WAYS = ("tree", "object", "pieces", "rounds")


def host_address(number: int) -> str:
    return f"10.78.0.{number + 1}"


def run_program(line: str) -> str:
    """Run a program of `iproute2` and return what it printed. Raises `BenchError`."""
    done = subprocess.run(line.split(), capture_output=True, text=True)
    if done.returncode:
        raise BenchError(f"{line}: {done.stderr.strip()}")
    return done.stdout


@contextmanager
def open_namespaces(count: int, mbit: int) -> Iterator[None]:
    """Make the namespaces and their links, and afterwards remove them and all that runs in them."""
    limit = f"root tbf rate {mbit}mbit burst 256kb latency 50ms"
    names = [f"{NAMESPACE}{number}" for number in range(count)]
    try:
        run_program(f"ip link add {BRIDGE} up type bridge")
        for number, name in enumerate(names):
            run_program(f"ip netns add {name}")
            run_program(f"ip link add {name} master {BRIDGE} up type veth peer eth0 netns {name}")
            run_program(f"ip -n {name} addr add {host_address(number)}/24 dev eth0")
            for device in ("lo", "eth0"):
                run_program(f"ip -n {name} link set {device} up")
            run_program(f"tc qdisc add dev {name} {limit}")
            run_program(f"tc -n {name} qdisc add dev eth0 {limit}")
        yield
    finally:
        with suppress(BenchError):  # the first one that was not made
            for name in names:
                for pid in run_program(f"ip netns pids {name}").split():
                    with suppress(psutil.NoSuchProcess):
                        psutil.Process(int(pid)).kill()
                run_program(f"ip netns del {name}")
        for name in [*names, BRIDGE]:
            with suppress(BenchError):  # it went with its namespace
                run_program(f"ip link del {name}")


def enter_namespace(number: int) -> None:
    """Move the calling thread, and the threads that it starts, to the network of a host."""
    with open(f"/var/run/netns/{NAMESPACE}{number}") as file:
        if ctypes.CDLL(None, use_errno=True).setns(file.fileno(), CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), "setns")


def read_carried_bytes(count: int) -> np.ndarray:
    """Return the bytes that each host's link has carried, int64 `[count, 2]`: out of the host and
    into it. They are counted at the other end, where what came out was received."""
    names = ("rx_bytes", "tx_bytes")
    paths = [Path(f"/sys/class/net/{NAMESPACE}{i}/statistics") for i in range(count)]
    return np.array([[int((path / name).read_text()) for name in names] for path in paths])


def wait_for_silence(count: int) -> np.ndarray:
    """Wait until Ray sends nothing more of what has arrived, and return the bytes carried."""
    before = carried = read_carried_bytes(count)
    while carried is before or (carried - before).max() > 1e6:
        time.sleep(2.0)
        before, carried = carried, read_carried_bytes(count)
    return carried


def read_processor_seconds(count: int) -> float:
    """Return the processor time of all processes in the namespaces."""
    seconds = 0.0
    for number in range(count):
        for pid in run_program(f"ip netns pids {NAMESPACE}{number}").split():
            with suppress(psutil.NoSuchProcess):
                seconds += sum(psutil.Process(int(pid)).cpu_times()[:2])
    return seconds


def write_version(store: DeltaVersionStore, gigabytes: float) -> TransferOffer:
    """Write a version of random bytes and return its offer."""
    import torch

    shape = (TENSOR_BYTES // 2,)
    names = [f"layer{i}" for i in range(max(1, round(gigabytes * 1e9 / TENSOR_BYTES)))]
    block = np.random.default_rng(0).integers(0, 256, TENSOR_BYTES, np.uint8)
    entries: dict[str, TensorEntry] = {}

    def iter_file() -> Iterator[Any]:
        yield encode_safetensors_header((name, torch.bfloat16, shape) for name in names)
        for index, name in enumerate(names):
            block[:4] = np.array([index], np.uint32).view(np.uint8)
            entries[name] = TensorEntry("bfloat16", shape, xxhash.xxh3_64_intdigest(block.data))
            yield block.data

    nbytes = len(names) * TENSOR_BYTES
    path = str(store.write_version(1, nbytes, iter_file()))
    return store.announce_version(WeightManifest(1, path, entries, nbytes))


def run_tree_host(pipe: Any, number: int) -> None:
    """Run a host's process of the library: the learner's server, or an engine's receiver."""
    enter_namespace(number)
    asyncio.run(answer_calls(pipe, host_address(number)))


async def answer_calls(pipe: Any, address: str) -> None:
    opened: TcpServer | TcpReceiver | None = None
    while (call := await asyncio.to_thread(pipe.recv)) is not None:
        name, args = call
        answer: Any = None
        if name == "serve":
            keys, offer = args
            opened = TcpServer(address, keys)
            answer = opened.offer_version(offer.manifest, *offer.transport_data)
        elif name == "fetch":
            directory, keys, manifest, source = args
            opened = TcpReceiver(directory, "bench", address, keys, host=address, name=address)
            answer = (await opened.fetch_version(manifest, [source], FETCH_SECONDS)).path
        elif opened is not None:
            await opened.close()
        await asyncio.to_thread(pipe.send, answer)


class RayHost:
    """A process of Ray on a host that gets versions (an actor)."""

    def fetch(self, refs: Sequence[Any], path: str, first: int) -> tuple[float, float]:
        """Get the pieces of a version, from piece `first` on, and write them. Return the times at
        which all were here, and written (CLOCK_MONOTONIC, which all processes share)."""

        arrived = time.monotonic()
        with open(path, "wb") as file:
            for index in [*range(first, len(refs)), *range(first)]:
                piece = ray.get(refs[index])
                arrived = time.monotonic()
                file.seek(index * PIECE_BYTES)
                file.write(piece)
        return arrived, time.monotonic()


def run_ray_driver(pipe: Any, count: int) -> None:
    """Run the learner's process of Ray, which puts versions and has the other hosts get them."""
    enter_namespace(0)
    ray.init(address=RAY_HEAD, log_to_driver=False)
    options = [{"num_cpus": 0, "resources": {f"host{number}": 1}} for number in range(1, count)]
    actors = [ray.remote(RayHost).options(**each).remote() for each in options]
    ray.get([actor.__ray_ready__.remote() for actor in actors])
    while (call := pipe.recv()) is not None:
        way, (source, paths) = call
        content = np.memmap(source, np.uint8, "r").view(np.ndarray)
        begun = time.monotonic()
        size = PIECE_BYTES if way == "pieces" else len(content)
        refs = [ray.put(content[at : at + size]) for at in range(0, len(content), size)]
        put = time.monotonic()
        times: list[tuple[float, float]] = []
        while (done := len(times)) < len(actors):
            stop = min(2 * done + 1, len(actors)) if way == "rounds" else len(actors)
            firsts = [i * len(refs) // len(actors) for i in range(len(actors))]
            calls = [actors[i].fetch.remote(refs, paths[i], firsts[i]) for i in range(done, stop)]
            times += ray.get(calls)
        del refs
        pipe.send(np.array([put, *np.max(times, axis=0)]) - begun)


def start_ray_node(stack: ExitStack, number: int, scratch: Path, store: Path, size: int) -> None:
    """Start a Ray node on a host, which ends with `stack`. Raises `BenchError`."""
    store.mkdir(exist_ok=True)
    log = scratch / f"ray{number}.log"
    role = f"--address={RAY_HEAD}" if number else "--head --port=6379 --include-dashboard=0"
    words = (
        f"ip netns exec {NAMESPACE}{number} {Path(sys.executable).with_name('ray')} start --block "
        f"--node-ip-address={host_address(number)} --num-cpus=1 --disable-usage-stats "
        f"--object-store-memory={size} --plasma-directory={store} --num-gpus=0 "
        f'--temp-dir={scratch}/r{number} --resources={{"host{number}":1}} {role}'
    ).split()
    stack.enter_context(start_process(words, log, RAY_AUTH_MODE="disabled", HOME=str(scratch)))
    for _ in range(360):
        time.sleep(0.5)
        if "Ray runtime started" in log.read_text():
            return
    raise BenchError(f"a node of Ray did not start: {log.read_text()[-500:]}")


def measure_cell(count: int, gigabytes: float, args: argparse.Namespace) -> None:
    """Measure all ways with so many hosts, and print a line for each time."""
    with ExitStack() as stack:
        stack.enter_context(open_namespaces(count, args.mbit))
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=args.directory)))
        versions = stack.enter_context(DeltaVersionStore(scratch / "learner"))
        offer = write_version(versions, gigabytes)
        manifest = offer.manifest
        away = msgspec.structs.replace(manifest, path="/on another host")
        on_disk = count * manifest.nbytes > 9e9
        numbers = [(number,) for number in range(count)]
        tree = stack.enter_context(start_processes(run_tree_host, numbers, FETCH_SECONDS))
        if args.ways != ["tree"]:
            for number in range(count):  # one by one: Ray gives a node 30 s to start
                store = scratch / f"store{number}" if on_disk else Path("/dev/shm")
                start_ray_node(stack, number, scratch, store, int(1.1 * manifest.nbytes + 2e8))
            driver = stack.enter_context(start_processes(run_ray_driver, [(count,)], FETCH_SECONDS))
        for way in args.ways:
            time.sleep(5.0)  # Ray frees what was there before
            paths = [str(scratch / f"host{number}.safetensors") for number in range(1, count)]
            if way == "tree":
                server_keys, keys = generate_keys()
                (source,) = tree.call_processes("serve", [(server_keys, offer)])
            before = (read_carried_bytes(count), read_processor_seconds(count), time.monotonic())
            times: Sequence[float] = ()
            if way == "tree":
                calls = [(scratch / f"host{i}", keys, away, source) for i in range(1, count)]
                _, *paths = tree.call_processes("fetch", [None, *calls])
            else:
                (times,) = driver.call_processes(way, [(manifest.path, paths)])
            seconds = time.monotonic() - before[2]
            cores = (read_processor_seconds(count) - before[1]) / seconds
            carried = (wait_for_silence(count) - before[0]) / 1e6
            for path in paths:
                verify_version_file(msgspec.structs.replace(manifest, path=path))
                Path(path).unlink()
            if way == "tree":
                tree.call_processes("close", [()] * count)
            row = {"hosts": count, "gigabytes": gigabytes, "mbit": args.mbit, "on_disk": on_disk}
            row |= {"way": way, "seconds": round(seconds, 1)}
            row |= {"put_arrived_written": np.round(times, 1).tolist(), "cores": round(cores, 2)}
            row |= {"mb_out_and_in": np.rint(carried).tolist()}
            print(msgspec.json.encode(row).decode(), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--hosts", default="2,4,8")
    parser.add_argument("--gigabytes", default="1")
    parser.add_argument("--ways", default=",".join(WAYS), type=lambda text: text.split(","))
    parser.add_argument("--mbit", default=400, type=int)
    parser.add_argument("--directory", default="/tmp")
    args = parser.parse_args()
    with end_on_sigterm():
        for size, count in itertools.product(args.gigabytes.split(","), args.hosts.split(",")):
            measure_cell(int(count), float(size), args)


if __name__ == "__main__":
    from dev.bench import weight_broadcast  # by this name, Ray's processes find `RayHost`

    weight_broadcast.main()
