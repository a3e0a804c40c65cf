"""Two hosts on this machine that share no file system, no memory and no network: Linux namespaces, and a line between
them.

A packet takes `delay_seconds` each way. The line can be cut, as by a pulled cable: packets on their way are lost, and
nobody is notified.
"""

import heapq
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import psutil

DELAY_SECONDS = 0.05
PEERS = {"home": "10.77.0.1", "remote": "10.77.0.2"}
ROOT = Path(__file__).parents[2]
BEGIN_SECONDS, END_SECONDS = 60.0, 60.0
RAY_SECONDS, RAY_ATTEMPTS = 120.0, 3
CUTS_SURVIVED = {"RAY_grpc_keepalive_timeout_ms": "120000"}
"""Environment of every node, as docs/scaling.md describes it."""
SPACES = ["--net", "--mount", "--pid", "--uts", "--ipc"]


def why_not() -> str:
    """Return the reason why such hosts cannot exist here, or "" if they can."""
    for program in ("unshare", "nsenter"):
        if shutil.which(program) is None:
            return f"{program} is not installed"
    if not os.access("/dev/net/tun", os.R_OK | os.W_OK):
        return "/dev/net/tun cannot be opened"
    try:
        with ExitStack() as stack:
            stack.enter_context(_begun("home"))
    except (RuntimeError, OSError) as error:
        return f"no namespaces here: {error}"
    return ""


class Line:
    """The line between the devices of two hosts. It runs in a separate thread, which `close` ends."""

    def __init__(self, devices: tuple[int, int], delay_seconds: float):
        self._devices, self._delay_seconds = devices, delay_seconds
        self._cut = self._closed = False
        self.carried = self.lost = 0
        """Numbers of packets carried and lost so far."""
        self._thread = threading.Thread(target=self._carry, name="line", daemon=True)
        self._thread.start()

    def cut(self) -> None:
        self._cut = True

    def mend(self) -> None:
        self._cut = False

    def close(self) -> None:
        self._closed = True
        self._thread.join(END_SECONDS)

    def _carry(self) -> None:
        under_way: list[tuple[float, int, int, bytes]] = []
        others = {self._devices[0]: self._devices[1], self._devices[1]: self._devices[0]}
        number = 0
        while not self._closed:
            wait = min(max(under_way[0][0] - time.monotonic(), 0.0), 0.1) if under_way else 0.1
            ready, _, _ = select.select(self._devices, [], [], wait)
            now = time.monotonic()
            for device in ready:
                for _ in range(64):
                    try:
                        packet = os.read(device, 65536)
                    except BlockingIOError:
                        break
                    if self._cut:
                        self.lost += 1
                        continue
                    number += 1
                    heapq.heappush(under_way, (now + self._delay_seconds, number, others[device], packet))
            while under_way and under_way[0][0] <= now:
                _, _, device, packet = heapq.heappop(under_way)
                if self._cut:
                    self.lost += 1
                    continue
                with suppress(OSError):  # its host has ended
                    os.write(device, packet)
                    self.carried += 1


