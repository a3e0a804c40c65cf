"""The simulated network: the same scripts over it and over ZeroMQ, its faults, and one seed, one history."""

from __future__ import annotations

import asyncio
import dataclasses
import errno
import random
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from r3async.world import MAX_FRAME, Sockets
from r3async.world.keys import new_keys
from r3async.world.simulated.loop import Process, VirtualLoop
from r3async.world.simulated.network import SimulatedNetwork
from r3async.world.zeromq import OTHER_LEARNER, UNKNOWN_KEY, ZeroMqSockets
from tests.helpers.transport import CLIENT_KEYS, SERVER_KEYS, until

LOOPBACK = "tcp://127.0.0.1:*"
QUIET_SECONDS = 0.3
"""So long nothing comes: then nothing will."""


class Ear:
    """A router or dealer, and what came to it."""

    def __init__(self) -> None:
        self.heard: list[list[bytes]] = []
        self.refused: Counter[str] = Counter()
        self.socket: Any = None

    def __call__(self, frames: list[Any]) -> None:
        assert all(bytes(frame.buffer) == frame.bytes and len(frame) == len(frame.bytes) for frame in frames)
        self.heard.append([frame.bytes for frame in frames])

    def send(self, *frames: bytes) -> int:
        return self.socket.send(list(frames))


class Place:
    """Where a script runs: `sockets(name)` are those of a process."""

    def __init__(self, make: Callable[[str], Sockets]):
        self._make = make
        self._made: list[Sockets] = []

    def sockets(self, name: str = "p") -> Sockets:
        self._made.append(self._make(name))
        return self._made[-1]

    def router(self, sockets: Sockets | None = None, address: str = LOOPBACK) -> Ear:
        ear = Ear()
        ear.socket = (sockets or self.sockets()).router(address, ear, keys=SERVER_KEYS, refused=ear.refused)
        return ear

    def dealer(self, router: Ear, name: bytes = b"d", keys: Any = CLIENT_KEYS, sockets: Sockets | None = None) -> Ear:
        ear = Ear()
        ear.socket = (sockets or self.sockets()).dealer(router.socket.endpoint, name, ear, keys=keys)
        return ear

    async def close(self) -> None:
        for sockets in self._made:
            await sockets.close()


async def run(script: Callable[[Place], Any], place: Place) -> None:
    try:
        async with asyncio.timeout(30):
            await script(place)
    finally:
        await place.close()


@pytest.fixture(params=["zeromq", "simulated"])
def play(request: pytest.FixtureRequest) -> Callable[[Callable[[Place], Any]], None]:
    """Runs a script over the one and over the other."""

    def over_zeromq(script: Callable[[Place], Any]) -> None:
        asyncio.run(run(script, Place(lambda name: ZeroMqSockets())))

    def simulated(script: Callable[[Place], Any]) -> None:
        loop = VirtualLoop(seconds=1000.0)
        network = SimulatedNetwork(loop, random.Random(1))
        loop.run_until_complete(run(script, Place(lambda name: network.sockets("host", Process(loop, name)))))
        assert not loop.failures
        loop.close()

    return over_zeromq if request.param == "zeromq" else simulated


def test_messages_arrive_whole_and_in_order_both_ways(play):
    async def script(place: Place) -> None:
        router = place.router()
        dealers = {name: place.dealer(router, name) for name in (b"a", b"b")}
        sent = [[b"%d" % i, b"", bytes([i]) * (i * 631 % MAX_FRAME), bytearray(b"end")] for i in range(200)]
        for message in sent:
            for dealer in dealers.values():
                assert dealer.send(*message) == 0
        await until(lambda: len(router.heard) == 400)
        for name, dealer in dealers.items():
            assert [frames[1:] for frames in router.heard if frames[0] == name] == sent
            for message in sent:
                assert router.send(name, *message) == 0
            await until(lambda: len(dealer.heard) == 200)  # noqa: B023
            assert dealer.heard == sent

    play(script)


