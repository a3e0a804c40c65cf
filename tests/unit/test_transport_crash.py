"""Delivery between real processes that are killed, and one that is flooded."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.helpers.transport import LIMIT, Inbox, receiving, until

SENDER = """
import asyncio, sys
from tests.helpers.transport import CLIENT_KEYS, FAST, TrajectorySender, make_trajectory

async def main(endpoint, count):
    sender = TrajectorySender(endpoint, "g0", "run", FAST, keys=CLIENT_KEYS)
    await sender.start()
    for index in range(int(count)):
        await sender.send(make_trajectory(index))
        await asyncio.sleep(0.003)
    assert await sender.flush(20) == 0
    await sender.close()

asyncio.run(main(*sys.argv[1:]))
"""


@contextlib.contextmanager
def process(code: str, *args: Any):
    root = Path(__file__).parents[2]
    environment = {**os.environ, "PYTHONPATH": str(root)}
    child = subprocess.Popen([sys.executable, "-c", code, *map(str, args)], cwd=root, env=environment)
    try:
        yield child
    finally:
        child.kill()
        child.wait(LIMIT)


async def test_sender_process_is_killed_and_restarted():
    """The work it had not finished is done again, under the same ids."""
    inbox = Inbox()
    async with receiving(inbox) as (receiver, endpoint):
        for goal in (20, 60):
            with process(SENDER, endpoint, 100) as child:
                await until(lambda: len(inbox.seen) >= goal)  # noqa: B023
                os.kill(child.pid, signal.SIGKILL)
        with process(SENDER, endpoint, 100) as child:
            await until(lambda: child.poll() is not None, 20)
            assert child.returncode == 0
        assert inbox.once({f"t{i}" for i in range(100)})
        assert receiver.duplicates >= 80
        assert receiver.unreleased_bytes == 0


FLOODED = """
import asyncio, subprocess, sys, time
from r3async.config import TransportConfig
from r3async.transport import TrajectoryConsumer, TrajectoryReceiver
from tests.helpers.transport import SERVER_KEYS

FLOOD = '''
import sys, zmq
from r3async.world.sockets import apply_client_keys
from tests.helpers.transport import CLIENT_KEYS
dealer = zmq.Context().socket(zmq.DEALER)
dealer.linger, dealer.sndhwm = 0, 0
apply_client_keys(dealer, CLIENT_KEYS)
dealer.connect(sys.argv[1])
dealer.send(b"first")
dealer.recv()
for _ in range(60000):
    dealer.send(b"x" * 400)
dealer.poll(400)
'''

async def main():
    receiver = TrajectoryReceiver("run", TransportConfig(ack_timeout=0.2), TrajectoryConsumer(), keys=SERVER_KEYS)
    child = subprocess.Popen([sys.executable, "-c", FLOOD, await receiver.start()])
    while not receiver.rejected:
        await asyncio.sleep(0.01)
    read = receiver.rejected
    time.sleep(1.5)  # The event loop does not read: the queue fills, the peer leaves, timers run.
    child.wait(5)
    assert receiver.rejected == read
    await asyncio.sleep(0.3)
    assert receiver.rejected > read + 10
    await receiver.close()

asyncio.run(main())
"""


async def test_a_flood_while_the_event_loop_is_busy_does_not_abort_the_process():
    with process(FLOODED) as child:
        await until(lambda: child.poll() is not None, 20)
        assert child.returncode == 0