class Host:
    """A host. `pid` is that of its first process, seen from here."""

    def __init__(self, name: str, pid: int):
        self.name, self.address, self._pid = name, PEERS[name], pid
        self.started: list[subprocess.Popen[bytes]] = []

    def start(self, command: list[str], log: Path, **environment: str) -> subprocess.Popen[bytes]:
        """Start a process on this host, whose output goes to `log` outside of it."""
        with log.open("ab") as file:
            started = subprocess.Popen(
                [*self._enter, *command],
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file,
                env=self._environment(environment),
            )
        self.started.append(started)
        return started

    def tell(self, started: subprocess.Popen[bytes], number: int) -> None:
        """Send the signal `number` to a process on the host; `started` is what `start` returned for it."""
        (process,) = psutil.Process(started.pid).children()
        process.send_signal(number)

    def kill(self, pid: int, number: int = signal.SIGKILL) -> None:
        """Send a signal to the process that has this id on this host."""
        subprocess.run([*self._enter, "kill", f"-{int(number)}", str(pid)], check=True, timeout=240)

    def path(self, path: str) -> Path:
        """Return a path of this host as this process sees it."""
        return Path(f"/proc/{self._pid}/root") / path.lstrip("/")

    @property
    def _enter(self) -> list[str]:
        return ["nsenter", f"--target={self._pid}", *SPACES, "--"]

    def _environment(self, more: Mapping[str, str]) -> dict[str, str]:
        kept = {k: v for k, v in os.environ.items() if k not in ("RAY_ADDRESS", "R3ASYNC_HOST", "TMPDIR")}
        paths = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH", ""))))
        return (
            kept
            | CUTS_SURVIVED
            | {"HOME": "/tmp/home", "PYTHONPATH": paths, "PYTHONDONTWRITEBYTECODE": "1"}
            | dict(more)
        )


@contextmanager
def two_hosts(delay_seconds: float = DELAY_SECONDS) -> Iterator[tuple[Host, Host, Line]]:
    """Start two hosts and their line. They end with everything that runs on them, even if this process is killed."""
    with ExitStack() as stack:
        (near, near_device), (far, far_device) = (stack.enter_context(_begun(name)) for name in PEERS)
        for device in (near_device, far_device):
            os.set_blocking(device, False)
        line = Line((near_device, far_device), delay_seconds)
        stack.callback(line.close)
        yield near, far, line


def start_ray(host: Host, words: list[str], log: Path) -> None:
    """Start a Ray node of two places on the host. Ray gives a new node 30 s to report itself, however busy the machine
    is; after that the node is started again."""
    command = [str(Path(sys.executable).with_name("ray")), "start", "--block", f"--node-ip-address={host.address}"]
    command += ["--num-cpus=2", "--num-gpus=0", "--object-store-memory=150000000", "--disable-usage-stats", *words]
    for _ in range(RAY_ATTEMPTS):
        log.write_bytes(b"")
        node, deadline = host.start(command, log), time.monotonic() + RAY_SECONDS
        while node.poll() is None and time.monotonic() < deadline:
            if "Ray runtime started" in log.read_text():
                return
            time.sleep(0.2)
        node.kill()
        node.wait(END_SECONDS)
    raise RuntimeError(f"no Ray on {host.name}:\n{log.read_text()}")


@contextmanager
def _begun(name: str) -> Iterator[tuple[Host, int]]:
    ours, theirs = socket.socketpair()
    peers = ",".join(f"{host}={address}" for host, address in PEERS.items())
    keep = sorted({str(Path(path).resolve()) for path in (ROOT, sys.prefix, sys.base_prefix)})
    command = [sys.executable, "-m", "tests.helpers.host_begins", name, PEERS[name], str(theirs.fileno()), peers, *keep]
    unshare = ["unshare", *SPACES, "--fork", "--kill-child", "--mount-proc"]
    with ExitStack() as stack:
        process = stack.enter_context(
            subprocess.Popen(
                [*unshare, *command],
                stdin=subprocess.PIPE,
                stderr=subprocess.PIPE,
                pass_fds=[theirs.fileno()],
                cwd=ROOT,
            )
        )
        stack.callback(process.kill)
        stack.enter_context(ours)
        theirs.close()
        ours.settimeout(BEGIN_SECONDS)
        word, devices, _, _ = socket.recv_fds(ours, 16, 1)
        if word != b"begun":
            _, said = process.communicate(timeout=END_SECONDS)
            raise RuntimeError((said.decode().strip().splitlines() or ["it ended at once"])[-1])
        stack.callback(os.close, devices[0])
        (first,) = psutil.Process(process.pid).children()
        host = Host(name, first.pid)
        try:
            yield host, devices[0]
        finally:
            process.kill()
            psutil.wait_procs([first], END_SECONDS)  # the last one of its host
            for started in host.started:
                started.wait(END_SECONDS)
