"""Commands of a policy, each in a process with limits, in a temporary directory that is gone afterwards.

It bounds accidents: a command that never ends, that fills memory, disk or the conversation, or that reaches the network. It is no
wall against a program that means harm: without an `image` for Docker a command can read what its user can read.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import resource
import shutil
import signal
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import msgspec

from r3async.envs.pool import VARIABLES

ENDING_SECONDS = 5.0
"""A group that was killed has ended by then."""
PROBE_SECONDS = 5.0
_SHELL = ("/bin/sh", "-c")
_NAMESPACES = (
    ("--user", "--map-current-user", "--net", "--pid", "--fork", "--kill-child", "--mount-proc"),
    ("--user", "--map-current-user", "--net", "--pid", "--fork", "--kill-child"),
    ("--net", "--pid", "--fork", "--kill-child"),
    ("--user", "--map-current-user", "--net"),
)
"""Of `unshare`, the best first: what a container or an administrator forbids is left out."""
_LIMIT = (
    "import json, os, resource, sys\n"
    "for name, most in json.loads(sys.argv[1]).items(): resource.setrlimit(getattr(resource, name), (most, most))\n"
    "os.execvp(sys.argv[2], sys.argv[2:])"
)
"""Not `preexec_fn`: between fork and exec a process with threads must run no Python."""
_names = itertools.count()


class CommandLimits(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Of one command. `memory_mib` is each process's address space (with Docker: all processes' memory); `processes` counts where
    `unshare` or Docker isolates; `output_bytes` of stdout and stderr together, of which beginning and end are kept."""

    seconds: float = 30.0
    memory_mib: int = 2048
    processes: int = 128
    file_mib: int = 256
    output_bytes: int = 8192
    network: bool = False

    def __post_init__(self) -> None:
        for name in ("seconds", "memory_mib", "processes", "file_mib", "output_bytes"):
            if not getattr(self, name) > 0:
                raise ValueError(f"`{name}` = {getattr(self, name)!r} must be above 0")


class Ran(msgspec.Struct, frozen=True):
    """What a command did. `code`: None if it ran out of time; negative for the signal that ended it."""

    code: int | None
    output: str

    def told(self) -> str:
        """As the policy reads it."""
        ended = "out of time" if self.code is None else f"exit code {self.code}"
        return f"{self.output.rstrip()}\n[{ended}]".lstrip()


async def isolation(network: bool = False) -> tuple[str, ...]:
    """The words before a command that isolate it as well as this machine lets us: no network (unless `network`), and all that it
    starts ends with it. Empty where nothing works."""
    program = shutil.which("unshare")
    for options in _NAMESPACES if program else ():
        words = (str(program), *(o for o in options if o != "--net" or not network), "--")
        if len(words) > 2 and await _works(words):
            return words
    return ()


async def _works(words: Sequence[str]) -> bool:
    process = await asyncio.create_subprocess_exec(
        *words,
        *_SHELL,
        "exit 0",
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.DEVNULL,
        start_new_session=True,
    )
    with contextlib.suppress(TimeoutError):
        return await asyncio.wait_for(process.wait(), PROBE_SECONDS) == 0
    _kill(process)
    return False


def local_command(command: str, limits: CommandLimits, isolated: Sequence[str]) -> list[str]:
    """`command` for a shell, under `limits`."""
    mib = 2**20
    most = {
        "RLIMIT_AS": limits.memory_mib * mib,
        "RLIMIT_CPU": int(limits.seconds) + 1,
        "RLIMIT_FSIZE": limits.file_mib * mib,
        "RLIMIT_CORE": 0,
    }
    if "--user" in isolated:
        # Elsewhere it would count all processes of our user, Ray's and the engine's too.
        most["RLIMIT_NPROC"] = limits.processes
    allowed = {name: min(value, _hard(name)) for name, value in most.items()}
    return [*isolated, sys.executable, "-I", "-S", "-c", _LIMIT, json.dumps(allowed), *_SHELL, command]


def _hard(name: str) -> int | float:
    hard = resource.getrlimit(getattr(resource, name))[1]
    return float("inf") if hard == resource.RLIM_INFINITY else hard


def docker_command(command: str, limits: CommandLimits, image: str, directory: Path, name: str) -> list[str]:
    """`command` in a container of `image` that sees only `directory`, as `/work`. `name`: what to kill it by."""
    memory = f"{limits.memory_mib}m"
    return [
        *("docker", "run", "--rm", "--init", "--name", name),
        *("--network", "bridge" if limits.network else "none"),
        *("--memory", memory, "--memory-swap", memory, "--pids-limit", str(limits.processes)),
        *("--ulimit", f"fsize={limits.file_mib * 2**20}", "--ulimit", "core=0"),
        *("--cap-drop", "ALL", "--security-opt", "no-new-privileges", "--read-only", "--tmpfs", "/tmp"),
        *("--user", f"{os.getuid()}:{os.getgid()}", "--env", "HOME=/tmp"),
        *("--volume", f"{directory}:/work", "--workdir", "/work"),
        *(image, *_SHELL, command),
    ]


