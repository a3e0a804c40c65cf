"""Who is let in: keys, runs, hosts. Everyone else is refused, counted, and told why where that is possible."""

from __future__ import annotations

import asyncio
import os
import stat
from pathlib import Path

import pytest
import zmq
from typer.testing import CliRunner

from r3async.config import ConfigError, TransportConfig, config_from_dict
from r3async.transport import TransportError, TransportRefused
from r3async.transport.gate import NO_KEY, OTHER_LEARNER, UNKNOWN_KEY
from r3async.transport.keys import create_keys, load_client, load_server
from tests.helpers_transport import LIMIT, Inbox, make_trajectory, receiving, send_all, sending, until
from tools.cli import app


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    create_keys(tmp_path / "keys")
    return tmp_path / "keys"


def settings(directory: Path | str = "", ack_timeout: float = 0.3) -> TransportConfig:
    return TransportConfig(ack_timeout=ack_timeout, keys=str(directory))


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
    again = CliRunner().invoke(app, ["keys", str(directory), "--name", "east"])
    assert "nothing was changed" in again.output
    assert {p.name: p.read_bytes() for p in directory.iterdir()} == contents
    assert len(load_server(directory).allowed) == 2
    assert zmq.curve_public(load_client(directory, "west").secret) == (directory / "west.public").read_bytes().strip()


def test_keys_that_can_not_be_used_are_refused_by_name(keys):
    (keys / "generator.secret").chmod(0o640)
    with pytest.raises(TransportError, match=r"generator.secret can be read by others: chmod 600"):
        load_client(keys)
    (keys / "learner.public").write_text("short\n")
    (keys / "generator.secret").chmod(0o600)
    with pytest.raises(TransportError, match=r"learner.public holds no key"):
        load_client(keys)
    with pytest.raises(TransportError, match=r"`r3async keys .*elsewhere` makes it \(transport.keys\)"):
        load_server(keys / "elsewhere")
    with pytest.raises(ValueError, match="is no name for a key"):
        create_keys(keys, ("../x",))


async def test_delivery_with_keys(keys):
    inbox = Inbox()
    sent = [make_trajectory(i, length) for i, length in enumerate([0, 50, 20_000])]
    async with receiving(inbox, settings(keys)) as (receiver, endpoint), sending(endpoint, settings(keys)) as sender:
        await send_all(sender, sent)
        assert await sender.flush(LIMIT) == 0
        assert sorted(inbox.trajectories, key=lambda t: t.trajectory_id) == sent
        assert not receiver.refused


async def test_what_is_sent_with_keys_can_not_be_read_on_the_way(keys):
    """A proxy between the two sees every byte; without keys the id and the payload are there to be read."""
    for config, readable in ((settings(), True), (settings(keys), False)):
        seen = bytearray()
        inbox = Inbox()
        async with receiving(inbox, config) as (_, endpoint):
            port = int(endpoint.rsplit(":", 1)[1])

            async def relay(reader, writer, port=port, seen=seen):
                there, back = await asyncio.open_connection("127.0.0.1", port)

                async def pump(source, sink):
                    while data := await source.read(65536):
                        seen.extend(data)
                        sink.write(data)
                    sink.close()

                await asyncio.gather(pump(reader, back), pump(there, writer))

            server = await asyncio.start_server(relay, "127.0.0.1", 0)
            proxy = f"tcp://127.0.0.1:{server.sockets[0].getsockname()[1]}"
            async with sending(proxy, config) as sender:
                await send_all(sender, [make_trajectory("recognisable", 2000, group=0)])
                assert await sender.flush(LIMIT) == 0
            server.close()
        assert inbox.once({"trecognisable"})
        assert (b"trecognisable" in seen) == readable


async def test_a_client_without_a_key_is_refused_and_counted(keys):
    inbox = Inbox()
    async with receiving(inbox, settings(keys)) as (receiver, endpoint), sending(endpoint, settings()) as sender:
        with pytest.raises(TransportRefused, match=r"one end has `transport.keys` and the other has not"):
            await asyncio.wait_for(sender.send(make_trajectory(1)), LIMIT)
        await until(lambda: receiver.refused[NO_KEY])
        assert set(receiver.refused) == {NO_KEY}
        assert receiver.senders == 0
    assert not inbox.seen


