"""Bundle r3async for a GPU machine without a package index and without pip:
`python -m dev pack-gpu DIRECTORY`.

A bundle holds wheels in pieces, with checksums, and `run.py`, which unpacks and runs them with
nothing but Python's standard library.

pip resolves and downloads for the other machine's Python and platform. A package that the
machine already has is presented to pip as a wheel without content and requirements, and left
out of the bundle.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from packaging.markers import default_environment
from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name
from packaging.version import InvalidVersion, Version

import r3async
from r3async.config.vllm_arguments import UNWANTED_PACKAGES

DIST = "r3async"
RUN = "run.py"
CONTENTS = "bundle.json"
PIECE = "piece-"
UNPACK = Path(__file__).with_name("unpack.py")
PIP_SECONDS = 3600.0
OLDEST_GLIBC = 5
LEGACY = {17: "manylinux2014", 12: "manylinux2010", 5: "manylinux1"}


class PackError(ValueError):
    """An error that prevents a bundle; its one-line message names what is missing."""


class Target(NamedTuple):
    """The machine that the bundle is for: its Python, such as "3.12", and the newest platform tag
    that it accepts."""

    python: str
    platform: str

    @classmethod
    def read(cls, python: str | None, tag: str | None) -> Target:
        """Return the target for the given options; missing ones are those of this interpreter.
        Raises `PackError`."""
        tag = tag or "manylinux_{}_{}".format(
            (platform.libc_ver()[1] or "2.28").replace(".", "_"), platform.machine()
        )
        python = python or f"{sys.version_info.major}.{sys.version_info.minor}"
        if not re.fullmatch(r"3\.\d+", python):
            raise PackError(f"--python {python}: a version such as 3.12")
        if not re.fullmatch(r"manylinux_2_\d+_[a-z0-9_]+", tag):
            raise PackError(
                f"--platform {tag}: a tag such as manylinux_2_28_x86_64, of the other "
                "machine's glibc (2.28)"
            )
        return cls(python, tag)

    def pip_options(self) -> list[str]:
        """Return pip's options for the machine: wheels only, of every tag that it accepts."""
        _, _, minor, machine = self.platform.split("_", 3)
        tags = []
        for n in range(int(minor), OLDEST_GLIBC - 1, -1):
            tags += [
                f"manylinux_2_{n}_{machine}",
                *([f"{LEGACY[n]}_{machine}"] if n in LEGACY else []),
            ]
        out = ["--only-binary=:all:", "--implementation=cp", f"--python-version={self.python}"]
        return out + [f"--platform={tag}" for tag in (*tags, f"linux_{machine}")]

    def marker_environment(self) -> dict[str, str]:
        """Return the environment in which the machine evaluates requirement markers.

        pip would evaluate them for the interpreter that it runs in.
        """
        found = {key: str(value) for key, value in default_environment().items()}
        if self.python != found["python_version"]:
            found |= {"python_version": self.python, "python_full_version": f"{self.python}.0"}
        return found | {
            "platform_machine": self.platform.split("_", 3)[3],
            "platform_release": "",
            "platform_version": "",
        }


# --- wheels built here ----------------------------------------------------------------------------


def build_own_wheel(directory: Path) -> Path:
    """Build the wheel of r3async as imported here, from a checkout or an installation."""
    found = importlib.metadata.distribution(DIST)
    files = {f"{name}": found.read_text(name) or "" for name in ("METADATA", "entry_points.txt")}
    root = Path(r3async.__file__).parent
    content: dict[str, bytes] = {}
    for folder, inner, names in os.walk(root, followlinks=True):
        inner[:] = sorted(set(inner) - {"__pycache__"})
        for path in (Path(folder) / name for name in sorted(names) if not name.endswith(".pyc")):
            content[f"{DIST}/{path.relative_to(root).as_posix()}"] = path.read_bytes()
    return _write_wheel(directory, DIST, found.version, content, files)


