"""`weights.backend = nccl`: who is told what and when, as a machine of states without sockets."""

from __future__ import annotations

from r3async.weights.nccl import (
    NcclLinkTable,
    Offer,
    Ready,
    Refused,
    Send,
    Sent,
    Up,
    decode_nccl_message,
    encode_nccl_message,
)
from tests.helpers.nccl import Process

TIMEOUT = 60.0


class Machine:
    """`NcclLinkTable` with everything around it written down."""

    def __init__(self, versions=(0, 1, 2)):
        self.processes: dict[str, Process] = {}
        self.posted: list[tuple] = []
        self.versions = list(versions)
        self.links = NcclLinkTable(
            "10.0.0.1",
            1024,
            TIMEOUT,
            start_process=self._start,
            send_message=lambda to, message: self.posted.append(
                (to, decode_nccl_message(encode_nccl_message(message)))
            ),
            find_path=lambda version: f"/v{version}" if version in self.versions else None,
            find_port=lambda host: 4000 + len(self.processes),
        )

    def _start(self, name: str) -> Process:
        return self.processes.setdefault(name, Process())

    @property
    def names(self) -> list[str]:
        return list(self.processes)

    def ready(self, version, rank=0, *, generator="g0", receiver="a", workers=2, now=0.0):
        self.links.handle_message(
            f"{generator}.{rank}".encode(), Ready(generator, receiver, version, rank, workers), now
        )

    def ready_all(self, version, **options):
        for rank in (0, 1):
            self.ready(version, rank, **options)

    def take(self) -> list[tuple]:
        posted, self.posted = self.posted, []
        return posted

    def deliver(self, version, *, generator="g0", now=0.0, **kwargs):
        """All workers ask; the newest process is up and has sent."""
        self.ready_all(version, generator=generator, now=now, **kwargs)
        name = self.names[-1]
        self.links.handle_message(b"s" + name.encode(), Up(name), now)
        self.links.handle_message(b"s" + name.encode(), Sent(name, version), now)
        return name


def test_nobody_begins_before_everybody_is_there():
    machine = Machine()
    machine.ready(0, 1)
    (name,) = machine.names
    machine.links.handle_message(b"s", Up(name), 1.0)
    assert machine.take() == []
    machine.ready(0, 0)
    offer = Offer(name, "10.0.0.1", 4000, 1024)
    assert machine.take() == [(b"g0.1", offer), (b"g0.0", offer), (b"s", Send("/v0", 0, "10.0.0.1", 4000, 2, 1024))]
    machine.links.handle_message(b"s", Sent(name, 0), 2.0)
    machine.links.drop_overdue_links(1e6)  # idle: no limit
    machine.ready(1, 0, now=1e6)
    assert machine.take() == []
    machine.ready(1, 1, now=1e6)
    assert machine.take()[-1] == (b"s", Send("/v1", 1, "10.0.0.1", 4000, 2, 1024))
    assert machine.names == [name]


def test_workers_that_ask_before_the_process_is_up_wait_for_it():
    machine = Machine()
    machine.ready_all(0)
    assert machine.take() == []
    machine.links.handle_message(b"s", Up(machine.names[0]), 5.0)
    assert [type(m) for _, m in machine.take()] == [Offer, Offer, Send]


def test_a_generator_lost_in_the_middle_costs_only_its_own_process():
    machine = Machine()
    well = machine.deliver(0, generator="g1")
    machine.ready_all(0)
    stuck = machine.names[-1]
    machine.links.handle_message(b"s", Up(stuck), 0.0)
    machine.links.drop_overdue_links(TIMEOUT - 1)
    assert not machine.processes[stuck].killed
    machine.links.drop_overdue_links(TIMEOUT + 1)
    assert machine.processes[stuck].killed
    assert not machine.processes[well].killed
    machine.links.handle_message(b"s", Sent(stuck, 0), TIMEOUT + 2)  # too late, and ignored
    again = machine.deliver(0, receiver="b", now=TIMEOUT + 3)
    assert again not in (stuck, well)
    assert len(machine.links) == 2


def test_a_generator_that_restarts_gets_a_new_group_at_once():
    machine = Machine()
    machine.ready(0, 0)
    (old,) = machine.names
    new = machine.deliver(0, receiver="b")
    assert machine.processes[old].killed
    assert not machine.processes[new].killed
    assert machine.take()[0] == (b"g0.0", Refused("version 0 was not sent: the generator has asked again"))


def test_a_group_in_which_something_went_wrong_is_not_used_again():
    machine = Machine()
    machine.ready_all(0)
    machine.links.handle_message(b"s", Up(machine.names[0]), 0.0)
    machine.take()
    machine.ready(0, 0, now=1.0)  # what it was offered, it did not get
    assert machine.processes[machine.names[0]].killed
    assert len(machine.names) == 2
    machine.ready(1, 1, now=1.0)  # one worker still waits for version 0
    assert machine.processes[machine.names[1]].killed
    assert len(machine.names) == 3


def test_the_next_version_waits_until_the_one_before_it_is_known_to_have_arrived():
    machine = Machine()
    for version in (0, 1):
        machine.ready_all(version)
        machine.links.handle_message(b"s", Up(machine.names[0]), 0.0)
    assert [m.version for _, m in machine.take() if isinstance(m, Send)] == [0]
    machine.links.handle_message(b"s", Sent(machine.names[0], 0), TIMEOUT - 1)
    assert [m.version for _, m in machine.take() if isinstance(m, Send)] == [1]
    machine.links.drop_overdue_links(2 * TIMEOUT - 2)
    machine.links.handle_message(b"s", Sent(machine.names[0], 1), 2 * TIMEOUT - 2)
    machine.ready_all(2, now=500.0)
    machine.take()
    machine.ready_all(1, now=501.0)
    machine.links.drop_overdue_links(501.0 + TIMEOUT)
    assert [type(m) for _, m in machine.take()] == [Refused, Refused]
    assert len(machine.names) == 1


def test_workers_get_the_reason_that_the_process_ended_that_too_few_came_and_that_a_version_is_lost():
    machine = Machine()
    machine.ready(0, 0)
    machine.processes[machine.names[0]].code = 3
    machine.links.drop_overdue_links(1.0)
    assert "ended with code 3" in machine.take()[0][1].reason
    machine.ready(0, 0)
    machine.links.drop_overdue_links(TIMEOUT + 1)
    assert "weights.install_timeout" in machine.take()[0][1].reason
    machine.ready(7, 0)
    assert machine.take() == [(b"g0.0", Refused("version 7 is not kept"))]
    machine.ready(1, 0)
    machine.versions.remove(1)
    machine.links.handle_message(b"s", Up(machine.names[-1]), 0.0)
    machine.links._links["g0"].waiting_workers[1] = b"g0.1"
    machine.links.handle_message(b"s", Up(machine.names[-1]), 0.0)
    assert [m.reason for _, m in machine.take()] == ["version 1 was not sent: a newer one has taken its place"] * 2
    machine.deliver(2)
    machine.links.close()
    assert all(p.killed or p.code for p in machine.processes.values())
