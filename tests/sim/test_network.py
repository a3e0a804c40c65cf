"""The simulated network: its faults, and one seed, one history."""

import asyncio
import errno
import random
from typing import Any

import pytest

from dev.simulation.loop import VirtualLoop, VirtualProcess
from dev.simulation.network import SimulatedNetwork
from tests.helpers.sockets import LOOPBACK, Ear
from tests.helpers.transport import CLIENT_KEYS, SERVER_KEYS


class Simulation:
    """A router on "learner", a dealer on each of "west" and "east", and what was observed."""

    def __init__(self, seed: int = 0):
        self.loop = VirtualLoop(max_seconds=10_000.0)
        self.log: list[tuple[float, str, str, str, bytes]] = []
        self.network = SimulatedNetwork(self.loop, random.Random(seed), self._note)
        self.processes = {name: VirtualProcess(self.loop, name) for name in ("learner", "west", "east")}
        self.router = self.open("learner")
        self.dealers = {name: self.open(name) for name in ("west", "east")}

    def open(self, name: str) -> Ear:
        ear, sockets = Ear(), self.network.sockets_for(f"host-{name}", self.processes[name])
        if name == "learner":
            ear.socket = sockets.bind_router("tcp://*:5555", ear, keys=SERVER_KEYS, refused_peers=ear.refused)
        else:
            ear.socket = sockets.connect_dealer("tcp://host-learner:5555", name.encode(), ear, keys=CLIENT_KEYS)
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
    ear, sockets = Ear(), sim.network.sockets_for("host-west", sim.processes["west"])
    ear.socket = sockets.bind_router(LOOPBACK, ear, keys=SERVER_KEYS, refused_peers=ear.refused)
    port = ear.socket.endpoint.rpartition(":")[2]
    for host, found in (("west", True), ("east", False)):
        dealer = Ear()
        name = "127.0.0.1" if found else "host-west"
        sockets = sim.network.sockets_for(f"host-{host}", sim.processes[host])
        dealer.socket = sockets.connect_dealer(f"tcp://{name}:{port}", b"d", dealer, keys=CLIENT_KEYS)
        dealer.send(host.encode())
    sim.pause(5.0)
    assert ear.heard == [[b"d", b"west"]]
    with pytest.raises(OSError, match="assign requested address"):
        sockets.bind_router("tcp://host-west:*", ear, keys=SERVER_KEYS, refused_peers=ear.refused)


def test_messages_of_different_connections_overtake_each_other_and_those_of_one_do_not():
    sim = Simulation()
    sim.network.draw_delay = lambda rng: rng.expovariate(10.0)
    sim.talk(2.0, both_ways=False)
    sim.pause(10.0)
    together = [frames[1] for frames in sim.router.heard]
    assert together != sorted(together)
    assert sim.count("lost") == 0
    sim.check()


def test_a_cut_loses_what_is_on_its_way_and_dealers_connect_again_when_it_is_over():
    sim = Simulation()
    sim.network.draw_delay = lambda rng: 0.05
    sim.talk(1.0)
    sim.network.cut_connections("host-west", "learner", seconds=3.0)
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
    sim.network.stall_connections("learner", seconds=2.0)
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
    sim.network.half_open_connections("west", "learner", seconds=1.0)
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
    sim.network.half_open_connections("learner", "west", seconds=1.0)
    sim.pause(70.0)
    assert sim.router.send(b"west", b"99999999") == 0
    sim.pause(1.0)
    assert sim.dealers["west"].heard[-1] == [b"99999999"]
    sim.check()


def test_damage_changes_one_bit_and_never_the_name():
    sim = Simulation()
    sim.network.damage_rate = 0.5
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
    sim.network.draw_delay = lambda rng: 0.0
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
    sim.processes["learner"] = VirtualProcess(sim.loop, "learner")
    sim.router = sim.open("learner")
    sim.pause(3.0)
    assert sim.from_("east") == [b"99999999"]
    sim.check()


def test_a_host_that_vanishes_says_nothing():
    sim = Simulation()
    sim.talk(1.0)
    sim.network.silence_connections("host-west")
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
            sim.network.draw_delay = lambda rng, mean=mean: rng.expovariate(1 / mean)
        elif fault == "freeze":
            sim.processes[a].freeze()
            sim.talk(seconds, every=0.02)
            sim.processes[a].thaw()
        elif fault == "end":
            sim.processes[a].end()
            sim.pause(rng.expovariate(1.0))
            sim.processes[a] = VirtualProcess(sim.loop, a)
            ear = sim.open(a)
            if a == "learner":
                ear.heard, sim.router = sim.router.heard, ear
            else:
                ear.heard, sim.dealers[a] = sim.dealers[a].heard, ear
        else:
            getattr(sim.network, f"{fault}_connections")(a, b, seconds)
        sim.talk(0.5, every=0.02)
    sim.network.draw_delay = lambda rng: 0.001
    sim.pause(200.0)
    sim.check()
    return sim


@pytest.mark.long
@pytest.mark.parametrize("seed", range(10))
def test_whatever_happens_nothing_comes_twice_or_out_of_order_and_it_is_the_same_again(seed):
    sim, again = story(seed), story(seed)
    assert sim.log == again.log
    assert sim.loop.callback_count == again.loop.callback_count
    assert sim.count("arrived") > 500
    heard = {name: (len(sim.from_(name)), len(dealer.heard)) for name, dealer in sim.dealers.items()}
    sim.talk(0.1)
    sim.pause(1.0)
    assert all(len(sim.from_(name)) > count for name, (count, _) in heard.items())
    assert all(len(dealer.heard) > heard[name][1] for name, dealer in sim.dealers.items()), (
        "everyone is connected again"
    )
