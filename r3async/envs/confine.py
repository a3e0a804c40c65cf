"""Launcher between the sandbox and a command: it sets limits, makes mounts for the command, and
then becomes the command.

It runs as a separate program (`python -I -S confine.py SETTINGS COMMAND…`) inside the namespaces
that `unshare` made, so it imports only the standard library. A function called between fork and
exec could do the same, but a process with threads must not run Python there.
"""

from __future__ import annotations

import ctypes
import json
import os
import resource
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

SANDBOX_FOLDERS = ("work", "home", "tmp")
"""Folders of a sandbox: where its commands start, their HOME, and their TMPDIR."""

_MS_NOSUID = 2
_MS_NODEV = 4
_MS_BIND = 4096
_MS_REC = 16384
_AT_FDCWD = -100
_AT_RECURSIVE = 0x8000
_SYS_MOUNT_SETATTR = 442
_READ_ONLY = 1
_PR_CAPBSET_DROP = 24
_PR_SET_NO_NEW_PRIVS = 38
_PR_CAP_AMBIENT = 47
_PR_CAP_AMBIENT_CLEAR_ALL = 4
_MAX_CAPABILITIES = 64
"""Upper bound on the number of capabilities, larger than the real one. The kernel refuses unknown
capabilities, which does no harm."""
_CAPABILITY_VERSION = 0x20080522
_libc = ctypes.CDLL(None, use_errno=True)


class _MountAttributes(ctypes.Structure):
    _fields_ = [
        (name, ctypes.c_uint64) for name in ("set", "clear", "propagation", "user_namespace")
    ]


def main() -> None:
    settings: dict[str, Any] = json.loads(sys.argv[1])
    if settings["root"]:
        confine_writes(Path(settings["root"]), settings["shm_bytes"], settings["top_folders"])
    for name, most in settings["limits"].items():
        resource.setrlimit(getattr(resource, name), (most, most))
    os.execvp(sys.argv[2], sys.argv[2:])


def confine_writes(root: Path, shm_bytes: int, top_folders: Sequence[str] = ()) -> None:
    """Make all files read-only, except the folders in `root`, /tmp, which becomes the sandbox's
    own, and an empty /dev/shm. With `top_folders`, those folders of `root/work` are at the top of
    the file system, in its place.

    A folder that is a mount cannot be removed, renamed or replaced. Raises `OSError` if the kernel
    does not allow all of it.
    """
    sources = {
        name: os.open(root / name, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW)
        for name in SANDBOX_FOLDERS
    }
    _set_read_only("/", True, _AT_RECURSIVE)
    _mount_filesystem("tmpfs", "/dev/shm", "tmpfs", _MS_NOSUID | _MS_NODEV, f"size={shm_bytes}")
    _mount_writable(sources["tmp"], Path("/tmp"))
    for name in SANDBOX_FOLDERS:
        if Path("/tmp") in root.parents:  # it is hidden by the mount above
            (root / name).mkdir(parents=True, exist_ok=True)
        _mount_writable(sources[name], root / name)
    if top_folders:
        _enter_view(root / "work", top_folders)
    else:
        os.chdir(root / "work")  # the mounted folder, not the one below the mount
    _drop_capabilities()


def _enter_view(work: Path, names: Sequence[str]) -> None:
    """Enter a root directory that has everything of the present one, and the folders `names` of
    `work` at the top. It is made in the place of `work`, so they have no other path, by which they
    could be renamed."""
    for name in names:
        (work / name).mkdir(exist_ok=True)
    sources = {
        name: os.open(work / name, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW) for name in names
    }
    _mount_filesystem("tmpfs", str(work), "tmpfs", _MS_NOSUID | _MS_NODEV, "size=1m")
    others = [path for path in Path("/").iterdir() if path.name not in names]
    folders = [path for path in others if path.is_dir() and not path.is_symlink()]
    for path in others:
        if path.is_symlink():
            (work / path.name).symlink_to(path.readlink())
    for name in (*names, *(path.name for path in folders)):
        (work / name).mkdir()
    _set_read_only(str(work), True)
    for path in folders:
        _mount_filesystem(str(path), str(work / path.name), "", _MS_BIND | _MS_REC)
    for name in names:
        _mount_writable(sources[name], work / name)
    os.chroot(work)
    os.chdir(f"/{names[0]}")


def _mount_writable(source: int, target: Path) -> None:
    _mount_filesystem(f"/proc/self/fd/{source}", str(target), "", _MS_BIND)
    _set_read_only(str(target), False)


def _mount_filesystem(source: str, target: str, kind: str, flags: int, data: str = "") -> None:
    _raise_on_error(
        _libc.mount(
            source.encode(), target.encode(), kind.encode(), ctypes.c_ulong(flags), data.encode()
        ),
        target,
    )


def _set_read_only(path: str, read_only: bool, flags: int = 0) -> None:
    attributes = _MountAttributes(
        _READ_ONLY if read_only else 0, 0 if read_only else _READ_ONLY, 0, 0
    )
    pointer = ctypes.byref(attributes)
    size = ctypes.c_size_t(ctypes.sizeof(attributes))
    _raise_on_error(
        _libc.syscall(_SYS_MOUNT_SETATTR, _AT_FDCWD, path.encode(), flags, pointer, size), path
    )


def _drop_capabilities() -> None:
    """Drop all capabilities, since those that allow mounting would also allow
    undoing the mounts."""
    for capability in range(_MAX_CAPABILITIES):
        _libc.prctl(_PR_CAPBSET_DROP, capability, 0, 0, 0)
    header = (ctypes.c_uint32 * 2)(_CAPABILITY_VERSION, 0)
    none = (ctypes.c_uint32 * 6)()  # of two words each: effective, permitted, inheritable
    _raise_on_error(_libc.capset(header, none), "capset")
    _libc.prctl(_PR_CAP_AMBIENT, _PR_CAP_AMBIENT_CLEAR_ALL, 0, 0, 0)
    _libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)


def _raise_on_error(result: int, path: str) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), path)


if __name__ == "__main__":
    main()
