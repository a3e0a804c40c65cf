"""Commands of a policy, each in a process with limits, in a temporary directory that is gone afterwards.

It bounds accidents: a command that never ends, that starts processes without end, that fills memory, disk or the conversation,
that reaches the network, or that removes the directory which it works in. It is no wall against a program that means harm: a
command can read what its user can read, unless there is an `image` for Docker.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import io
import itertools
import json
import os
import resource
import shutil
import signal
import stat
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any, Self

import msgspec

from r3async.envs import confine
from r3async.envs.pool import VARIABLES

ENDING_SECONDS = 5.0
"""A group that was killed has ended by then."""
PROBE_SECONDS = 20.0
REMOVAL_SECONDS = 60.0
WATCH_SECONDS = (0.1, 2.0)
"""At least and at most between two looks at what a command uses: ten times what the last one computed."""
ASIDE = "aside-"
"""So begin the names, in a sandbox's folder, of what stood in the way."""
ENTRY_BYTES = 512
"""What a file without content uses: disks run out of names, too."""
MIB = 2**20
_SHELL = ("/bin/sh", "-c")
_MOUNTS = "--keep-caps"
"""With it a command's files are confined (`confine.py`)."""
_NAMESPACES = (
    ("--user", "--map-current-user", _MOUNTS, "--net", "--pid", "--fork", "--kill-child", "--mount-proc"),
    ("--user", "--map-current-user", "--net", "--pid", "--fork", "--kill-child", "--mount-proc"),
    ("--user", "--map-current-user", "--net", "--pid", "--fork", "--kill-child"),
    ("--net", "--pid", "--fork", "--kill-child"),
    ("--user", "--map-current-user", "--net"),
)
"""Of `unshare`, the best first: what a container or an administrator forbids is left out."""
_working: set[tuple[str, ...]] = set()
"""The best that were found: another try costs as much as a command."""
_names = itertools.count()


