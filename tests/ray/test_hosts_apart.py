"""The quickstart on two hosts that share nothing but the installation, with a line of 50 ms each way between them that is cut.

Real Ray, vLLM, Megatron and ZeroMQ. The hosts are Linux namespaces of this machine (`helpers/hosts_apart.py`): each has its own
network, processes, /tmp and /dev/shm, and cannot write anywhere else.
"""

import signal
import sys
import time

import pytest
import torch
import xxhash
from safetensors.torch import load

from r3async.record.reading import read_json_objects
from r3async.tools.scale import scale_run
from r3async.weights.manifest import TensorEntry, WeightManifest
from tests.helpers.hosts_apart import start_ray, two_hosts, why_not
from tests.ray.test_resume_run import check_books, events, trained, wait_for

pytestmark = [pytest.mark.ray, pytest.mark.timeout(900)]

CUT_SECONDS = 20.0
WAIT_SECONDS = 300.0
WEIGHTS = "/dev/shm/weights"
SETTINGS = [
    "name=apart",
    "steps=100000",
    "model.init.warm_reward=0.3",
    "generator.count=2",
    "generator.kv_cache_gib=0.25",
    f"weights.directory={WEIGHTS}",
]


@pytest.fixture
def hosts(tmp_path):
    """Two hosts in one Ray: the learner's, with a place for one generator beside it, and one with places for two."""
    if reason := why_not():
        pytest.skip(f"no hosts can be made here: {reason}")
    with two_hosts() as (home, remote, line):
        start_ray(home, ["--head", "--port=6379", "--include-dashboard=false"], tmp_path / "home")
        start_ray(remote, [f"--address={home.address}:6379"], tmp_path / "remote")
        yield home, remote, line


def digest(content: bytes) -> int:
    """Of the tensors in a safetensors file, as a manifest has it."""
    tensors = {
        name: TensorEntry(
            str(tensor.dtype).removeprefix("torch."),
            tuple(tensor.shape),
            xxhash.xxh3_64_intdigest(tensor.contiguous().view(-1).view(torch.uint8).numpy()),
        )
        for name, tensor in load(content).items()
    }
    return WeightManifest(0, "", tensors, 0).digest


def compare_version(home, remote) -> int | None:
    """A version whose file both hosts have; None if they have none in common at the moment. Asserts that it is the same, bit by
    bit, and what its name says."""
    for there in remote.path(WEIGHTS).glob("weights-*/version-*-*.safetensors"):
        _, version, named = there.stem.split("-")
        for here in home.path(WEIGHTS).glob(f"weights-*/version-{version}.safetensors"):
            try:
                content = here.read_bytes(), there.read_bytes()
            except FileNotFoundError:  # newer versions took their places
                continue
            assert content[0] == content[1]
            assert digest(content[1]) == int(named, 16)
            return int(version)
    return None


@pytest.mark.nightly
def test_a_run_over_two_hosts_learns_through_a_kill_a_cut_and_changes_of_its_fleet(hosts, tmp_path):
    home, remote, line = hosts
    run_dir, screen = home.path("/tmp/runs/apart"), tmp_path / "screen"
    command = [sys.executable, "-m", "r3async", "train", "quickstart", "--runs", "/tmp/runs", *SETTINGS]
    driver = home.start(command, screen, RAY_ADDRESS=f"{home.address}:6379")

    def until(condition):
        wait_for(condition, driver, screen, WAIT_SECONDS)

    def steps_more(count):
        before = len(trained(run_dir))
        until(lambda: len(trained(run_dir)) >= before + count)

    def scale(count):
        scaled = len(events(run_dir, "scaled"))
        scale_run(run_dir, count, 0.0, print)
        return lambda: len(events(run_dir, "scaled")) > scaled

    until(lambda: len(trained(run_dir)) >= 5 and len(events(run_dir, "generator_started")) == 2)
    began = {event["role"]: event for event in events(run_dir, "generator_started")}
    assert {name: event["host"] for name, event in began.items()} == {"generator-0": "remote", "generator-1": "home"}

    remote.kill(began["generator-0"]["pid"])
    has_three = scale(3)
    until(lambda: events(run_dir, "generator_restarted") and has_three())
    assert [event["host"] for event in events(run_dir, "generator_joined")] == ["remote"]
    until(lambda: compare_version(home, remote) is not None)

    line.cut()
    time.sleep(CUT_SECONDS)
    line.mend()
    assert line.lost
    before = trained(run_dir)[-1]["step"]
    steps_more(5)
    until(lambda: (compare_version(home, remote) or 0) > before)

    until(scale(2))
    assert [event["generator"] for event in events(run_dir, "generator_left")] == ["generator-2"]
    steps_more(5)
    home.tell(driver, signal.SIGTERM)
    assert driver.wait(WAIT_SECONDS) == 0, screen.read_text()

    check_books(run_dir, len(trained(run_dir)), 16, 8)
    assert len(events(run_dir, "conductor_started")) == len(events(run_dir, "learner_started")) == 1
    assert "generator-0" in [event["generator"] for event in events(run_dir, "generator_restarted")]
    rewards = [row["reward/mean"] for row in read_json_objects(run_dir / "metrics.jsonl")]
    half = len(rewards) // 2
    assert sum(rewards[-half:]) > sum(rewards[:half]), rewards
    probed = {event["generator"] for event in events(run_dir, "probe") if event["version"] > 0}
    assert probed >= {"generator-0", "generator-1", "generator-2"}
    seen = [
        name for name in ("metrics.jsonl", "init", "checkpoints") if remote.path(f"/tmp/runs/apart/{name}").exists()
    ]
    assert seen == [], "the other host sees files of the run"
