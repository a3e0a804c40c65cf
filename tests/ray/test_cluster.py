"""The cluster of the tests leaves nothing behind, however the tests end, and one that a run starts has no more than it needs."""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import psutil
import pytest

from r3async.world.ray_cluster import SPARE_ACTORS
from tests.helpers.cli import run_program
from tests.helpers.cluster import plain_head

ROOT = Path(__file__).parents[2]
WITHOUT_ADDRESS = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}

SCRIPT = """
from tests.helpers.cluster import plain_head
with plain_head() as address:
    print(address, flush=True)
    input()
"""


def test_a_head_ends_with_the_process_of_the_tests_also_when_that_is_killed():
    tests = subprocess.Popen([sys.executable, "-c", SCRIPT], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    daemons = []
    try:
        assert tests.stdout.readline().startswith("127.0.0.1:")
        daemons = psutil.Process(tests.pid).children(recursive=True)
        assert {"gcs_server", "raylet"} <= {process.name() for process in daemons}
        tests.kill()
        # Their agents notice by themselves, in a minute.
        _, alive = psutil.wait_procs([p for p in daemons if p.name() in ("gcs_server", "raylet")], 20)
        assert alive == []
    finally:
        tests.kill()
        tests.wait(120)
        for process in daemons:
            if process.is_running():
                process.kill()


@pytest.mark.nightly
def test_a_head_on_this_host_that_nothing_names_is_left_alone():
    """Ray finds such a head by a file, would join it, and then refuses the capacity that we ask for."""
    code = (
        "import ray; from r3async.world.real import REAL_WORLD\n"
        "REAL_WORLD.actors.join_cluster(None, 3); print(ray.cluster_resources()['CPU'])"
    )
    with plain_head() as address, tempfile.TemporaryDirectory(prefix="r3") as home:
        Path(home, "ray").mkdir()
        Path(home, "ray", "ray_current_cluster").write_text(address)
        done = run_program([sys.executable, "-c", code], cwd=ROOT, environment=WITHOUT_ADDRESS, RAY_TMPDIR=home)
    assert done.returncode == 0, done.stderr
    assert float(done.stdout.split()[-1]) == max(3, os.cpu_count() or 1) + SPARE_ACTORS, "and not the head's 32"


OWN = """
import asyncio, json, os
import psutil
from ray._private import services
from r3async.world import ActorOptions
from r3async.world.real import REAL_WORLD
from tests.helpers.processes import has_ended

class Echo:
    def __init__(self, world): pass
    async def pid(self): return os.getpid()

asked, get_node = [], services.get_node

def late(*args):
    asked.append([p.pid for p in psutil.Process().children() if p.name() in ("gcs_server", "raylet")])
    if len(asked) == 1:
        raise Exception("The current node timed out during startup. This could happen because")
    return get_node(*args)

services.get_node = late
REAL_WORLD.actors.join_cluster(None, 1)
try:
    actor = REAL_WORLD.actors.spawn_actor(Echo, name="only", actor_options=ActorOptions(threads=1))
    pid = asyncio.run(actor.call("pid", timeout=90))
    below = {p.pid: " ".join(p.cmdline()) for p in psutil.Process().children(recursive=True)}
    alive = [p for p in asked[0] if not has_ended(p)]
    print(json.dumps([len(asked[0]), alive, below.pop(pid), list(below.values())]))
finally:
    REAL_WORLD.actors.leave_cluster()
"""


def test_a_ray_of_a_runs_own_gets_a_second_chance_on_a_busy_machine_and_has_no_process_that_nobody_uses():
    """The first node reports itself too late; what it started is gone, and the second's actor answers."""
    done = run_program([sys.executable, "-c", OWN], cwd=ROOT, timeout=200, environment=WITHOUT_ADDRESS)
    assert done.returncode == 0, done.stderr
    started, alive, actor, others = json.loads(done.stdout.splitlines()[-1])
    assert (started, alive) == (2, [])
    assert "Echo" in actor
    assert any("raylet" in words for words in others)
    assert not [w for w in others if "dashboard/dashboard.py" in w or "autoscaler" in w or "ray::IDLE" in w]
