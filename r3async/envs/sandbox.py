"""A sandbox for a policy's commands: each runs in a process with limits, in a temporary directory
that is removed afterwards.

It bounds accidents: a command that never ends, that starts processes without end, that fills
memory, disk or the conversation, that reaches the network, or that removes its working directory.
It does not protect against a malicious program: a command can read what its user can read, unless
there is an `image` for Docker.
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
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any, Self

import msgspec

from r3async.envs import confine
from r3async.envs.pool import PASSED_VARIABLES
from r3async.world.keeper import list_descendants
from r3async.world.kept_programs import KeptProgram

KILL_SECONDS = 5.0
"""Seconds within which a killed process group has ended."""
ISOLATION_CHECK_SECONDS = 20.0
REMOVAL_SECONDS = 60.0
WATCH_INTERVAL_SECONDS = (0.1, 2.0)
"""Shortest and longest pause, in seconds, between two checks of what a command uses: ten times the
computing time of the last check."""
ASIDE_PREFIX = "aside-"
"""Prefix of the names, in a sandbox's folder, of files that were moved out of the way."""
ENTRY_OVERHEAD_BYTES = 512
"""Bytes charged for a file without content: disks run out of inodes, too."""
MIB = 2**20
_SHELL = ("/bin/sh", "-c")
_KEEP_CAPS_OPTION = "--keep-caps"
"""Option of `unshare` with which a command's files are confined (`confine.py`)."""
_UNSHARE_OPTIONS = (
    (
        "--user",
        "--map-current-user",
        _KEEP_CAPS_OPTION,
        "--net",
        "--pid",
        "--fork",
        "--kill-child",
        "--mount-proc",
    ),
    ("--user", "--map-current-user", "--net", "--pid", "--fork", "--kill-child", "--mount-proc"),
    ("--user", "--map-current-user", "--net", "--pid", "--fork", "--kill-child"),
    ("--net", "--pid", "--fork", "--kill-child"),
    ("--user", "--map-current-user", "--net"),
)
"""Option sets for `unshare`, best first; later sets leave out what a container or an
administrator may forbid."""
_working_isolations: set[tuple[str, ...]] = set()
"""Best isolation prefixes found so far; testing one again costs as much as a command."""
_name_counter = itertools.count()