def test_what_is_sent_is_what_the_frames_held_then(play):
    async def script(place: Place) -> None:
        router = place.router()
        dealer, small = place.dealer(router), bytearray(b"before")
        dealer.send(small)
        small[:] = b"after."
        await until(lambda: router.heard)
        assert router.heard == [[b"d", b"before"]]

    play(script)


def test_a_router_knows_a_dealer_while_its_connection_stands_and_nobody_else(play):
    async def script(place: Place) -> None:
        router = place.router()
        assert router.send(b"d", b"x") == errno.EHOSTUNREACH
        dealer = place.dealer(router)
        await until(lambda: router.send(b"d", b"hello") == 0)  # it has not said anything
        assert router.send(b"e", b"x") == errno.EHOSTUNREACH
        await until(lambda: dealer.heard)
        assert dealer.heard[0] == [b"hello"]
        dealer.socket.close()
        dealer.socket.close()
        assert dealer.send(b"x") == errno.ENOTSOCK
        await until(lambda: router.send(b"d", b"x") == errno.EHOSTUNREACH)
        assert not router.heard

    play(script)


def test_a_new_connection_takes_over_the_name(play):
    async def script(place: Place) -> None:
        router, sockets = place.router(), place.sockets()
        earlier = place.dealer(router, sockets=sockets)
        earlier.send(b"first")
        await until(lambda: router.heard)
        earlier.socket.close()
        later = place.dealer(router, sockets=sockets)
        later.send(b"second")
        await until(lambda: len(router.heard) == 2)
        assert router.heard == [[b"d", b"first"], [b"d", b"second"]]
        assert router.send(b"d", b"answer") == 0
        await until(lambda: later.heard)
        assert (earlier.heard, later.heard) == ([], [[b"answer"]])

    play(script)


def test_a_dealer_may_come_first_and_what_it_was_given_waits(play):
    async def script(place: Place) -> None:
        sockets = place.sockets()
        probe = place.router(sockets)
        await sockets.close()  # its port is free
        dealer = place.dealer(probe)
        for i in range(1000):
            assert dealer.send(b"%d" % i) == 0
        assert dealer.send(b"more") == errno.EAGAIN
        await asyncio.sleep(QUIET_SECONDS)
        router = place.router(address=dealer.socket.endpoint)
        await until(lambda: len(router.heard) == 1000)
        assert router.heard == [[b"d", b"%d" % i] for i in range(1000)]

    play(script)


def test_an_address_is_bound_again_and_its_dealers_find_it(play):
    async def script(place: Place) -> None:
        sockets = place.sockets()
        router = place.router(sockets)
        with pytest.raises(OSError, match="already in use") as failed:
            place.router(address=router.socket.endpoint)
        assert failed.value.errno == errno.EADDRINUSE
        dealer = place.dealer(router)
        dealer.send(b"first")
        await until(lambda: router.heard)
        await sockets.close()
        await sockets.close()
        assert router.send(b"d", b"x") == errno.ENOTSOCK
        again = place.router(address=router.socket.endpoint)
        await until(lambda: dealer.send(b"second") == 0 and again.heard)
        assert again.heard[0] == [b"d", b"second"]
        assert again.send(b"d", b"answer") == 0
        await until(lambda: dealer.heard)

    play(script)


def test_only_known_keys_are_let_in(play):
    async def script(place: Place) -> None:
        router = place.router()
        unknown = place.dealer(
            router, b"u", dataclasses.replace(new_keys()[1], server_public=CLIENT_KEYS.server_public)
        )
        other = place.dealer(router, b"o", dataclasses.replace(CLIENT_KEYS, server_public=new_keys()[1].server_public))
        right = place.dealer(router, b"r")
        for dealer in (unknown, other, right):
            assert dealer.send(b"hello") == 0
        await until(lambda: router.refused[UNKNOWN_KEY] and router.refused[OTHER_LEARNER] and unknown.socket.denied)
        await until(lambda: router.heard)
        await asyncio.sleep(QUIET_SECONDS)
        assert router.heard == [[b"r", b"hello"]]
        assert set(router.refused) == {UNKNOWN_KEY, OTHER_LEARNER}
        assert unknown.socket.denied.startswith("this key")
        assert other.socket.denied == right.socket.denied == ""

    play(script)


