"""Mirror a run on another machine through the jobs API of its Ray cluster: its files are copied
here as they grow.

A small job on the cluster prints the new lines of the run's files; it uses only the standard
library, only reads, and requests no CPU. The lines are appended to files of the same names here,
which the view follows like those of any run. The job is started in the environment of the job that
trains, so `runs/latest` means the same as there. It ends with the view, when the run has ended, or
after `MAX_LIFE_SECONDS`.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import tempfile
import threading
from pathlib import Path
from typing import Any

from r3async.record.reading import EVALUATION_FILE

from ..submit.launch import make_entrypoint
from .lines import tail_local

LINE_MARK = "r3async-tail"
MAX_LIFE_SECONDS = 24 * 3600
ANSWER_TIMEOUT_SECONDS = 90.0

_SCRIPT = """
import base64, os, sys, time
mark, name, life = sys.argv[1], sys.argv[2], float(sys.argv[3])
root = os.environ.get("R3ASYNC_RUNS", "runs")  # `r3async submit` names it
found = [p for p in (name, os.path.join(root, name)) if os.path.isfile(os.path.join(p, "config.toml"))]
def say(kind, data=b""):
    print(mark, kind, base64.b64encode(data).decode(), flush=True)
if not found:
    there = sorted(os.listdir(root)) if os.path.isdir(root) else []
    say("missing", ("no run %r in %s; there are: %s" % (name, os.path.abspath(root), ", ".join(there) or "none")).encode())
    sys.exit(0)
say("name", os.path.basename(os.path.realpath(found[0])).encode())
say("config.toml", open(os.path.join(found[0], "config.toml"), "rb").read())
places, end, whole, last = {}, time.time() + life, False, b""
while time.time() < end:
    news = False
    for file in ("events.jsonl", "metrics.jsonl", "evaluation.jsonl"):
        try:
            with open(os.path.join(found[0], file), "rb") as lines:
                at = places.get(file, 0)
                lines.seek(at if at <= os.fstat(lines.fileno()).st_size else 0)
                at = lines.tell()
                data = lines.read(1 << 20)
        except FileNotFoundError:
            continue
        data = data[: data.rfind(b"\\n") + 1]
        if data:
            places[file], news = at + len(data), True
            say(file, data)
            if file == "events.jsonl":
                last = data.splitlines()[-1]
    if news:
        continue
    if not whole:
        say("whole")  # everything that was there
        whole = True
    if b'"run_finished"' in last or b'"run_failed"' in last:
        break
    time.sleep(1)
say("end")
"""


class RemoteError(RuntimeError):
    """An error of the connection to the cluster or to the run on it; the message gives a remedy."""


def tail_remote(
    address: str,
    name: str,
    *,
    job: str | None = None,
    follow: bool = True,
    patience: float = 1800.0,
) -> int:
    """Show a run on the Ray cluster at `address` as `tail_local` does. Raises `RemoteError`."""
    with tempfile.TemporaryDirectory(prefix="r3async-tail-") as directory:
        remote = RemoteRun(address, name, Path(directory), job=job)
        try:
            return tail_local(remote.wait_ready(), follow=follow, patience=patience)
        finally:
            remote.close()


class RemoteRun:
    """A mirror of the run `name` of the cluster at `address` (`http://HOST:8265`) in `directory`.

    Args:
        job: Submission id of the job that trains; by default the newest running one.
        headers: Headers of every request, such as a token.
    """

    def __init__(
        self,
        address: str,
        name: str,
        directory: Path,
        *,
        job: str | None = None,
        headers: dict[str, str] | None = None,
    ):
        from ..submit.jobs import open_job_client

        try:
            self._client = open_job_client(address, headers)
            environment = self._find_job_environment(job)
            code = f"import base64;exec(base64.b64decode('{_encode_script()}'))"
            self._id = self._client.submit_job(
                entrypoint=make_entrypoint(["-c", code, LINE_MARK, name, str(MAX_LIFE_SECONDS)]),
                runtime_env=environment,
                metadata={"r3async": LINE_MARK},
            )
        except RemoteError:
            raise
        except Exception as error:
            raise RemoteError(
                f"{address} did not take the job ({_first_line(error)}): --address is the "
                "cluster's dashboard, http://HOST:8265 (ssh -L 8265:localhost:8265 HOST brings it "
                "here); with token authentication set RAY_AUTH_MODE=token and RAY_AUTH_TOKEN_PATH"
            ) from error
        self.directory = directory
        self.run_dir: Path | None = None
        self._problem = ""
        self._ready = threading.Event()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run_mirror, daemon=True)
        self._thread.start()

    def _find_job_environment(self, job: str | None) -> dict[str, Any]:
        """Return the environment of the job that trains; its working directory is
        where the run is."""
        details = [
            d
            for d in self._client.list_jobs()
            if (d.metadata or {}).get("r3async") != LINE_MARK and d.submission_id
        ]
        if job is not None:
            chosen = [d for d in details if job in (d.submission_id, d.job_id)]
            if not chosen:
                known = ", ".join(str(d.submission_id) for d in details[:5]) or "none"
                raise RemoteError(f"there is no job {job!r}; there are: {known}")
        else:
            chosen = sorted(details, key=lambda d: (d.status == "RUNNING", d.start_time or 0))
        return dict(chosen[-1].runtime_env or {}) if chosen else {}

    def wait_ready(self) -> Path:
        """Return the mirrored run's directory once everything written so far is in it.
        Raises `RemoteError`."""
        if not self._ready.wait(ANSWER_TIMEOUT_SECONDS) and not self._problem:
            self._problem = (
                f"the job {self._id} did not answer within {ANSWER_TIMEOUT_SECONDS:.0f} s; is "
                "the cluster full?"
            )
        if self.run_dir is None or not self._ready.is_set():
            raise RemoteError(
                self._problem or f"the job {self._id} ended without an answer; look at its log"
            )
        return self.run_dir

    def close(self) -> None:
        """End the job on the cluster."""
        with contextlib.suppress(Exception):
            self._client.stop_job(self._id)

    def _run_mirror(self) -> None:
        try:
            asyncio.run(self._copy_lines())
        except Exception as error:
            self._problem = (
                self._problem or f"the connection to the job broke: {_first_line(error)}"
            )
        finally:
            self._over.set()
            self._ready.set()

    async def _copy_lines(self) -> None:
        rest = ""
        async for text in self._client.tail_job_logs(self._id):
            *lines, rest = (rest + text).split("\n")
            for line in lines:
                parts = line.split(" ")
                if parts[0] == LINE_MARK and len(parts) == 3:
                    self._handle_message(parts[1], base64.b64decode(parts[2]))

    def _handle_message(self, kind: str, data: bytes) -> None:
        if kind == "missing":
            self._problem = data.decode(errors="replace")
            self._ready.set()
        elif kind == "name":
            self.run_dir = self.directory / Path(data.decode(errors="replace")).name
            self.run_dir.mkdir(parents=True, exist_ok=True)
        elif (
            kind in ("config.toml", "events.jsonl", "metrics.jsonl", EVALUATION_FILE)
            and self.run_dir is not None
        ):
            with (self.run_dir / kind).open("ab") as file:
                file.write(data)
        elif kind == "whole":
            self._ready.set()


def _encode_script() -> str:
    return base64.b64encode(_SCRIPT.encode()).decode()


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