class Sandbox:
    """A directory of its own, and the commands that run in it. `await Sandbox.open(...)` makes one; `close` removes it.

    `image`: of Docker; empty for processes of this machine. They get a few environment variables that every program needs, with
    HOME and TMPDIR beside the directory. Belongs to one event loop; commands may run at once.
    """

    def __init__(self, root: Path, limits: CommandLimits, isolated: Sequence[str], image: str = ""):
        self.limits, self.image, self.isolated = limits, image, tuple(isolated)
        self.directory = root / "work"
        self._root = root
        for name in ("work", "home", "tmp"):
            (root / name).mkdir()

    @classmethod
    async def open(cls, limits: CommandLimits | None = None, image: str = "") -> Self:
        limits = limits or CommandLimits()
        isolated = () if image else await isolation(limits.network)
        return cls(Path(tempfile.mkdtemp(prefix="r3async-sandbox-")), limits, isolated, image)

    def write(self, files: Mapping[str, str]) -> None:
        """Files by their path in the directory. Raises `ValueError` for a path that leads out of it."""
        for name, text in files.items():
            path = (self.directory / name).resolve()
            if not path.is_relative_to(self.directory.resolve()):
                raise ValueError(f"{name!r} is outside of the sandbox")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)

    async def run(self, command: str, seconds: float | None = None) -> Ran:
        """Until it ends, or its time is over: then everything that it started is killed. Cancelling kills it too."""
        limits = self.limits if seconds is None else msgspec.structs.replace(self.limits, seconds=seconds)
        name = f"r3async-{os.getpid()}-{next(_names)}"
        words = local_command(command, limits, self.isolated)
        if self.image:
            words = docker_command(command, limits, self.image, self.directory, name)
        process = await asyncio.create_subprocess_exec(
            *words,
            cwd=self.directory,
            env=self._variables(),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            start_new_session=True,
        )
        assert process.stdout is not None
        reading = asyncio.create_task(_bounded(process.stdout, limits.output_bytes))
        code: int | None = None
        try:
            with contextlib.suppress(TimeoutError):
                code = await asyncio.wait_for(process.wait(), limits.seconds)
        finally:
            _kill(process)  # its group: what it left in the background too
            if self.image and code is None:
                await _quietly("docker", "kill", name)
        with contextlib.suppress(TimeoutError):
            return Ran(code, await asyncio.wait_for(reading, ENDING_SECONDS))
        return Ran(code, "")  # something that escaped its group holds the pipe

    def _variables(self) -> dict[str, str]:
        ours = {name: value for name, value in os.environ.items() if name in VARIABLES or name.startswith("LC_")}
        own = {"HOME": str(self._root / "home"), "TMPDIR": str(self._root / "tmp"), "PYTHONDONTWRITEBYTECODE": "1"}
        path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])
        return {**ours, **own, "PATH": path}

    async def close(self) -> None:
        """Remove the directory. Idempotent."""
        await asyncio.to_thread(shutil.rmtree, self._root, True)


async def _bounded(stream: asyncio.StreamReader, most: int) -> str:
    """All that comes; of more than `most` bytes the beginning and the end, and how much lay between."""
    head, tail, total = b"", b"", 0
    while chunk := await stream.read(65536):
        total += len(chunk)
        taken = max(0, most // 2 - len(head))
        head += chunk[:taken]
        tail = (tail + chunk[taken:])[-(most - most // 2) :]
    left_out = total - len(head) - len(tail)
    between = f"\n[{left_out} bytes left out]\n" if left_out else ""
    return head.decode(errors="replace") + between + tail.decode(errors="replace")


def _kill(process: asyncio.subprocess.Process) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)


async def _quietly(*words: str) -> None:
    nowhere = asyncio.subprocess.DEVNULL
    with contextlib.suppress(OSError, TimeoutError):
        process = await asyncio.create_subprocess_exec(*words, stdin=nowhere, stdout=nowhere, stderr=nowhere)
        await asyncio.wait_for(process.wait(), ENDING_SECONDS)


RUN: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "run",
        "description": "Run a shell command in the working directory. Returns its output and its exit code.",
        "parameters": {"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]},
    },
}
"""`Sandbox.run` as a tool for a policy."""