def test_who_sends_a_frame_that_is_too_large_is_disconnected(play):
    async def script(place: Place) -> None:
        router = place.router()
        dealer = place.dealer(router)
        assert dealer.send(b"first") == 0
        await until(lambda: router.heard)
        assert dealer.send(b"too", bytes(MAX_FRAME + 100)) == 0
        await until(lambda: dealer.send(b"next") == 0 and router.heard[-1] == [b"d", b"next"])
        assert all(len(frame) < 10 for frames in router.heard for frame in frames)

    play(script)


@pytest.mark.parametrize("endpoint", ["nowhere", "tcp://", "tcp://host:x"])
def test_an_endpoint_that_is_none_is_an_error(play, endpoint):
    async def script(place: Place) -> None:
        with pytest.raises(OSError, match="Invalid argument"):
            place.sockets().dealer(endpoint, b"d", print, keys=CLIENT_KEYS)

    play(script)


# -- of the simulated network alone -----------------------------------------------------------------------------------


class Simulation:
    """A router on "learner", a dealer on each of "west" and "east", and what was observed."""

    def __init__(self, seed: int = 0):
        self.loop = VirtualLoop(seconds=10_000.0)
        self.log: list[tuple[float, str, str, str, bytes]] = []
        self.network = SimulatedNetwork(self.loop, random.Random(seed), self._note)
        self.processes = {name: Process(self.loop, name) for name in ("learner", "west", "east")}
        self.router = self.open("learner")
        self.dealers = {name: self.open(name) for name in ("west", "east")}

    def open(self, name: str) -> Ear:
        ear, sockets = Ear(), self.network.sockets(f"host-{name}", self.processes[name])
        if name == "learner":
            ear.socket = sockets.router("tcp://*:5555", ear, keys=SERVER_KEYS, refused=ear.refused)
        else:
            ear.socket = sockets.dealer("tcp://host-learner:5555", name.encode(), ear, keys=CLIENT_KEYS)
        return ear

    def _note(self, event: str, route: Any, frames: list[bytes]) -> None:
        self.log.append((self.loop.now, event, route.source, route.target, b"|".join(frames)))

    def count(self, event: str) -> int:
        return sum(found == event for _, found, *_ in self.log)

    def pause(self, seconds: float) -> None:
        self.loop.run_until_complete(asyncio.sleep(seconds))

    def talk(self, seconds: float, both_ways: bool = True, every: float = 0.001) -> None:
        """Everyone sends numbers."""

        async def work() -> None:
            end = self.loop.now + seconds
            while self.loop.now < end:
                for name, dealer in self.dealers.items():
                    dealer.send(b"%08d" % len(self.log))
                    if both_ways:
                        self.router.send(name.encode(), b"%08d" % len(self.log))
                await asyncio.sleep(every)

        self.loop.run_until_complete(work())

    def from_(self, name: str) -> list[bytes]:
        return [frames[1] for frames in self.router.heard if frames[0] == name.encode()]

    def check(self) -> None:
        """What holds whatever happened: what arrived was sent, once, in order; and all that was sent arrived or was lost."""
        for name, dealer in self.dealers.items():
            for got in (self.from_(name), [frames[0] for frames in dealer.heard]):
                assert got == sorted(set(got))
        assert self.count("sent") == self.count("arrived") + self.count("lost")
        assert not self.loop.failures


def test_a_router_on_loopback_is_not_reached_from_another_host():
    sim = Simulation()
    ear, sockets = Ear(), sim.network.sockets("host-west", sim.processes["west"])
    ear.socket = sockets.router(LOOPBACK, ear, keys=SERVER_KEYS, refused=ear.refused)
    port = ear.socket.endpoint.rpartition(":")[2]
    for host, found in (("west", True), ("east", False)):
        dealer = Ear()
        name = "127.0.0.1" if found else "host-west"
        sockets = sim.network.sockets(f"host-{host}", sim.processes[host])
        dealer.socket = sockets.dealer(f"tcp://{name}:{port}", b"d", dealer, keys=CLIENT_KEYS)
        dealer.send(host.encode())
    sim.pause(5.0)
    assert ear.heard == [[b"d", b"west"]]
    with pytest.raises(OSError, match="assign requested address"):
        sockets.router("tcp://host-west:*", ear, keys=SERVER_KEYS, refused=ear.refused)


