"""What holds for sockets over ZeroMQ holds for simulated ones: the same scripts over both."""

import asyncio
import contextlib
import dataclasses
import errno
import os
import random
import resource
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import pytest

from dev.simulation.loop import VirtualLoop, VirtualProcess
from dev.simulation.network import SimulatedNetwork
from r3async.world import MAX_FRAME, Sockets
from r3async.world.curve_keys import generate_keys
from r3async.world.zmq_sockets import REFUSED_OTHER_LEARNER, REFUSED_UNKNOWN_KEY, ZeroMqSockets
from tests.helpers.sockets import LOOPBACK, Ear
from tests.helpers.transport import CLIENT_KEYS, SERVER_KEYS, until

QUIET_SECONDS = 0.3
"""So long nothing comes: then nothing will."""


class Place:
    """Where a script runs: `sockets(name)` are those of a process."""

    def __init__(self, make: Callable[[str], Sockets], full: Callable[[], AbstractContextManager[object]]):
        self._make = make
        self.full = full
        """While it is entered, nothing more is opened."""
        self._made: list[Sockets] = []

    def sockets(self, name: str = "p") -> Sockets:
        self._made.append(self._make(name))
        return self._made[-1]

    def router(self, sockets: Sockets | None = None, address: str = LOOPBACK) -> Ear:
        ear = Ear()
        ear.socket = (sockets or self.sockets()).bind_router(address, ear, keys=SERVER_KEYS, refused_peers=ear.refused)
        return ear

    def dealer(self, router: Ear, name: bytes = b"d", keys: Any = CLIENT_KEYS, sockets: Sockets | None = None) -> Ear:
        ear = Ear()
        ear.socket = (sockets or self.sockets()).connect_dealer(router.socket.endpoint, name, ear, keys=keys)
        return ear

    async def close(self) -> None:
        for sockets in self._made:
            await sockets.close()


