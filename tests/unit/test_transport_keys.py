"""Who is let in, and what is not delivered: strangers are refused, counted and told nothing."""

import asyncio
import contextlib
import dataclasses
import os
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq
import zmq.asyncio
from typer.testing import CliRunner
from zmq.utils import z85

from dev.simulation.world import Simulation
from r3async.config import TransportConfig, config_from_dict
from r3async.data import control_messages, wire
from r3async.data.tokens import SCHEMA, Column
from r3async.data.wire_frames import align_offset
from r3async.tools.__main__ import app
from r3async.transport import (
    SenderRefusedError,
    TrajectoryReceiver,
    TrajectorySender,
    TransportError,
    WireError,
)
from r3async.world.curve_keys import (
    create_key_files,
    generate_keys,
    load_client_keys,
    load_server_keys,
    resolve_generator_keys,
    resolve_learner_keys,
)
from r3async.world.zmq_sockets import REFUSED_NO_KEY, REFUSED_OTHER_LEARNER, REFUSED_UNKNOWN_KEY
from tests.helpers.transport import (
    CLIENT_KEYS,
    FAST,
    HELLO,
    LIMIT,
    SERVER_KEYS,
    Inbox,
    deliver_all,
    delivered,
    make_trajectory,
    raw_dealer,
    receiving,
    sending,
    until,
    wire_size,
)

SETTINGS = TransportConfig(ack_timeout=0.3)


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    create_key_files(tmp_path / "keys")
    return tmp_path / "keys"


def test_keys_command_makes_secrets_that_only_the_owner_reads(tmp_path):
    before = os.umask(0)
    try:
        result = CliRunner().invoke(app, ["keys", str(tmp_path / "a" / "keys"), "--name", "east", "--name", "west"])
    finally:
        os.umask(before)
    assert result.exit_code == 0, result.output
    directory = tmp_path / "a" / "keys"
    modes = {p.name: stat.S_IMODE(p.stat().st_mode) for p in directory.iterdir()}
    secrets = {f"{n}.secret" for n in ("learner", "east", "west")}
    assert {name for name, mode in modes.items() if mode == 0o600} == secrets
    assert {name for name, mode in modes.items() if mode == 0o644} == {s.replace("secret", "public") for s in secrets}
    assert stat.S_IMODE(directory.stat().st_mode) == 0o700
    assert f"transport.keys={directory}" in result.output
    contents = {p.name: p.read_bytes() for p in directory.iterdir()}
    assert "nothing was changed" in CliRunner().invoke(app, ["keys", str(directory), "--name", "east"]).output
    assert {p.name: p.read_bytes() for p in directory.iterdir()} == contents
    assert len(load_server_keys(directory).allowed_public_keys) == 2
    public = zmq.curve_public(load_client_keys(directory, "west").secret_key)
    assert public == (directory / "west.public").read_bytes().strip()


def test_keys_that_can_not_be_used_are_refused_by_name(keys):
    (keys / "generator.secret").chmod(0o640)
    with pytest.raises(TransportError, match=r"generator.secret can be read by others: chmod 600"):
        load_client_keys(keys)
    (keys / "learner.public").write_text("short\n")
    (keys / "generator.secret").chmod(0o600)
    with pytest.raises(TransportError, match=r"learner.public holds no key"):
        load_client_keys(keys)
    with pytest.raises(TransportError, match=r"`python -m r3async.tools keys .*elsewhere` makes it \(transport.keys\)"):
        load_server_keys(keys / "elsewhere")


def test_keys_are_files_of_the_world():
    simulation = Simulation(1)
    files = simulation.begin_process("learner", simulation.hosts["host-0"]).world.files
    directory = Path("/a/keys")
    assert len(create_key_files(directory, files=files)) == 4
    assert create_key_files(directory, files=files) == []
    client = load_client_keys(directory, files=files)
    assert z85.decode(zmq.curve_public(client.secret_key)) in load_server_keys(directory, files).allowed_public_keys
    with files.open(directory / "generator.public") as file:
        key = file.read()
    with files.open(directory / "west.secret", exclusive=True, mode=0o640) as file:
        file.append([key])
    with pytest.raises(TransportError, match=r"west.secret can be read by others"):
        load_client_keys(directory, "west", files=files)
    simulation.close()