class CommandLimits(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The limits of one command; `disk_mib` limits all files of a sandbox.

    A command with more than `processes` processes, or with more files than `disk_mib`, is ended;
    this is checked every 0.1 s, or less often where a check takes long.

    Attributes:
        memory_mib: Address space of each process, and the size of /dev/shm (with Docker: memory of
            all processes), in MiB.
        output_bytes: Bytes of stdout and stderr together, of which beginning and end are kept.
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


class CommandResult(msgspec.Struct, frozen=True):
    """The result of a command.

    Attributes:
        exit_code: Exit code; None if a limit ended the command, negative for the
            signal that ended it.
        ended_by: The limit that ended the command.
        reset_reason: Why the working directory is an empty new one.
    """

    exit_code: int | None
    output: str
    ended_by: str = "out of time"
    reset_reason: str = ""

    def format_for_policy(self) -> str:
        """Return the result as the policy reads it."""
        ended = [
            f"[{self.ended_by}]" if self.exit_code is None else f"[exit code {self.exit_code}]"
        ]
        if self.reset_reason:
            ended += [f"[{self.reset_reason}: an empty directory took its place]"]
        return "\n".join([self.output.rstrip(), *ended]).lstrip()


async def find_isolation(network: bool = False) -> tuple[str, ...]:
    """Return the command prefix that isolates a command as well as this machine allows; empty
    if nothing works.

    Isolated means: no network (unless `network`), no file written outside of the sandbox, and all
    processes that a command starts end with it.
    """
    program = shutil.which("unshare")
    for options in _UNSHARE_OPTIONS if program else ():
        words = (str(program), *(o for o in options if o != "--net" or not network), "--")
        if words in _working_isolations or (len(words) > 2 and await _isolation_works(words)):
            _working_isolations.add(words)
            return words
    return ()


async def can_confine() -> bool:
    """Return True if this machine lets a command have a file system of its own,
    whatever it may write."""
    return _KEEP_CAPS_OPTION in await find_isolation()


async def _isolation_works(words: Sequence[str]) -> bool:
    root = _make_root()
    try:
        command = build_local_command(
            "echo > here && echo > /tmp/there", CommandLimits(), words, root
        )
        return (
            await run_bounded(command, ISOLATION_CHECK_SECONDS, 4096, cwd=root / "work")
        ).exit_code == 0
    finally:
        await _remove_directories(root)


def build_local_command(
    command: str,
    limits: CommandLimits,
    isolation_prefix: Sequence[str],
    root: Path,
    top_folders: Sequence[str] = (),
) -> list[str]:
    """Return the words that run `command` in a shell, under `limits`, in the sandbox at `root`."""
    most = {
        "RLIMIT_AS": limits.memory_mib * MIB,
        "RLIMIT_CPU": int(limits.seconds) + 1,
        "RLIMIT_FSIZE": limits.file_mib * MIB,
        "RLIMIT_CORE": 0,
    }
    if "--user" in isolation_prefix:
        # Elsewhere the limit would count all processes of our user, Ray's and the engine's too. It
        # does not bind root.
        most["RLIMIT_NPROC"] = limits.processes
    settings = {
        "limits": {name: min(value, _hard_limit(name)) for name, value in most.items()},
        "root": str(root) if _KEEP_CAPS_OPTION in isolation_prefix else "",
        "shm_bytes": limits.memory_mib * MIB,
        "top_folders": list(top_folders),
    }
    return [
        *isolation_prefix,
        sys.executable,
        "-I",
        "-S",
        str(confine.__file__),
        json.dumps(settings),
        *_SHELL,
        command,
    ]


def _hard_limit(name: str) -> int | float:
    hard = resource.getrlimit(getattr(resource, name))[1]
    return float("inf") if hard == resource.RLIM_INFINITY else hard


def build_docker_command(
    command: str, limits: CommandLimits, image: str, directory: Path, name: str
) -> list[str]:
    """Return the words that run `command` in a container of `image` that sees only `directory`, as
    `/work`. The container is called `name`, so that it can be killed."""
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
    """A temporary directory and the commands that run in it. `await Sandbox.open(...)` makes one;
    `close` removes it.

    A sandbox belongs to one event loop; commands may run concurrently. Processes of this
    machine get only the few environment variables that every program needs, with HOME and
    TMPDIR beside the directory.

    A command may do to the directory whatever its user may. So nothing here opens what a command
    left: anything in the way of a file is moved aside, and a directory that was removed, or that
    holds more than `disk_mib`, is replaced by an empty one.

    Args:
        image: Docker image; empty for processes of this machine.
        top_folders: Folders of the directory that commands find at the top of the file
            system: `app` as `/app`. Commands start in the first one. This needs a machine
            that `can_confine`.
    """

    def __init__(
        self,
        root: Path,
        limits: CommandLimits,
        isolation_prefix: Sequence[str],
        image: str = "",
        top_folders: Sequence[str] = (),
    ):
        self.limits = limits
        self.image = image
        self.isolation_prefix = tuple(isolation_prefix)
        self.directory = root / "work"
        self._root = root
        self._top_folders = top_folders

    @classmethod
    async def open(
        cls, limits: CommandLimits | None = None, image: str = "", top_folders: Sequence[str] = ()
    ) -> Self:
        limits = limits or CommandLimits()
        isolated = () if image else await find_isolation(limits.network)
        if top_folders and _KEEP_CAPS_OPTION not in isolated:
            raise OSError(
                "a sandbox with folders at the top needs namespaces, which this machine forbids"
            )
        return cls(_make_root(), limits, isolated, image, top_folders)

    async def write(self, files: Mapping[str, str | bytes]) -> None:
        """Write files by their path in the directory, replacing whatever a command left
        there: a link, a pipe, a directory. Raises `ValueError` for a path that leads out
        of the directory."""
        inside = {_resolve_inside(name, self.directory): text for name, text in files.items()}
        await asyncio.to_thread(self._write_files, inside)

    def _write_files(self, files: Mapping[PurePosixPath, str | bytes]) -> None:
        _restore_folders(self._root)
        aside = os.open(self._root, _OPEN_DIRECTORY_FLAGS)
        try:
            for path, text in files.items():
                _write_file(aside, path, text)
        finally:
            os.close(aside)

    async def run(self, command: str, seconds: float | None = None) -> CommandResult:
        """Run a command until it ends or exceeds a limit, and kill everything that it started.
        Cancelling kills it too."""
        limits = (
            self.limits
            if seconds is None
            else msgspec.structs.replace(self.limits, seconds=seconds)
        )
        name = f"r3async-{os.getpid()}-{next(_name_counter)}"
        words = build_local_command(
            command, limits, self.isolation_prefix, self._root, self._top_folders
        )
        if self.image:
            words = build_docker_command(command, limits, self.image, self.directory, name)
        lost = await asyncio.to_thread(_restore_folders, self._root)
        result = None
        try:
            result = await run_bounded(
                words,
                limits.seconds,
                limits.output_bytes,
                lambda pid: _wait_until_exceeded(pid, self._root, limits),
                cwd=self.directory,
                env=self._build_variables(),
            )
        finally:
            if self.image and (result is None or result.exit_code is None):
                await run_quietly("docker", "kill", name)
        lost = await asyncio.to_thread(_restore_folders, self._root, limits) or lost
        await _remove_directories(*self._root.glob(ASIDE_PREFIX + "*"))
        return msgspec.structs.replace(result, reset_reason=lost)

    def _build_variables(self) -> dict[str, str]:
        ours = {
            name: value
            for name, value in os.environ.items()
            if name in PASSED_VARIABLES or name.startswith("LC_")
        }
        own = {
            "HOME": str(self._root / "home"),
            "TMPDIR": str(self._root / "tmp"),
            "PYTHONDONTWRITEBYTECODE": "1",
        }
        path = os.pathsep.join(
            [str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)]
        )
        return {**ours, **own, "PATH": path}

    async def close(self) -> None:
        """Remove the directory. Idempotent."""
        await _remove_directories(self._root)


