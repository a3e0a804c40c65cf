"""The job that `r3async tail --address` runs on a cluster, and what is made of its log. The cluster is played by a process."""

import asyncio
import contextlib
import os
import signal
import subprocess
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from r3async.tools.tail.remote import RemoteError, RemoteRun
from r3async.views.follow import FollowedRun
from tests.tools.test_tail import append, row, write_run


class Cluster:
    """Takes jobs as Ray's client does, and runs them here, in the directory that their environment names."""

    def __init__(self, address: str, headers: object = None):
        self.process: subprocess.Popen[str] | None = None
        self.environment: dict = {}

    def list_jobs(self):
        def job(name: str, status: str, start: int, where: str, **metadata: str):
            return SimpleNamespace(
                submission_id=name,
                job_id=None,
                status=status,
                start_time=start,
                metadata=metadata,
                runtime_env={"cwd": where},
            )

        return [
            job("old", "SUCCEEDED", 3, "elsewhere"),
            job("training", "RUNNING", 1, "here"),
            job("a view", "RUNNING", 9, "elsewhere", r3async="r3async-tail"),
        ]

    def submit_job(self, *, entrypoint: str, runtime_env: dict, metadata: dict) -> str:
        self.environment = runtime_env
        # A group of its own: to end the shell alone would leave what it started, and whoever reads from that, for ever.
        self.process = subprocess.Popen(
            entrypoint, shell=True, stdout=subprocess.PIPE, text=True, start_new_session=True
        )
        return "submitted"

    async def tail_job_logs(self, job: str):
        assert self.process is not None
        assert self.process.stdout is not None
        yield "a line of somebody else\n"
        while text := await asyncio.to_thread(self.process.stdout.readline):
            yield text[: len(text) // 2]  # pieces end anywhere
            yield text[len(text) // 2 :]

    def stop_job(self, job: str) -> None:
        assert self.process is not None
        os.killpg(self.process.pid, signal.SIGTERM)


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    made: list[Cluster] = []
    monkeypatch.setattr(
        "ray.job_submission.JobSubmissionClient", lambda *a, **k: made.append(Cluster(*a, **k)) or made[0]
    )
    monkeypatch.chdir(tmp_path)
    yield made
    for each in made:
        if each.process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(each.process.pid, signal.SIGKILL)
            each.process.wait(120)


def test_a_run_is_mirrored_as_it_grows_and_the_job_ends_with_it(cluster, tmp_path: Path) -> None:
    run_dir = write_run(tmp_path, 3)
    with (run_dir / "metrics.jsonl").open("ab") as file:
        file.write(b'{"torn":')
    remote = RemoteRun("http://cluster:8265", "demo", tmp_path / "mirror")
    mirrored = remote.wait_ready()
    assert cluster[0].environment == {"cwd": "here"}, "that of the newest job that runs and is no view"
    run = FollowedRun(mirrored)
    run.read_new()
    assert (run.name, run.step, run.planned_steps) == ("demo", 3, 40)
    with (run_dir / "metrics.jsonl").open("ab") as file:
        file.write(b"1}\n")
    append(run_dir / "metrics.jsonl", row(4))
    append(run_dir / "events.jsonl", {"time": 1.0, "event": "run_finished"})
    deadline = time.monotonic() + 240
    while not (run.has_ended and run.step == 4) and time.monotonic() < deadline:
        time.sleep(0.1)
        run.read_new()
    assert (run.status, run.step) == ("finished", 4)
    assert cluster[0].process.wait(120) == 0


def test_closing_the_view_ends_the_job(cluster, tmp_path: Path) -> None:
    write_run(tmp_path, 1)
    remote = RemoteRun("http://cluster:8265", "demo", tmp_path / "mirror", job="old")
    remote.wait_ready()
    assert cluster[0].environment == {"cwd": "elsewhere"}
    remote.close()
    assert cluster[0].process.wait(120) != 0


def test_a_run_or_job_that_is_not_there_is_named_with_what_is(cluster, tmp_path: Path) -> None:
    write_run(tmp_path, 1)
    with pytest.raises(RemoteError, match=r"no run 'none' in .*runs; there are: demo"):
        RemoteRun("http://cluster:8265", "none", tmp_path / "mirror").wait_ready()
    with pytest.raises(RemoteError, match=r"no job 'other'; there are: old, training"):
        RemoteRun("http://cluster:8265", "demo", tmp_path / "mirror", job="other")


def test_a_cluster_that_does_not_answer_says_what_an_address_is(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def refuse(*args: object, **options: object):
        raise ConnectionError("refused")

    monkeypatch.setattr("ray.job_submission.JobSubmissionClient", refuse)
    with pytest.raises(RemoteError, match=r"http://HOST:8265"):
        RemoteRun("http://nowhere:1", "demo", tmp_path)