async def test_every_start_of_a_run_has_keys_of_its_own_and_delivers_with_them():
    """What a learner and a generator do of themselves, without a word of configuration, over loopback."""
    (server, handed), (_, of_another_start) = resolve_learner_keys(SETTINGS), resolve_learner_keys(SETTINGS)
    assert handed != of_another_start
    inbox = Inbox()
    async with receiving(inbox, SETTINGS, keys=server) as (receiver, endpoint):
        async with sending(endpoint, SETTINGS, keys=resolve_generator_keys(SETTINGS, handed)) as sender:
            await deliver_all(sender, [make_trajectory(1)])
        async with sending(endpoint, SETTINGS, keys=of_another_start) as late:
            task = asyncio.create_task(late.send(make_trajectory(2)))
            await until(lambda: receiver.refused_peers[REFUSED_OTHER_LEARNER])
            assert not task.done()  # it cannot be told why: what it says cannot be read
            task.cancel()
        assert set(receiver.refused_peers) == {REFUSED_OTHER_LEARNER}
    assert inbox.once({"t1"})


async def test_keys_of_a_directory_are_used_and_none_is_handed_over(keys):
    settings, inbox = TransportConfig(keys=str(keys), ack_timeout=0.3), Inbox()
    server, handed = resolve_learner_keys(settings)
    assert (server, handed) == (load_server_keys(keys), None)
    client = resolve_generator_keys(settings, handed)
    assert client == load_client_keys(keys)
    async with (
        receiving(inbox, settings, keys=server) as (receiver, endpoint),
        sending(endpoint, settings, keys=client) as sender,
    ):
        await deliver_all(sender, [make_trajectory(1)])
        assert not receiver.refused_peers
    assert inbox.once({"t1"})
    with pytest.raises(TransportError, match=r"has keys of `transport.keys`, and this generator does not"):
        resolve_generator_keys(SETTINGS, None)


def test_a_secret_key_is_not_printed():
    for keys in generate_keys():
        assert keys.secret_key.decode() not in repr(keys)
        assert repr(keys.secret_key) not in f"{keys} {keys!r}"


async def test_what_is_sent_can_not_be_read_on_the_way():
    """A proxy between the two sees every byte, and none of the id, the run's or the payload's."""
    seen = bytearray()
    inbox = Inbox()
    async with receiving(inbox, SETTINGS) as (_, endpoint):
        port = int(endpoint.rsplit(":", 1)[1])

        async def relay(reader, writer):
            there, back = await asyncio.open_connection("127.0.0.1", port)

            async def pump(source, sink):
                while data := await source.read(65536):
                    seen.extend(data)
                    sink.write(data)
                sink.close()

            await asyncio.gather(pump(reader, back), pump(there, writer))

        server = await asyncio.start_server(relay, "127.0.0.1", 0)
        proxy = f"tcp://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        sent = make_trajectory("recognisable", 2000, group=0)
        async with sending(proxy, SETTINGS) as sender:
            await deliver_all(sender, [sent])
        server.close()
    assert inbox.once({"trecognisable"})
    assert len(seen) > wire_size(sent)
    assert b"trecognisable" not in seen
    assert bytes(sent.samples[0].table["token_ids"][:8].data) not in seen


@pytest.mark.parametrize("mechanism", ["null", "plain"])
async def test_a_stranger_on_this_machine_gets_no_trajectory_in_and_no_word_out(mechanism):
    """Loopback too: it says HELLO for the right run, and delivers, and hears nothing of the run, not even its name."""
    inbox = Inbox()
    frames = wire.encode_trajectory(make_trajectory(1))
    async with receiving(inbox, SETTINGS) as (receiver, endpoint):
        with stranger(endpoint, mechanism) as socket:
            for message in (
                [control_messages.encode_control(control_messages.Hello("s", "g0", "run", SCHEMA.fingerprint))],
                delivered("t1", 0, 10_000, *frames, session="s"),
            ):
                with contextlib.suppress(zmq.Again):  # it may be refused before it has said all
                    socket.send_multipart(message, zmq.DONTWAIT)
            await until(lambda: receiver.refused_peers[REFUSED_NO_KEY])
            assert not await asyncio.to_thread(socket.poll, 300)
        assert await asyncio.wait_for(_all_bytes_of_a_bare_connection(endpoint), LIMIT) < 256
        assert (receiver.sender_count, receiver.rejected, receiver.unreleased_bytes) == (0, 0, 0)
        # The right key goes through beside it.
        async with sending(endpoint, SETTINGS) as sender:
            await deliver_all(sender, [make_trajectory(2)])
    assert inbox.once({"t2"})