async def run_bounded(
    words: Sequence[str],
    seconds: float,
    output_bytes: int,
    watch: Callable[[int], Coroutine[Any, Any, str]] | None = None,
    **options: Any,
) -> CommandResult:
    """Run a program until it ends, for `seconds` at most, or until `watch` returns the limit that
    it exceeds. Everything that it started is killed then, and if this is cancelled.

    Args:
        watch: Takes the id of a process whose descendants are the processes of the program.
    """
    # We make the pipe: asyncio would wait for the end of its own pipes before it reports the end of
    # a process, and so for everything that a command left in the background.
    ours, theirs = os.pipe()
    reading = asyncio.create_task(_read_bounded(ours, output_bytes))
    try:
        program = KeptProgram(words, stdout=theirs, stderr=subprocess.STDOUT, **options)
    finally:
        os.close(theirs)
    ending = asyncio.create_task(program.wait_async())
    watching = [asyncio.create_task(watch(program.keeper_pid))] if watch else []
    try:
        await asyncio.wait(
            [ending, *watching], timeout=seconds, return_when=asyncio.FIRST_COMPLETED
        )
        code = ending.result() if ending.done() else None
        limit = next((f"ended: {each.result()}" for each in watching if each.done()), "out of time")
    finally:
        for each in (ending, *watching):
            each.cancel()
        await program.end_async()  # what it left in the background, too
    output = ""
    with contextlib.suppress(TimeoutError):  # a process of another user may hold the pipe
        output = await asyncio.wait_for(reading, KILL_SECONDS)
    return CommandResult(code, output, limit)


# -- files that a command may have changed ---------------------------------------------------------

_OPEN_DIRECTORY_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW


def _make_root() -> Path:
    root = Path(tempfile.mkdtemp(prefix="r3async-sandbox-")).resolve()
    _restore_folders(root)
    return root


async def _remove_directories(*paths: Path) -> None:
    """Remove directories and their content with a program, which handles any depth and does not
    block the event loop."""
    if paths:
        command = 'rm -rf -- "$@" || { chmod -R u+rwx -- "$@"; rm -rf -- "$@"; }'
        await run_quietly(*_SHELL, command, "rm", *map(str, paths), seconds=REMOVAL_SECONDS)