async def test_a_client_with_a_key_meets_a_learner_without_one(keys):
    inbox = Inbox()
    async with receiving(inbox, settings()) as (_, endpoint), sending(endpoint, settings(keys)) as sender:
        with pytest.raises(TransportRefused, match=r"one end has `transport.keys` and the other has not"):
            await asyncio.wait_for(sender.send(make_trajectory(1)), LIMIT)
    assert not inbox.seen


async def test_a_client_with_a_key_that_is_not_known_is_refused_and_counted(keys, tmp_path):
    stranger = tmp_path / "stranger"
    create_keys(stranger)
    (stranger / "learner.public").write_bytes((keys / "learner.public").read_bytes())
    inbox = Inbox()
    async with receiving(inbox, settings(keys)) as (receiver, endpoint):
        async with sending(endpoint, settings(stranger)) as sender:
            with pytest.raises(
                TransportRefused, match=r"refuses this key: its `\.public` file has to be in the learner's"
            ):
                await asyncio.wait_for(sender.send(make_trajectory(1)), LIMIT)
        assert receiver.refused[UNKNOWN_KEY] >= 1
        assert set(receiver.refused) == {UNKNOWN_KEY}
        # The right key goes through beside it.
        async with sending(endpoint, settings(keys)) as sender:
            await send_all(sender, [make_trajectory(2)])
            assert await sender.flush(LIMIT) == 0
    assert inbox.once({"t2"})


async def test_a_client_with_the_key_of_another_learner_is_counted_and_never_heard(keys, tmp_path):
    """It can not be told why: what it says can not be read."""
    stranger = tmp_path / "stranger"
    create_keys(stranger)
    (stranger / "generator.secret").write_bytes((keys / "generator.secret").read_bytes())
    inbox = Inbox()
    async with receiving(inbox, settings(keys)) as (receiver, endpoint):
        async with sending(endpoint, settings(stranger)) as sender:
            task = asyncio.create_task(sender.send(make_trajectory(1)))
            await until(lambda: receiver.refused[OTHER_LEARNER])
            assert not task.done()
            task.cancel()
        assert set(receiver.refused) == {OTHER_LEARNER}
    assert not inbox.seen


async def test_a_client_of_another_run_is_refused_and_counted(keys):
    for config in (settings(), settings(keys)):
        inbox = Inbox()
        async with receiving(inbox, config) as (receiver, endpoint):
            for count in (1, 2):
                async with sending(endpoint, config, run_id="yesterday") as sender:
                    with pytest.raises(TransportRefused, match="run 'yesterday'"):
                        await asyncio.wait_for(sender.send(make_trajectory(1)), LIMIT)
                assert receiver.refused == {"another run": count}
        assert not inbox.seen


async def test_an_end_that_has_no_keys_to_read_does_not_start(tmp_path):
    missing = settings(tmp_path / "none")
    with pytest.raises(TransportError, match=r"none/learner.secret"):
        async with receiving(Inbox(), missing):
            pass
    with pytest.raises(TransportError, match=r"none/generator.secret"):
        async with sending("tcp://127.0.0.1:9", missing):
            pass


@pytest.mark.parametrize("host", ["0.0.0.0", "10.1.2.3", "::", "learner.example", "*"])
def test_a_host_that_others_can_reach_needs_keys(host):
    with pytest.raises(ConfigError, match=r"\[transport\] `host` = .*`r3async keys DIRECTORY`, or `trusted_network"):
        config_from_dict({"transport": {"host": host}})
    config_from_dict({"transport": {"host": host, "keys": "/some/where"}})
    config_from_dict({"transport": {"host": host, "trusted_network": True}})


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.8.8", "localhost", "::1", "[::1]"])
def test_loopback_needs_no_keys(host):
    config_from_dict({"transport": {"host": host}})