@contextlib.contextmanager
def stranger(endpoint: str, mechanism: str) -> Iterator[zmq.Socket[bytes]]:
    context = zmq.Context()
    socket = context.socket(zmq.DEALER)
    socket.linger = 0
    if mechanism == "plain":
        socket.plain_username, socket.plain_password = b"generator", b"guess"
    socket.connect(endpoint)
    try:
        yield socket
    finally:
        context.destroy(linger=0)


async def _all_bytes_of_a_bare_connection(endpoint: str) -> int:
    """What the port says to whoever greets it: ZeroMQ's greeting, and nothing of ours."""
    reader, writer = await asyncio.open_connection("127.0.0.1", int(endpoint.rsplit(":", 1)[1]))
    writer.write(b"\xff" + bytes(8) + b"\x7f\x03\x00NULL" + bytes(48))
    said = bytearray()
    with contextlib.suppress(TimeoutError, ConnectionError):
        async with asyncio.timeout(1):
            while data := await reader.read(4096):
                said += data
    writer.close()
    assert b"run" not in said
    assert b"g0" not in said
    return len(said)


async def test_a_sender_whose_learner_has_no_keys_is_told_and_sends_nothing():
    """Something else listens there: whatever it is, it gets no trajectory."""
    context = zmq.asyncio.Context()
    router = context.socket(zmq.ROUTER)
    router.linger = 0
    port = router.bind_to_random_port("tcp://127.0.0.1")
    try:
        async with sending(f"tcp://127.0.0.1:{port}", SETTINGS) as sender:
            with pytest.raises(SenderRefusedError, match=r"what listens there has no keys"):
                await asyncio.wait_for(sender.send(make_trajectory(1)), LIMIT)
        assert not await router.poll(0)
    finally:
        router.close()
        context.term()


async def test_a_client_with_a_key_that_is_not_known_is_refused_and_counted():
    stranger = dataclasses.replace(generate_keys()[1], server_public_key=CLIENT_KEYS.server_public_key)
    inbox = Inbox()
    async with receiving(inbox, SETTINGS) as (receiver, endpoint):
        async with sending(endpoint, SETTINGS, keys=stranger) as sender:
            with pytest.raises(
                SenderRefusedError, match=r"refuses this key: with `transport.keys`, its `\.public` file has to be"
            ):
                await asyncio.wait_for(sender.send(make_trajectory(1)), LIMIT)
        assert receiver.refused_peers[REFUSED_UNKNOWN_KEY] >= 1
        assert set(receiver.refused_peers) == {REFUSED_UNKNOWN_KEY}
        # The right key goes through beside it.
        async with sending(endpoint, SETTINGS) as sender:
            await deliver_all(sender, [make_trajectory(2)])
    assert inbox.once({"t2"})


async def test_a_client_of_another_run_is_refused_and_counted_and_not_told_which_run_this_is():
    """Runs may share `transport.keys`."""
    inbox = Inbox()
    async with receiving(inbox, SETTINGS, run_id="todays-secret-plan") as (receiver, endpoint):
        for count in (1, 2):
            async with sending(endpoint, TransportConfig(ack_timeout=60), run_id="yesterday") as sender:  # one hello
                with pytest.raises(SenderRefusedError, match="run 'yesterday'") as refused:
                    await asyncio.wait_for(sender.send(make_trajectory(1)), LIMIT)
                with pytest.raises(SenderRefusedError, match="yesterday"):
                    await sender.flush(LIMIT)
                assert sender.reconnects == 0
            assert "todays-secret-plan" not in str(refused.value)
            assert receiver.refused_peers == {"another run": count}
    assert not inbox.seen


@pytest.mark.parametrize("host", ["0.0.0.0", "10.1.2.3", "127.0.0.1", "[::1]", "*"])
def test_any_host_may_be_listened_on_since_every_run_has_keys(host):
    server, handed = resolve_learner_keys(config_from_dict({"transport": {"host": host}}).transport)
    assert handed is not None
    assert z85.decode(zmq.curve_public(handed.secret_key)) in server.allowed_public_keys