def build_stand_in(directory: Path, name: str, version: str) -> Path:
    """Build an empty wheel that makes pip believe in a package that the other machine has."""
    return _write_wheel(
        directory,
        name,
        version,
        {},
        {"METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"},
    )


def _write_wheel(
    directory: Path, name: str, version: str, content: Mapping[str, bytes], info: Mapping[str, str]
) -> Path:
    tag = "py3-none-any"
    stem = f"{canonicalize_name(name).replace('-', '_')}-{version}"
    path = directory / f"{stem}-{tag}.whl"
    about = {
        **info,
        "WHEEL": f"Wheel-Version: 1.0\nGenerator: {DIST}\nRoot-Is-Purelib: true\nTag: {tag}\n",
    }
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as wheel:
        for inner, data in content.items():
            wheel.writestr(inner, data)
        for inner, text in about.items():
            wheel.writestr(f"{stem}.dist-info/{inner}", text)
        names = [*content, *(f"{stem}.dist-info/{inner}" for inner in (*about, "RECORD"))]
        wheel.writestr(f"{stem}.dist-info/RECORD", "".join(f"{n},,\n" for n in names))
    return path


# --- dependency resolution with pip ---------------------------------------------------------------


def resolve_packages(
    requirements: Sequence[str], target: Target, scratch: Path
) -> list[dict[str, Any]]:
    """Return pip's report on each package that `requirements` resolve to on that machine.
    Raises `PackError`."""
    wanted = list(requirements)
    while True:
        found = _resolve_once(wanted, target, scratch)
        more = find_lacking(
            [p["metadata"] for p in found], requirements, target.marker_environment()
        )
        if not more - set(wanted):
            return found
        wanted += sorted(more)


def _resolve_once(words: Sequence[str], target: Target, scratch: Path) -> list[dict[str, Any]]:
    file = scratch / "report.json"
    line = [
        "install",
        "--dry-run",
        "--ignore-installed",
        f"--report={file}",
        f"--target={scratch / 'none'}",
    ]
    _run_pip([*line, *target.pip_options(), *words], target, scratch)
    found: list[dict[str, Any]] = json.loads(file.read_text())["install"]
    return found


def find_pinned(left_out: Mapping[str, str], target: Target, scratch: Path) -> dict[str, str]:
    """Return the versions that these packages require exactly, such as torch its triton.

    A machine that has these packages has their pinned requirements too, and another version must
    not shadow them. Raises `PackError` if no index has them all.
    """
    out: dict[str, str] = {}
    words = [f"{name}==={version}" for name, version in left_out.items()]
    for package in _resolve_once(["--no-deps", *words], target, scratch) if words else ():
        for need in map(Requirement, package["metadata"].get("requires_dist", ())):
            exact = [
                one.version
                for one in need.specifier
                if one.operator == "==" and "*" not in one.version
            ]
            if exact and (
                need.marker is None
                or need.marker.evaluate({**target.marker_environment(), "extra": ""})
            ):
                out[canonicalize_name(need.name)] = exact[0]
    return {name: version for name, version in out.items() if name not in left_out}


def find_lacking(
    found: Sequence[Mapping[str, Any]], requirements: Sequence[str], environment: dict[str, str]
) -> set[str]:
    """Return the requirements of the packages `found` that apply in that environment but that no
    package satisfies."""
    asked: dict[str, set[str]] = {}  # name: extras
    open_: set[str] = set()
    for line in requirements:
        parsed = Requirement(line)
        asked.setdefault(canonicalize_name(parsed.name), {""}).update(parsed.extras)
    packages = {
        canonicalize_name(p["name"]): [Requirement(r) for r in p.get("requires_dist", ())]
        for p in found
    }
    while True:
        before = sum(map(len, asked.values()))
        for name, needs in packages.items():
            extras = asked.setdefault(name, {""})
            for need in needs:
                if need.marker and not any(
                    need.marker.evaluate({**environment, "extra": e}) for e in sorted(extras)
                ):
                    continue
                asked.setdefault(canonicalize_name(need.name), {""}).update(need.extras)
                if canonicalize_name(need.name) not in packages:
                    need.marker = None
                    open_.add(str(need))
        if sum(map(len, asked.values())) == before:
            return open_