def test_messages_of_different_connections_overtake_each_other_and_those_of_one_do_not():
    sim = Simulation()
    sim.network.delay = lambda rng: rng.expovariate(10.0)
    sim.talk(2.0, both_ways=False)
    sim.pause(10.0)
    together = [frames[1] for frames in sim.router.heard]
    assert together != sorted(together)
    assert sim.count("lost") == 0
    sim.check()


def test_a_cut_loses_what_is_on_its_way_and_dealers_connect_again_when_it_is_over():
    sim = Simulation()
    sim.network.delay = lambda rng: 0.05
    sim.talk(1.0)
    sim.network.cut("host-west", "learner", seconds=3.0)
    sim.pause(0.1)
    assert sim.router.send(b"west", b"x") == errno.EHOSTUNREACH
    before, beside = len(sim.from_("west")), len(sim.from_("east"))
    sim.talk(2.0, both_ways=False)
    assert len(sim.from_("west")) == before
    assert len(sim.from_("east")) > beside + 1000
    assert sim.count("lost") > 30
    sim.pause(4.0)
    assert len(sim.from_("west")) >= before + 1000, "what waited went over the new connection"
    sim.check()


def test_a_stall_holds_everything_up_and_loses_nothing():
    sim = Simulation()
    sim.talk(1.0)
    sim.network.stall("learner", seconds=2.0)
    sim.talk(0.5)
    assert (sim.loop.now, sim.count("lost")) == (pytest.approx(1.5, abs=0.01), 0)
    heard = len(sim.router.heard)
    sim.pause(1.4)
    assert len(sim.router.heard) == heard
    sim.pause(0.2)
    assert len(sim.router.heard) > heard + 500
    assert sim.count("lost") == 0
    sim.check()


def test_over_a_half_open_connection_one_direction_is_lost_in_silence_until_a_new_one_is_made():
    sim = Simulation()
    sim.talk(1.0)
    sim.network.half_open("west", "learner", seconds=1.0)
    before, answers = len(sim.from_("west")), len(sim.dealers["west"].heard)
    sim.talk(2.0)
    assert len(sim.from_("west")) <= before + 5
    assert len(sim.dealers["west"].heard) > answers + 1000
    assert len(sim.from_("east")) > before + 1000
    sim.dealers["west"].socket.close()
    again = sim.open("west")
    again.send(b"99999999")
    sim.pause(1.0)
    assert sim.from_("west")[-1] == b"99999999"
    sim.pause(100.0)
    sim.check()


def test_keepalive_ends_a_connection_that_is_half_open():
    sim = Simulation()
    sim.talk(1.0)
    sim.network.half_open("learner", "west", seconds=1.0)
    sim.pause(70.0)
    assert sim.router.send(b"west", b"99999999") == 0
    sim.pause(1.0)
    assert sim.dealers["west"].heard[-1] == [b"99999999"]
    sim.check()


def test_damage_changes_one_bit_and_never_the_name():
    sim = Simulation()
    sim.network.damage = 0.5
    sim.talk(1.0)
    sim.pause(1.0)
    sent = {message for _, event, _, _, message in sim.log if event == "sent"}
    wrong = [message for _, event, _, _, message in sim.log if event == "arrived" and message not in sent]
    assert 1200 < len(wrong) < 2800
    assert {frames[0] for frames in sim.router.heard} == {b"west", b"east"}
    for message in wrong[:100]:
        assert min(sum((a ^ b).bit_count() for a, b in zip(message, other, strict=True)) for other in sent) == 1


def test_a_link_takes_as_long_as_its_bytes():
    sim = Simulation()
    sim.pause(1.0)
    sim.network.bandwidth = 1e6
    sim.network.delay = lambda rng: 0.0
    for dealer in sim.dealers.values():
        for i in range(100):
            assert dealer.send(b"%0100000d" % i) == 0
    sim.pause(20.5)
    assert len(sim.router.heard) == 200, "both share the link into the learner's host: 20 MB at 1 MB/s"
    assert sim.log[-1][0] == pytest.approx(21.1, abs=0.2)
    sim.check()