async def test_malformed_messages():
    frames = [bytes(f) for f in wire.encode_trajectory(make_trajectory(1))]
    size = sum(align_offset(len(frame)) for frame in frames)
    nan = make_trajectory(2)
    payloads = {
        "checksum": [frames[0], bytes([frames[1][0] ^ 1]) + frames[1][1:], *frames[2:]],
        "malformed header": [frames[0][:-1], *frames[1:]],
        f"only {len(frames) - 2} column frames": frames[:-1],
        "the payload is trajectory 't1' of 0": frames,
        "at least a header": [],
        f"and {size} were announced": [*frames, b"more"],
    }
    inbox = Inbox()
    async with receiving(inbox) as (receiver, endpoint):
        async with raw_dealer(endpoint) as peer:
            garbage = [(b"",), (b"", b"x"), (b"\xc1\x00",), (b"\x91" * 60_000,), (b"x" * 100_000,), tuple([b"y"] * 50)]
            for n, bad in enumerate(
                [*garbage, (control_messages.Ack(["t"]),), (control_messages.Reject("t", "why"),)], 1
            ):
                await peer.send(*bad)
                answer = await peer.answer()
                assert isinstance(answer, control_messages.Reject)
                assert answer.trajectory_id == ""
                assert answer.reason
                assert receiver.rejected == n
            await peer.send(*delivered("x", 0, size, *frames))
            assert await peer.answer() == control_messages.Refusal("session", "unknown session: say HELLO", False)
            await peer.send(HELLO)
            for n, (reason, payload) in enumerate(payloads.items()):
                await peer.send(*delivered(f"x{n}", 0, size, *payload))
                answer = await peer.answer()
                assert isinstance(answer, control_messages.Reject)
                assert answer.trajectory_id == f"x{n}"
                assert answer.again == ("never" if reason.endswith("announced") else "damaged")
                assert reason in answer.reason
            # An old session's leftovers are neither taken nor answered.
            await peer.send(*delivered("x", 0, size, *frames, session="before"))
            assert await peer.answer(0.3) is None
        assert receiver.rejected == len(garbage) + 2 + 1
        assert receiver.damaged == len(payloads) - 1
        assert receiver.unreleased_bytes == 0
        async with sending(endpoint) as sender:
            await deliver_all(sender, [nan])
    assert inbox.once({"t2"})


async def test_another_schema_and_another_version_of_the_wire_are_refused_for_good():
    inbox = Inbox()
    other = SCHEMA.with_column(Column("entropy", ("float32",), 0.0, optional=True)).fingerprint
    async with receiving(inbox) as (receiver, endpoint):
        async with raw_dealer(endpoint) as peer:
            await peer.send(control_messages.Hello("s", "raw", "run", other))
            answer = await peer.answer()
            assert answer.final
            assert f"token schema '{other}'" in answer.reason
            assert "the columns differ" in answer.reason
            await peer.send(control_messages.Hello("s", "raw", "run", SCHEMA.fingerprint, wire=wire.WIRE_VERSION - 1))
            answer = await peer.answer()
            assert answer.final
            assert f"wire version {wire.WIRE_VERSION - 1}, the learner has {wire.WIRE_VERSION}" in answer.reason
        assert receiver.rejected == 2
        assert receiver.sender_count == 0
    assert not inbox.seen


async def test_bad_addresses_and_bad_trajectories_are_clear_errors():
    with pytest.raises(TransportError, match="cannot connect to 'nowhere'"):
        await TrajectorySender("nowhere", "g0", "run", FAST, keys=CLIENT_KEYS).start()
    inbox = Inbox()
    async with receiving(inbox) as (_, endpoint), sending(endpoint) as sender:
        port = int(endpoint.rsplit(":", 1)[1])
        with pytest.raises(TransportError, match=r"cannot listen on .*Address already in use"):
            await TrajectoryReceiver("run", FAST, keys=SERVER_KEYS, port=port).start()
        with pytest.raises(WireError, match="100 characters"):
            await asyncio.wait_for(sender.send(make_trajectory("x" * 300, group=0)), LIMIT)
        assert sender.unacknowledged == 0