def _restore_folders(root: Path, limits: CommandLimits | None = None) -> str:
    """Ensure that `root` has its folders, as real directories that may be entered.

    Anything in their place is moved aside, and so is a working directory that holds more than
    `limits` allow. Returns why the working directory is a new empty one, or an empty text.
    """
    why = ""
    for path in (root, *(root / name for name in confine.SANDBOX_FOLDERS)):
        with contextlib.suppress(FileNotFoundError):
            mode = path.lstat().st_mode
            if not stat.S_ISDIR(mode):
                path.unlink() if path == root else _move_aside(root, path)
            elif mode & stat.S_IRWXU != stat.S_IRWXU:
                path.chmod(0o700)
        if not path.exists():
            path.mkdir(mode=0o700, parents=True)
            why = "the working directory was removed or replaced" if path == root / "work" else why
    if limits is not None:
        over = _check_disk_usage(root, limits)
        if over:
            for name in confine.SANDBOX_FOLDERS:
                _move_aside(root, root / name)
                (root / name).mkdir(mode=0o700)
            return over
    return why


def _move_aside(root: Path, path: Path) -> None:
    path.rename(root / f"{ASIDE_PREFIX}{next(_name_counter)}")


def _resolve_inside(name: str, directory: Path) -> PurePosixPath:
    """Return the path of `name` relative to `directory`, by its text alone; links are not resolved.
    Raises `ValueError` for a path outside of the sandbox."""
    path = PurePosixPath(os.path.normpath(directory / name))
    if PurePosixPath(directory) not in path.parents:
        raise ValueError(f"{name!r} is outside of the sandbox")
    return path.relative_to(directory)


def _write_file(root: int, path: PurePosixPath, content: str | bytes) -> None:
    """Write a new file and put it in the place of what is there. Every step uses the descriptor of
    a directory, and none follows a link or opens what a command made."""
    folder = os.open("work", _OPEN_DIRECTORY_FLAGS, dir_fd=root)
    try:
        for part in path.parts[:-1]:
            folder, above = _open_folder(root, part, folder), folder
            os.close(above)
        mode = _stat_mode(path.name, folder)
        if mode is not None and not stat.S_ISREG(mode):
            os.rename(
                path.name,
                f"{ASIDE_PREFIX}{next(_name_counter)}",
                src_dir_fd=folder,
                dst_dir_fd=root,
            )
            mode = None
        new = f".r3async-{os.getpid()}-{next(_name_counter)}"
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_NONBLOCK
        with open(os.open(new, flags, 0o666, dir_fd=folder), "wb") as file:
            if mode is not None:
                os.fchmod(file.fileno(), stat.S_IMODE(mode))
            file.write(content.encode() if isinstance(content, str) else content)
        os.replace(new, path.name, src_dir_fd=folder, dst_dir_fd=folder)
    finally:
        os.close(folder)


def _open_folder(root: int, name: str, above: int) -> int:
    mode = _stat_mode(name, above)
    if mode is not None and not stat.S_ISDIR(mode):
        os.rename(name, f"{ASIDE_PREFIX}{next(_name_counter)}", src_dir_fd=above, dst_dir_fd=root)
        mode = None
    if mode is None:
        os.mkdir(name, dir_fd=above)
    elif mode & stat.S_IRWXU != stat.S_IRWXU:
        os.chmod(name, stat.S_IMODE(mode) | stat.S_IRWXU, dir_fd=above)
    return os.open(name, _OPEN_DIRECTORY_FLAGS, dir_fd=above)


def _stat_mode(name: str, folder: int) -> int | None:
    """Return the mode of a directory entry itself, not of what it links to; None
    if there is none."""
    try:
        return os.stat(name, dir_fd=folder, follow_symlinks=False).st_mode
    except FileNotFoundError:
        return None


# -- what a command uses ---------------------------------------------------------------------------


async def _wait_until_exceeded(pid: int, root: Path, limits: CommandLimits) -> str:
    """Wait until a command exceeds its number of processes or its share of the disk. Returns which,
    as the policy reads it."""
    pause, longest = WATCH_INTERVAL_SECONDS
    while True:
        await asyncio.sleep(pause)
        over, seconds = await asyncio.to_thread(_measure_usage, pid, root, limits)
        if over:
            return over
        pause = min(max(WATCH_INTERVAL_SECONDS[0], 10 * seconds), longest)