class CommandLimits(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Bounds one command; `disk_mib` bounds all files of a sandbox.

    `memory_mib` is each process's address space, and the size of /dev/shm (with Docker: all processes' memory). `output_bytes`
    are of stdout and stderr together, of which beginning and end are kept. A command with more `processes`, or with more files
    than `disk_mib`, is ended; it is looked at ten times a second.
    """

    seconds: float = 30.0
    memory_mib: int = 2048
    processes: int = 128
    file_mib: int = 256
    disk_mib: int = 1024
    output_bytes: int = 8192
    network: bool = False

    def __post_init__(self) -> None:
        for name in ("seconds", "memory_mib", "processes", "file_mib", "disk_mib", "output_bytes"):
            if not getattr(self, name) > 0:
                raise ValueError(f"`{name}` = {getattr(self, name)!r} must be above 0")


class Ran(msgspec.Struct, frozen=True):
    """What a command did. `code`: None if a limit ended it; negative for the signal that ended it. `limit` says which.
    `lost`: why the working directory is an empty new one."""

    code: int | None
    output: str
    limit: str = "out of time"
    lost: str = ""

    def told(self) -> str:
        """As the policy reads it."""
        ended = [f"[{self.limit}]" if self.code is None else f"[exit code {self.code}]"]
        ended += [f"[{self.lost}: an empty directory took its place]"] * bool(self.lost)
        return "\n".join([self.output.rstrip(), *ended]).lstrip()


async def isolation(network: bool = False) -> tuple[str, ...]:
    """The words before a command that isolate it as well as this machine lets us: no network (unless `network`), no file written
    outside of the sandbox, and all that it starts ends with it. Empty where nothing works."""
    program = shutil.which("unshare")
    for options in _NAMESPACES if program else ():
        words = (str(program), *(o for o in options if o != "--net" or not network), "--")
        if words in _working or (len(words) > 2 and await _works(words)):
            _working.add(words)
            return words
    return ()


async def _works(words: Sequence[str]) -> bool:
    root = _new_root()
    process = await asyncio.create_subprocess_exec(
        *local_command("echo > here && echo > /tmp/there", CommandLimits(), words, root),
        cwd=root / "work",
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        return await asyncio.wait_for(process.wait(), PROBE_SECONDS) == 0
    except TimeoutError:
        return False
    finally:
        _kill(process)
        await _remove(root)


def local_command(command: str, limits: CommandLimits, isolated: Sequence[str], root: Path) -> list[str]:
    """`command` for a shell, under `limits`, in the sandbox at `root`."""
    most = {
        "RLIMIT_AS": limits.memory_mib * MIB,
        "RLIMIT_CPU": int(limits.seconds) + 1,
        "RLIMIT_FSIZE": limits.file_mib * MIB,
        "RLIMIT_CORE": 0,
    }
    if "--user" in isolated:
        # Elsewhere it would count all processes of our user, Ray's and the engine's too. Nothing it says holds for root.
        most["RLIMIT_NPROC"] = limits.processes
    settings = {
        "limits": {name: min(value, _hard(name)) for name, value in most.items()},
        "root": str(root) if _MOUNTS in isolated else "",
        "shm_bytes": limits.memory_mib * MIB,
    }
    return [*isolated, sys.executable, "-I", "-S", str(confine.__file__), json.dumps(settings), *_SHELL, command]


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
        *("--ulimit", f"fsize={limits.file_mib * MIB}", "--ulimit", "core=0"),
        *("--cap-drop", "ALL", "--security-opt", "no-new-privileges", "--read-only"),
        *("--tmpfs", f"/tmp:size={memory}"),
        *("--user", f"{os.getuid()}:{os.getgid()}", "--env", "HOME=/tmp"),
        *("--volume", f"{directory}:/work", "--workdir", "/work"),
        *(image, *_SHELL, command),
    ]


class Sandbox:
    """A directory of its own, and the commands that run in it. `await Sandbox.open(...)` makes one; `close` removes it.

    `image`: of Docker; empty for processes of this machine. They get a few environment variables that every program needs, with
    HOME and TMPDIR beside the directory. Belongs to one event loop; commands may run at once.

    A command may do to the directory whatever its user may. So nothing here opens what a command left: what stands in the way
    of a file is moved aside, and a directory that is no more, or holds more than `disk_mib`, is replaced by an empty one.
    """

    def __init__(self, root: Path, limits: CommandLimits, isolated: Sequence[str], image: str = ""):
        self.limits, self.image, self.isolated = limits, image, tuple(isolated)
        self.directory = root / "work"
        self._root = root

    @classmethod
    async def open(cls, limits: CommandLimits | None = None, image: str = "") -> Self:
        limits = limits or CommandLimits()
        isolated = () if image else await isolation(limits.network)
        return cls(_new_root(), limits, isolated, image)

    async def write(self, files: Mapping[str, str]) -> None:
        """Write files by their path in the directory, in place of whatever a command left there: a link, a pipe, a directory.
        Raises `ValueError` for a path that leads out of it."""
        inside = {_inside(name, self.directory): text for name, text in files.items()}
        await asyncio.to_thread(self._write, inside)

    def _write(self, files: Mapping[PurePosixPath, str]) -> None:
        _restore(self._root)
        aside = os.open(self._root, _DIRECTORY)
        try:
            for path, text in files.items():
                _write_file(aside, path, text)
        finally:
            os.close(aside)

    async def run(self, command: str, seconds: float | None = None) -> Ran:
        """Until it ends, or a limit ends it: then everything that it started is killed. Cancelling kills it too."""
        limits = self.limits if seconds is None else msgspec.structs.replace(self.limits, seconds=seconds)
        name = f"r3async-{os.getpid()}-{next(_names)}"
        words = local_command(command, limits, self.isolated, self._root)
        if self.image:
            words = docker_command(command, limits, self.image, self.directory, name)
        lost = await asyncio.to_thread(_restore, self._root)
        # A pipe of our own: before asyncio says that a process has ended it waits for the end of its pipes, and so for all that a
        # command left in the background.
        ours, theirs = os.pipe()
        reading = asyncio.create_task(_bounded(ours, limits.output_bytes))
        try:
            process = await asyncio.create_subprocess_exec(
                *words,
                cwd=self.directory,
                env=self._variables(),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=theirs,
                stderr=asyncio.subprocess.STDOUT,
                start_new_session=True,
            )
        finally:
            os.close(theirs)
        ending = asyncio.create_task(process.wait())
        watching = asyncio.create_task(_exceeded(process.pid, self._root, limits))
        try:
            await asyncio.wait([ending, watching], timeout=limits.seconds, return_when=asyncio.FIRST_COMPLETED)
            code = ending.result() if ending.done() else None
            limit = f"ended: {watching.result()}" if watching.done() else "out of time"
        finally:
            watching.cancel()
            _kill(process)  # its group: what it left in the background too
            if self.image and not ending.done():
                await _quietly("docker", "kill", name)
        lost = await asyncio.to_thread(_restore, self._root, limits) or lost
        await _remove(*self._root.glob(ASIDE + "*"))
        output = ""
        with contextlib.suppress(TimeoutError):  # something that escaped its group may hold the pipe
            output = await asyncio.wait_for(reading, ENDING_SECONDS)
        return Ran(code, output, limit, lost)

    def _variables(self) -> dict[str, str]:
        ours = {name: value for name, value in os.environ.items() if name in VARIABLES or name.startswith("LC_")}
        own = {"HOME": str(self._root / "home"), "TMPDIR": str(self._root / "tmp"), "PYTHONDONTWRITEBYTECODE": "1"}
        path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])
        return {**ours, **own, "PATH": path}

    async def close(self) -> None:
        """Remove the directory. Idempotent."""
        await _remove(self._root)


# -- files that a command may have changed -------------------------------------------------------------------------

_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW


def _new_root() -> Path:
    root = Path(tempfile.mkdtemp(prefix="r3async-sandbox-")).resolve()
    _restore(root)
    return root


async def _remove(*paths: Path) -> None:
    """Remove directories with all that is in them, by a program: no depth of directories ends it, and no loop waits for it."""
    if paths:
        command = 'rm -rf -- "$@" || { chmod -R u+rwx -- "$@"; rm -rf -- "$@"; }'
        await _quietly(*_SHELL, command, "rm", *map(str, paths), seconds=REMOVAL_SECONDS)


def _restore(root: Path, limits: CommandLimits | None = None) -> str:
    """Make `root` have its folders, as real ones that may be entered. What is there in their place is moved aside, and so is a
    working directory that holds more than `limits` allow. Returns why that one is an empty new one, or nothing."""
    why = ""
    for path in (root, *(root / name for name in confine.FOLDERS)):
        with contextlib.suppress(FileNotFoundError):
            mode = path.lstat().st_mode
            if not stat.S_ISDIR(mode):
                path.unlink() if path == root else _move_aside(root, path)
            elif mode & stat.S_IRWXU != stat.S_IRWXU:
                path.chmod(0o700)
        if not path.exists():
            path.mkdir(mode=0o700, parents=True)
            why = "the working directory was removed or replaced" if path == root / "work" else why
    if limits is not None and (over := _over_disk(root, limits)):
        for name in confine.FOLDERS:
            _move_aside(root, root / name)
            (root / name).mkdir(mode=0o700)
        return over
    return why


def _move_aside(root: Path, path: Path) -> None:
    path.rename(root / f"{ASIDE}{next(_names)}")


def _inside(name: str, directory: Path) -> PurePosixPath:
    """The path of `name` in `directory`, by its words alone: what links lead to, only a look would tell."""
    path = PurePosixPath(os.path.normpath(directory / name))
    if PurePosixPath(directory) not in path.parents:
        raise ValueError(f"{name!r} is outside of the sandbox")
    return path.relative_to(directory)


def _write_file(root: int, path: PurePosixPath, text: str) -> None:
    """Write a new file and put it in the place of what is there. Every step is by the descriptor of a directory, and none follows
    a link or opens what a command made."""
    folder = os.open("work", _DIRECTORY, dir_fd=root)
    try:
        for part in path.parts[:-1]:
            folder, above = _open_folder(root, part, folder), folder
            os.close(above)
        mode = _mode_of(path.name, folder)
        if mode is not None and not stat.S_ISREG(mode):
            os.rename(path.name, f"{ASIDE}{next(_names)}", src_dir_fd=folder, dst_dir_fd=root)
            mode = None
        new = f".r3async-{os.getpid()}-{next(_names)}"
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_NONBLOCK
        with open(os.open(new, flags, 0o666, dir_fd=folder), "w", encoding="utf-8") as file:
            if mode is not None:
                os.fchmod(file.fileno(), stat.S_IMODE(mode))
            file.write(text)
        os.replace(new, path.name, src_dir_fd=folder, dst_dir_fd=folder)
    finally:
        os.close(folder)


def _open_folder(root: int, name: str, above: int) -> int:
    mode = _mode_of(name, above)
    if mode is not None and not stat.S_ISDIR(mode):
        os.rename(name, f"{ASIDE}{next(_names)}", src_dir_fd=above, dst_dir_fd=root)
        mode = None
    if mode is None:
        os.mkdir(name, dir_fd=above)
    elif mode & stat.S_IRWXU != stat.S_IRWXU:
        os.chmod(name, stat.S_IMODE(mode) | stat.S_IRWXU, dir_fd=above)
    return os.open(name, _DIRECTORY, dir_fd=above)


def _mode_of(name: str, folder: int) -> int | None:
    """Of what is there, itself, and not of what it links to. None where there is nothing."""
    try:
        return os.stat(name, dir_fd=folder, follow_symlinks=False).st_mode
    except FileNotFoundError:
        return None


# -- what a command uses -------------------------------------------------------------------------------------------


async def _exceeded(pid: int, root: Path, limits: CommandLimits) -> str:
    """Wait until a command exceeds its number of processes or its share of the disk. Returns which, as the policy reads it."""
    pause, longest = WATCH_SECONDS
    while True:
        await asyncio.sleep(pause)
        over, seconds = await asyncio.to_thread(_look, pid, root, limits)
        if over:
            return over
        pause = min(max(WATCH_SECONDS[0], 10 * seconds), longest)


def _look(pid: int, root: Path, limits: CommandLimits) -> tuple[str, float]:
    """What is exceeded, if anything, and the seconds of computing that it took to see."""
    begun = time.thread_time()
    over = _over_processes(pid, limits) or _over_disk(root, limits)
    return over, time.thread_time() - begun


def _over_processes(pid: int, limits: CommandLimits) -> str:
    found, count = [pid], 0
    while found:
        children = Path("/proc", str(found.pop()), "task")
        with contextlib.suppress(OSError):  # it has ended
            for thread in children.iterdir():
                found += [int(child) for child in (thread / "children").read_text().split()]
        count += 1
        if count > limits.processes + _OURS:
            return f"more than {limits.processes} processes"
    return ""


_OURS = 2
"""`unshare` and the shell, which are no processes of the command."""


def _over_disk(root: Path, limits: CommandLimits) -> str:
    left, folders = limits.disk_mib * MIB, [str(root / name) for name in confine.FOLDERS]
    while folders:
        try:
            with os.scandir(folders.pop()) as entries:
                for entry in entries:
                    with contextlib.suppress(FileNotFoundError):
                        left -= ENTRY_BYTES + entry.stat(follow_symlinks=False).st_blocks * 512
                        if entry.is_dir(follow_symlinks=False):
                            folders.append(entry.path)
        except OSError as error:
            if error.errno == errno.ENAMETOOLONG:
                return "directories in each other without end"
        if left < 0:
            return f"more than {limits.disk_mib} MiB of files"
    return ""


async def _bounded(pipe: int, most: int) -> str:
    """All that comes, and then closes `pipe`; of more than `most` bytes the beginning and the end, and how much lay between."""
    stream = asyncio.StreamReader()
    transport, _ = await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(stream), io.FileIO(pipe)
    )
    head, tail, total = b"", b"", 0
    try:
        while chunk := await stream.read(65536):
            total += len(chunk)
            taken = max(0, most // 2 - len(head))
            head += chunk[:taken]
            tail = (tail + chunk[taken:])[-(most - most // 2) :]
    finally:
        transport.close()
    left_out = total - len(head) - len(tail)
    between = f"\n[{left_out} bytes left out]\n" if left_out else ""
    return head.decode(errors="replace") + between + tail.decode(errors="replace")


def _kill(process: asyncio.subprocess.Process) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)


async def _quietly(*words: str, seconds: float = ENDING_SECONDS) -> None:
    nowhere = asyncio.subprocess.DEVNULL
    with contextlib.suppress(OSError, TimeoutError):
        process = await asyncio.create_subprocess_exec(*words, stdin=nowhere, stdout=nowhere, stderr=nowhere)
        await asyncio.wait_for(process.wait(), seconds)


RUN: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "run",
        "description": "Run a shell command in the working directory. Returns its output and its exit code.",
        "parameters": {"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]},
    },
}
"""`Sandbox.run` as a tool for a policy."""
