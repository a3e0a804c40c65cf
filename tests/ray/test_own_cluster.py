"""A run without an address starts a Ray of its own, with no more than it needs."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

SCRIPT = """
import asyncio, json, os
import psutil
from r3async.world import ActorOptions
from r3async.world.real import REAL_WORLD

class Echo:
    def __init__(self, world): pass
    async def pid(self): return os.getpid()

REAL_WORLD.actors.join_cluster(None, 1)
try:
    actor = REAL_WORLD.actors.spawn_actor(Echo, name="only", actor_options=ActorOptions(threads=1))
    pid = asyncio.run(actor.call("pid", timeout=90))
    below = {p.pid: " ".join(p.cmdline()) for p in psutil.Process().children(recursive=True)}
    print(json.dumps([below.pop(pid), list(below.values())]))
finally:
    REAL_WORLD.actors.leave_cluster()
"""


@pytest.mark.timeout(300)
def test_it_has_no_dashboard_no_autoscaler_and_no_worker_that_nobody_uses():
    environment = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=240, env=environment, check=True
    )
    actor, others = json.loads(done.stdout.splitlines()[-1])
    assert "Echo" in actor
    assert any("raylet" in words for words in others)
    assert not [w for w in others if "dashboard/dashboard.py" in w or "autoscaler" in w or "ray::IDLE" in w]
