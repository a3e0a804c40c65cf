"""Unpack this bundle of r3async and run `r3async doctor --gpu` from it.

Needs only Python's standard library, and no network. The file is copied into a bundle as `run.py`.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.metadata
import json
import os
import platform
import shutil
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

HERE = Path(__file__).resolve().parent
DONE = "bundle.json"
BLOCK = 1 << 22


def refuse(line: str) -> NoReturn:
    print(line, file=sys.stderr)
    sys.exit(2)


def check_machine(contents: dict[str, Any]) -> None:
    """Check that the wheels fit this Python, processor and C library, and that the packages left
    out are installed."""
    here = f"{sys.version_info[0]}.{sys.version_info[1]}"
    if here != contents["python"]:
        refuse(
            f"this bundle is for Python {contents['python']}, and {sys.executable} is {here}: "
            f"python{contents['python']} run.py"
        )
    _, _, minor, machine = contents["platform"].split("_", 3)
    glibc = platform.libc_ver()[1].split(".")
    if machine != platform.machine():
        refuse(f"this bundle is for {machine}, and this machine is {platform.machine()}")
    if len(glibc) > 1 and int(glibc[1]) < int(minor):
        refuse(
            f"this bundle is for glibc 2.{minor}, and this machine has {'.'.join(glibc)}: "
            "pack with --platform"
        )
    for name, version in contents["left_out"].items():
        try:
            found = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            refuse(f"{sys.executable} has no {name}, and the bundle was packed with --has {name}")
        if found.partition("+")[0] != version.partition("+")[0]:
            print(f"note: packed for {name} {version}, and this machine has {found}")


def check_pieces(contents: dict[str, Any]) -> None:
    """Exit with the name of every piece that is missing or corrupt."""
    bad = []
    for name, size, sha256 in contents["pieces"]:
        path = HERE / name
        if not path.exists():
            bad.append(f"{name} is missing")
            continue
        digest = hashlib.sha256()
        with path.open("rb") as file:
            for block in iter(lambda: file.read(BLOCK), b""):
                digest.update(block)
        if path.stat().st_size != size or digest.hexdigest() != sha256:
            bad.append(f"{name} is corrupt")
    if bad:
        refuse(f"{', '.join(bad)}: copy {'it' if len(bad) == 1 else 'them'} again")


def unpack(contents: dict[str, Any], into: Path) -> None:
    """Unpack into a new directory, which gets its name once it is complete.

    A directory that has this bundle already stays unchanged.
    """
    text = json.dumps(contents)
    if (into / DONE).exists() and (into / DONE).read_text() == text:
        return
    if into.exists() and any(into.iterdir()) and not (into / DONE).exists():
        refuse(f"{into} has files that are not of a bundle: --into names another directory")
    check_pieces(contents)
    new = into.with_name(into.name + ".new")
    shutil.rmtree(new, ignore_errors=True)
    shutil.rmtree(into, ignore_errors=True)
    into.parent.mkdir(parents=True, exist_ok=True)
    need = contents["unpacked"] + max(size for _, size in contents["wheels"])
    free = shutil.disk_usage(into.parent).free
    if free < need:
        refuse(
            f"{need / 1e9:.1f} GB to unpack, and {free / 1e9:.1f} GB free in {into.parent}: --into "
            "names another directory"
        )
    print(
        (
            f"unpacking {len(contents['wheels'])} wheels, {contents['unpacked'] / 1e9:.1f} "
            f"GB, into {into}"
        ),
        flush=True,
    )
    (new / "bin").mkdir(parents=True)
    wheel = new / "next.whl"
    stream = blocks(contents)
    left = b""
    for _, size in contents["wheels"]:
        with wheel.open("wb") as file:
            while size:
                left = left or next(stream)
                now = left[:size]
                left = left[size:]
                file.write(now)
                size -= len(now)
        install(wheel, new)
    wheel.unlink()
    command = new / "bin" / "r3async"
    command.write_text(
        f'#!/bin/sh\nPYTHONPATH="{into}:$PYTHONPATH" exec "{sys.executable}" -P -m r3async "$@"\n'
    )
    command.chmod(0o755)
    (new / DONE).write_text(text)
    new.rename(into)


def blocks(contents: dict[str, Any]) -> Iterator[bytes]:
    for name, _, _ in contents["pieces"]:
        with (HERE / name).open("rb") as file:
            while block := file.read(BLOCK):
                yield block


def install(wheel: Path, into: Path) -> None:
    """Install a wheel as pip does, but without scripts for entry points.

    Packages go to the top, scripts to `bin`, and executables stay executable.
    """
    with zipfile.ZipFile(wheel) as opened:
        for info in opened.infolist():
            if info.is_dir():
                continue
            parts = info.filename.split("/")
            if len(parts) > 2 and parts[0].endswith(".data"):
                parts = {"scripts": ["bin"], "purelib": [], "platlib": []}.get(
                    parts[1], [parts[1]]
                ) + parts[2:]
            path = into.joinpath(*parts)
            if into not in path.resolve().parents:
                refuse(f"{info.filename} leads out of the bundle")
            path.parent.mkdir(parents=True, exist_ok=True)
            with opened.open(info) as source, path.open("wb") as target:
                shutil.copyfileobj(source, target, BLOCK)
            if info.external_attr >> 16 & 0o111 or parts[0] == "bin":
                path.chmod(0o755)


def main() -> None:
    usage = "%(prog)s [--into DIRECTORY] [--small] [--only PART]... [--minutes N] [--out DIRECTORY]"
    parser = argparse.ArgumentParser(
        usage=usage, epilog="What --into does not name is passed to r3async doctor --gpu."
    )
    parser.add_argument(
        "--into",
        type=Path,
        default=HERE / "site",
        help="where the wheels are unpacked, once (default: %(default)s)",
    )
    options, others = parser.parse_known_args()
    contents = json.loads((HERE / "bundle.json").read_text())
    check_machine(contents)
    into = options.into.absolute()
    unpack(contents, into)
    path = os.pathsep.join(filter(None, [str(into), os.environ.get("PYTHONPATH", "")]))
    programs = os.pathsep.join([str(into / "bin"), os.environ.get("PATH", os.defpath)])
    print(f"any other command: {into / 'bin' / 'r3async'}", flush=True)
    line = [sys.executable, "-P", "-m", "r3async", "doctor", "--gpu", *others]
    os.execve(sys.executable, line, {**os.environ, "PYTHONPATH": path, "PATH": programs})


if __name__ == "__main__":
    main()