@contextlib.contextmanager
def no_descriptors() -> Iterator[None]:
    """This process has as many as it may."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    held: list[int] = []
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(map(int, os.listdir("/proc/self/fd"))) + 1, hard))
        with contextlib.suppress(OSError):
            while True:
                held.append(os.open(os.devnull, os.O_RDONLY))
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        for descriptor in held:
            os.close(descriptor)


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
        asyncio.run(run(script, Place(lambda name: ZeroMqSockets(), no_descriptors)))

    def simulated(script: Callable[[Place], Any]) -> None:
        loop = VirtualLoop(max_seconds=1000.0)
        network = SimulatedNetwork(loop, random.Random(1))
        processes: list[VirtualProcess] = []

        def sockets(name: str) -> Sockets:
            processes.append(VirtualProcess(loop, name))
            return network.sockets_for("host", processes[-1])

        @contextlib.contextmanager
        def full() -> Iterator[None]:
            for full in (True, False):
                for process in processes:
                    process.out_of_descriptors = full
                if full:
                    yield

        loop.run_until_complete(run(script, Place(sockets, full)))
        assert not loop.failures
        loop.close()

    return over_zeromq if request.param == "zeromq" else simulated


def over_both(script: Callable[[Place], Any]) -> Callable[..., None]:
    """Make a test of a script."""

    def test(play: Callable[[Callable[[Place], Any]], None]) -> None:
        play(script)

    return test


@over_both
async def test_messages_arrive_whole_and_in_order_both_ways(place: Place) -> None:
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


@over_both
async def test_what_is_sent_is_what_the_frames_held_then(place: Place) -> None:
    router = place.router()
    dealer, small = place.dealer(router), bytearray(b"before")
    dealer.send(small)
    small[:] = b"after."
    await until(lambda: router.heard)
    assert router.heard == [[b"d", b"before"]]


@over_both
async def test_a_router_knows_a_dealer_while_its_connection_stands_and_nobody_else(place: Place) -> None:
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


@over_both
async def test_a_new_connection_takes_over_the_name(place: Place) -> None:
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


@over_both
async def test_nothing_of_an_earlier_connection_comes_under_a_name_that_was_taken_over(place: Place) -> None:
    router, sockets = place.router(), place.sockets()
    for attempt in range(20):
        router.heard.clear()
        earlier = place.dealer(router, sockets=sockets)
        earlier.send(b"first")
        await until(lambda: router.heard)
        for number in range(300):
            earlier.send(b"earlier", b"%d" % number)
        earlier.socket.close()
        later = place.dealer(router, sockets=sockets)
        later.send(b"later")
        await until(lambda: [b"d", b"later"] in router.heard)
        await asyncio.sleep(0.02 * attempt)
        after = router.heard[router.heard.index([b"d", b"later"]) + 1 :]
        assert not [frames for frames in after if frames[0] == b"d"]
        later.socket.close()


@over_both
async def test_a_dealer_may_come_first_and_what_it_was_given_waits(place: Place) -> None:
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


@over_both
async def test_an_address_is_bound_again_and_its_dealers_find_it(place: Place) -> None:
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


@over_both
async def test_only_known_keys_are_let_in(place: Place) -> None:
    router = place.router()
    unknown = place.dealer(
        router, b"u", dataclasses.replace(generate_keys()[1], server_public_key=CLIENT_KEYS.server_public_key)
    )
    other = place.dealer(
        router, b"o", dataclasses.replace(CLIENT_KEYS, server_public_key=generate_keys()[1].server_public_key)
    )
    right = place.dealer(router, b"r")
    for dealer in (unknown, other, right):
        assert dealer.send(b"hello") == 0
    await until(
        lambda: (
            router.refused[REFUSED_UNKNOWN_KEY]
            and router.refused[REFUSED_OTHER_LEARNER]
            and unknown.socket.denial_reason
        )
    )
    await until(lambda: router.heard)
    await asyncio.sleep(QUIET_SECONDS)
    assert router.heard == [[b"r", b"hello"]]
    assert set(router.refused) == {REFUSED_UNKNOWN_KEY, REFUSED_OTHER_LEARNER}
    assert unknown.socket.denial_reason.startswith("this key")
    assert other.socket.denial_reason == right.socket.denial_reason == ""


@over_both
async def test_who_sends_a_frame_that_is_too_large_is_disconnected(place: Place) -> None:
    router = place.router()
    dealer = place.dealer(router)
    assert dealer.send(b"first") == 0
    await until(lambda: router.heard)
    assert dealer.send(b"too", bytes(MAX_FRAME + 100)) == 0
    await until(lambda: dealer.send(b"next") == 0 and router.heard[-1] == [b"d", b"next"])
    assert all(len(frame) < 10 for frames in router.heard for frame in frames)


@over_both
async def test_a_process_without_descriptors_makes_no_socket_and_those_that_it_has_go_on(place: Place) -> None:
    sockets = place.sockets()
    router, client = place.router(sockets), place.sockets("client")
    dealer = place.dealer(router, sockets=client)
    dealer.send(b"before")
    await until(lambda: router.heard)
    with place.full():
        for attempt in (lambda: place.dealer(router, b"e", sockets=client), lambda: place.router(client)):
            with pytest.raises(OSError, match="Too many open files") as failed:
                attempt()
            assert failed.value.errno == errno.EMFILE
        assert dealer.send(b"meanwhile") == 0
        await until(lambda: len(router.heard) == 2)
    later = place.dealer(router, b"e", sockets=client)
    assert later.send(b"after") == 0
    await until(lambda: len(router.heard) == 3)
    place.router(client)


@pytest.mark.parametrize("endpoint", ["nowhere", "tcp://", "tcp://host:x"])
def test_an_endpoint_that_is_none_is_an_error(play, endpoint):
    async def script(place: Place) -> None:
        with pytest.raises(OSError, match="Invalid argument"):
            place.sockets().connect_dealer(endpoint, b"d", print, keys=CLIENT_KEYS)

    play(script)