def download_wheels(
    found: Sequence[Mapping[str, Any]], target: Target, scratch: Path
) -> list[Path]:
    """Download the wheels of a report."""
    into = scratch / "wheels"
    into.mkdir()
    words = ["download", "--no-deps", f"--dest={into}", *target.pip_options()]
    for package in found:
        info = package["download_info"]
        sha = info.get("archive_info", {}).get("hash", "").replace("sha256=", "")
        words.append(
            f"{package['metadata']['name']} @ {info['url']}" + (f"#sha256={sha}" if sha else "")
        )
    if found:
        _run_pip(words, target, scratch)
    return sorted(into.glob("*.whl"))


def _run_pip(words: Sequence[str], target: Target, scratch: Path) -> None:
    line = [
        sys.executable,
        "-m",
        "pip",
        "--disable-pip-version-check",
        "--no-input",
        "--retries=2",
        *words,
    ]
    environment = {**os.environ, "TMPDIR": str(scratch), "PIP_NO_WARN_CONFLICTS": "1"}
    done = subprocess.run(
        line, capture_output=True, text=True, env=environment, timeout=PIP_SECONDS
    )
    if done.returncode:
        raise PackError(explain_pip_error(done.stdout + done.stderr, target))


def explain_pip_error(output: str, target: Target) -> str:
    """Summarise pip's output in one line."""
    if re.search(
        r"NewConnectionError|NameResolutionError|Connection refused|timed out|ProxyError", output
    ):
        return "no package index answers pip: PIP_INDEX_URL names another"
    missing = re.findall(r"No matching distribution found for ([^\s;]+)", output)
    if missing:
        name = re.split("[=<>!~]", missing[0])[0]
        return (
            f"no wheel of {missing[0]} for Python {target.python} on {target.platform}. "
            f"A machine that has the package needs none: --has {name}==VERSION"
        )
    conflict = re.search(r"The conflict is caused by:\n((?: +.+\n)+)", output)
    if conflict:
        return (
            "versions that exclude each other: "
            f"{'; '.join(map(str.strip, conflict[1].splitlines()))}"
        )
    errors = (
        [line for line in output.splitlines() if "ERROR" in line]
        or output.splitlines()
        or ["pip failed"]
    )
    return f"pip: {errors[-1].removeprefix('ERROR: ')}"


# --- the bundle -----------------------------------------------------------------------------------


def write_pieces(
    wheels: Sequence[Path],
    directory: Path,
    *,
    target: Target,
    left_out: Mapping[str, str],
    piece: int,
) -> dict[str, Any]:
    """Write the wheels one after the other in pieces of at most `piece` bytes, with
    `bundle.json` and `run.py`.

    Each wheel is removed once it is written. Returns the contents of `bundle.json`.
    """
    contents: dict[str, Any] = {
        "python": target.python,
        "platform": target.platform,
        "left_out": dict(left_out),
    }
    contents |= {"wheels": [], "unpacked": 0, "pieces": []}
    free = piece
    digest = hashlib.sha256()
    file = None

    def close() -> None:
        if file is not None:
            file.close()
            contents["pieces"].append([Path(file.name).name, piece - free, digest.hexdigest()])

    try:
        for wheel in wheels:
            contents["wheels"].append([wheel.name, wheel.stat().st_size])
            with zipfile.ZipFile(wheel) as opened:
                contents["unpacked"] += sum(i.file_size for i in opened.infolist())
            for block in _blocks(wheel):
                while block:
                    if file is None or not free:
                        close()
                        file, digest, free = (
                            (directory / f"{PIECE}{len(contents['pieces']):03d}").open("wb"),
                            hashlib.sha256(),
                            piece,
                        )
                    now = block[:free]
                    block = block[free:]
                    file.write(now)
                    digest.update(now)
                    free -= len(now)
            wheel.unlink()
    finally:
        close()
    shutil.copyfile(UNPACK, directory / RUN)
    (directory / CONTENTS).write_text(json.dumps(contents, indent=1) + "\n")
    return contents


