"""The cluster of the tests leaves nothing behind, however the tests end."""

import subprocess
import sys

import psutil

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
        tests.wait(30)
        for process in daemons:
            if process.is_running():
                process.kill()