def test_a_process_that_ends_loses_its_sockets_and_its_peers_notice():
    sim = Simulation()
    sim.talk(1.0)
    sim.processes["west"].end()
    heard = len(sim.from_("west"))
    sim.pause(0.5)
    assert heard <= len(sim.from_("west")) <= heard + 5
    assert sim.router.send(b"west", b"x") == errno.EHOSTUNREACH
    sim.processes["learner"].end()
    sim.pause(0.5)
    assert sim.dealers["east"].send(b"99999999") == 0
    sim.processes["learner"] = Process(sim.loop, "learner")
    sim.router = sim.open("learner")
    sim.pause(3.0)
    assert sim.from_("east") == [b"99999999"]
    sim.check()


def test_a_host_that_vanishes_says_nothing():
    sim = Simulation()
    sim.talk(1.0)
    sim.network.vanish("host-west")
    sim.processes["west"].end()
    sim.pause(10.0)
    assert sim.router.send(b"west", b"99999998") == 0, "nobody knows yet"
    sim.pause(60.0)
    assert sim.router.send(b"west", b"99999999") == errno.EHOSTUNREACH
    sim.check()


def test_a_frozen_process_reads_what_came_when_it_thaws():
    sim = Simulation()
    sim.talk(0.1)
    sim.pause(1.0)
    sim.processes["learner"].freeze()
    heard, refused = len(sim.router.heard), 0
    for i in range(1200):
        refused += sim.dealers["west"].send(b"1%07d" % i) == errno.EAGAIN
    sim.dealers["west"].socket.close()
    sim.pause(1.0)
    assert (len(sim.router.heard), refused) == (heard, 200)
    sim.processes["learner"].thaw()
    sim.pause(1.0)
    assert len(sim.router.heard) > heard
    assert sim.router.send(b"west", b"x") == errno.EHOSTUNREACH
    sim.check()


def story(seed: int) -> Simulation:
    """Everything at once, from one seed."""
    sim, rng = Simulation(seed), random.Random(f"faults of {seed}")
    names = ["learner", "west", "east"]
    for _ in range(30):
        a, b = rng.sample(names, 2)
        seconds = rng.expovariate(1.0)
        fault = rng.choice(["cut", "stall", "half_open", "delay", "end", "freeze"])
        if fault == "delay":
            mean = rng.choice([0.0001, 0.01, 0.5])
            sim.network.delay = lambda rng, mean=mean: rng.expovariate(1 / mean)
        elif fault == "freeze":
            sim.processes[a].freeze()
            sim.talk(seconds, every=0.02)
            sim.processes[a].thaw()
        elif fault == "end":
            sim.processes[a].end()
            sim.pause(rng.expovariate(1.0))
            sim.processes[a] = Process(sim.loop, a)
            ear = sim.open(a)
            if a == "learner":
                ear.heard, sim.router = sim.router.heard, ear
            else:
                ear.heard, sim.dealers[a] = sim.dealers[a].heard, ear
        else:
            getattr(sim.network, fault)(a, b, seconds)
        sim.talk(0.5, every=0.02)
    sim.network.delay = lambda rng: 0.001
    sim.pause(200.0)
    sim.check()
    return sim


@pytest.mark.parametrize("seed", range(10))
def test_whatever_happens_nothing_comes_twice_or_out_of_order_and_it_is_the_same_again(seed):
    sim, again = story(seed), story(seed)
    assert sim.log == again.log
    assert sim.loop.ran == again.loop.ran
    assert sim.count("arrived") > 500
    heard = {name: (len(sim.from_(name)), len(dealer.heard)) for name, dealer in sim.dealers.items()}
    sim.talk(0.1)
    sim.pause(1.0)
    assert all(len(sim.from_(name)) > count for name, (count, _) in heard.items())
    assert all(len(dealer.heard) > heard[name][1] for name, dealer in sim.dealers.items()), (
        "everyone is connected again"
    )
