"""A run on three nodes of Ray that have hosts' names of their own: one with the learner, one with generators, one that joins.

An engine without a model. What a cut or a slow network does: `ray/test_hosts_apart.py`, `sim/test_network.py`.
"""

import os
import signal
import subprocess
import sys

import pytest

from r3async.tools.scale import scale_run
from tests.ray.test_resume_run import check_books, events, settings, trained, wait_for

pytestmark = [pytest.mark.nightly, pytest.mark.ray, pytest.mark.timeout(600)]

NODE = {"object_store_memory": 80 * 2**20, "include_dashboard": False}


def host(name: str, cpus: int) -> dict[str, object]:
    return NODE | {"num_cpus": cpus, "env_vars": {"R3ASYNC_HOST": name}}


@pytest.fixture
def cluster():
    """The learner's host, with a place for it alone, and one with places for two generators."""
    from ray.cluster_utils import Cluster

    made = Cluster(initialize_head=True, head_node_args=host("learners", 1))
    try:
        made.add_node(**host("second", 2))
        yield made
    finally:
        made.shutdown()


def test_generators_join_leave_and_are_killed_on_other_hosts_than_the_learners(cluster, untrained, tmp_path):
    run_dir, screen = tmp_path / "three", tmp_path / "screen"
    more = ["steps=100000", "schedule.max_staleness=0", "generator.count=2", "generator.concurrency=2"]
    more += [f"weights.directory={tmp_path / 'weights'}"]
    command = [sys.executable, "-m", "r3async", "train", "quickstart", "--runs", str(tmp_path)]
    environment = os.environ | {"RAY_ADDRESS": cluster.address, "R3ASYNC_HOST": "learners"}
    with screen.open("w") as file:
        driver = subprocess.Popen(
            [*command, *settings(untrained, "three", *more)], stdout=file, stderr=file, env=environment
        )

    def until(condition):
        wait_for(condition, driver, screen, 200)

    def steps_more(count):
        before = len(trained(run_dir))
        until(lambda: len(trained(run_dir)) >= before + count)

    def scale(count):
        scaled = len(events(run_dir, "scaled"))
        scale_run(run_dir, count, 0.0, print)
        return lambda: len(events(run_dir, "scaled")) == scaled + 1

    try:
        until(lambda: len(trained(run_dir)) >= 2)
        began = {e["role"]: e for e in events(run_dir, "generator_started")}
        assert {e["host"] for e in began.values()} == {"second"}
        (placed,) = events(run_dir, "placed")
        assert not set(placed["ranks"]) & set(placed["engines"])
        has_four = scale(4)
        until(lambda: events(run_dir, "scale_waits"))  # for a host
        cluster.add_node(**host("third", 2))
        until(has_four)
        assert [e["host"] for e in events(run_dir, "generator_joined")] == ["third"] * 2
        steps_more(2)
        kept = {path.name.rpartition("-")[2]: list(path.glob("version-*")) for path in (tmp_path / "weights").iterdir()}
        assert kept["second"]
        assert kept["third"]
        os.kill(began["generator-0"]["pid"], signal.SIGKILL)
        until(lambda: events(run_dir, "generator_restarted"))
        until(scale(3))
        assert [e["generator"] for e in events(run_dir, "generator_left")] == ["generator-3"]
        steps_more(2)
        driver.send_signal(signal.SIGTERM)
        driver.wait(200)
    finally:
        driver.kill()
        driver.wait(120)
    check_books(run_dir, len(trained(run_dir)))
    assert len(events(run_dir, "conductor_started")) == len(events(run_dir, "learner_started")) == 1