def _blocks(path: Path) -> Iterator[bytes]:
    with path.open("rb") as file:
        while block := file.read(1 << 22):
            yield block


def parse_left_out(words: Sequence[str]) -> dict[str, str]:
    """Parse the words of `--has` into versions by name. Raises `PackError`.

    A word is NAME==VERSION, NAME (the version installed here), or a file of NAME==VERSION lines,
    such as `pip freeze` writes there; other lines are skipped.
    """
    pairs = []
    for word in words:
        if Path(word).is_file():
            pairs += [line for line in Path(word).read_text().split() if "==" in line]
        else:
            pairs.append(word)
    versions: dict[str, str] = {}
    for pair in pairs:
        name, _, version = pair.partition("==")
        try:
            version = version or Version(importlib.metadata.version(name)).public
            Requirement(f"{name}=={Version(version)}")
        except importlib.metadata.PackageNotFoundError:
            raise PackError(
                f"--has {name}: not installed here, so say which version: --has {name}==VERSION"
            ) from None
        except (InvalidVersion, InvalidRequirement):
            raise PackError(f"--has {pair}: not NAME==VERSION") from None
        versions[canonicalize_name(name)] = version
    versions.pop(DIST, None)
    return versions


def pack_bundle(
    directory: Path,
    target: Target,
    *,
    extra: str,
    has: Sequence[str],
    piece: int,
    say: Callable[[str], object],
) -> dict[str, Any]:
    """Write a bundle into `directory`, which must be empty or new. Returns the contents of
    its `bundle.json`.

    Args:
        extra: The extra of r3async, "gpu" or "cpu".
        piece: Maximum bytes of a piece.

    Raises:
        PackError: The bundle cannot be made.
    """
    left_out = parse_left_out(has)
    if directory.exists() and any(directory.iterdir()):
        raise PackError(f"{directory} has files already: name a new directory")
    directory.mkdir(parents=True, exist_ok=True)
    scratch = (directory / ".packing").absolute()
    scratch.mkdir()
    try:
        own = build_own_wheel(scratch)
        wanted = [f"{DIST}[{extra}] @ {own.as_uri()}"]
        theirs = dict(left_out)
        try:
            theirs |= find_pinned(
                parse_left_out([word for word in has if not Path(word).is_file()]), target, scratch
            )
        except PackError as error:
            say(
                f"what comes with {', '.join(left_out)} is not known, so name that with "
                f"--has too ({error})"
            )
        wanted += [f"{n} @ {build_stand_in(scratch, n, v).as_uri()}" for n, v in theirs.items()]
        skipped = {DIST, *theirs, *(UNWANTED_PACKAGES if extra == "cpu" else ())}
        say(f"resolving r3async[{extra}] for Python {target.python} on {target.platform}")
        found = _others(resolve_packages(wanted, target, scratch), skipped)
        torch = next(
            (p["metadata"]["version"] for p in found if p["metadata"]["name"] == "torch"), ""
        )
        # A configured index has it, and pip takes it for newer.
        if extra == "gpu" and "+cpu" in torch:
            wanted.append(f"torch==={torch.partition('+')[0]}")
            found = _others(resolve_packages(wanted, target, scratch), skipped)
        say(f"downloading {len(found)} wheels")
        wheels = [own, *download_wheels(found, target, scratch)]
        return write_pieces(wheels, directory, target=target, left_out=left_out, piece=piece)
    except OSError as error:
        raise PackError(f"{directory}: {error.strerror or error}") from error
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _others(found: Sequence[dict[str, Any]], skipped: set[str]) -> list[dict[str, Any]]:
    return [p for p in found if canonicalize_name(p["metadata"]["name"]) not in skipped]