def _measure_usage(pid: int, root: Path, limits: CommandLimits) -> tuple[str, float]:
    """Return the limit that is exceeded, if any, and the seconds of computing
    that the check took."""
    begun = time.thread_time()
    pids = list_descendants(pid)
    over = _check_process_count(pids, limits) or _check_disk_usage(
        root, limits, _measure_unlinked_files(pids)
    )
    return over, time.thread_time() - begun


def _check_process_count(pids: Sequence[int], limits: CommandLimits) -> str:
    return (
        f"more than {limits.processes} processes"
        if len(pids) > limits.processes + _WRAPPER_PROCESSES
        else ""
    )


_WRAPPER_PROCESSES = 2
"""Number of processes that wrap the command: `unshare` and the shell."""


def _measure_unlinked_files(pids: Sequence[int]) -> int:
    """Return the bytes on disk of files that have no name any more, and that these processes have
    open. Shared memory is not on a disk, and has its own limit."""
    found = dict[tuple[int, int], int]()
    for pid in pids:
        with contextlib.suppress(OSError):  # it has ended
            memory = os.stat(f"/proc/{pid}/root/dev/shm").st_dev
            for entry in os.scandir(f"/proc/{pid}/fd"):
                with contextlib.suppress(OSError):  # it was closed
                    facts = entry.stat()
                    unlinked = (
                        stat.S_ISREG(facts.st_mode)
                        and not facts.st_nlink
                        and facts.st_dev != memory
                    )
                    if unlinked and not os.readlink(entry.path).startswith("/memfd:"):
                        found[facts.st_dev, facts.st_ino] = 512 * facts.st_blocks
    return sum(found.values())


def _check_disk_usage(root: Path, limits: CommandLimits, unlinked_bytes: int = 0) -> str:
    left = limits.disk_mib * MIB - unlinked_bytes
    folders = [str(root / name) for name in confine.SANDBOX_FOLDERS]
    while folders:
        try:
            with os.scandir(folders.pop()) as entries:
                for entry in entries:
                    with contextlib.suppress(FileNotFoundError):
                        left -= (
                            ENTRY_OVERHEAD_BYTES + entry.stat(follow_symlinks=False).st_blocks * 512
                        )
                        if entry.is_dir(follow_symlinks=False):
                            folders.append(entry.path)
        except OSError as error:
            if error.errno == errno.ENAMETOOLONG:
                return "directories in each other without end"
        if left < 0:
            return f"more than {limits.disk_mib} MiB of files"
    return ""


async def _read_bounded(pipe: int, max_bytes: int) -> str:
    """Read a pipe to its end, close it, and return the text. If it is longer than `max_bytes`
    bytes, return beginning and end, with the number of bytes left out between them."""
    stream = asyncio.StreamReader()
    transport, _ = await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(stream), io.FileIO(pipe)
    )
    head = b""
    tail = b""
    total = 0
    try:
        while chunk := await stream.read(65536):
            total += len(chunk)
            taken = max(0, max_bytes // 2 - len(head))
            head += chunk[:taken]
            tail = (tail + chunk[taken:])[-(max_bytes - max_bytes // 2) :]
    finally:
        transport.close()
    left_out = total - len(head) - len(tail)
    between = f"\n[{left_out} bytes left out]\n" if left_out else ""
    return head.decode(errors="replace") + between + tail.decode(errors="replace")


async def run_quietly(*words: str, seconds: float = KILL_SECONDS) -> None:
    nowhere = asyncio.subprocess.DEVNULL
    with contextlib.suppress(OSError, TimeoutError):
        process = await asyncio.create_subprocess_exec(
            *words, stdin=nowhere, stdout=nowhere, stderr=nowhere
        )
        await asyncio.wait_for(process.wait(), seconds)


RUN_TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "run",
        "description": (
            "Run a shell command in the working directory. Returns its output and its exit code."
        ),
        "parameters": {
            "type": "object",
            "properties": {"command": {"type": "string"}},
            "required": ["command"],
        },
    },
}
"""Tool schema of `Sandbox.run`, for a policy."""
