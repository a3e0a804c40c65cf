"""Create or repair `.venv` and install the project into it. Run by the Makefile as
`python3 -m tools.install`; needs only a bare Python.

An installation is a promise in two files inside `.venv`: `r3async-installed.json` says what was finished,
`r3async-installing.json` that something was begun. From the two and the list of packages every earlier end (finished,
failed, killed) is told apart, so the next call does as little as is safe: nothing, pip in place, or all anew.

The syntax stays that of old Pythons: the message for a too old one has to be printed by it.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from tools.install_run import HEARTBEAT, PipWatcher, Progress, stream
from tools.install_state import BEGUN, FINISHED, decide, inspect_venv, unwanted_in, wanted_for, write_json

if TYPE_CHECKING:
    Runner = Callable[[list[str]], tuple[int, list[str]]]
    """Runs pip with these arguments; returns its exit code and its output lines."""

ROOT = Path(__file__).resolve().parent.parent
OLDEST, NEWEST = (3, 11), (3, 12)
NEEDED_BYTES = 5 * 10**9
TORCH_INDEX = "https://download.pytorch.org/whl/cpu"
TORCH_INDEX_VARIABLE = "R3ASYNC_TORCH_INDEX"
VERIFY = "import vllm, megatron.core, ray, zmq, msgspec, structlog, typer, torch; import r3async, actors, tools"
LOCK, LOG = "r3async-install.lock", "r3async-install.log"
LOCK_TIMEOUT = 1800.0


class InstallError(Exception):
    """Something a person has to put right; the message says how."""


def lacks_torch(lines: list[str]) -> bool:
    """Whether pip failed because the CPU build of torch is not on the indexes it knows."""
    text = "\n".join(line for line in lines[-60:] if "torch" in line)
    return bool(re.search(r"(No matching distribution found for|satisfies the requirement|depends on) torch\b", text))


def remedy_for(lines: list[str]) -> str:
    text = "\n".join(lines[-80:])
    if "No space left" in text:
        return "Free some disk space, or set TMPDIR to a folder on a larger disk, and run it again."
    if lacks_torch(lines):
        return f"No index offers the CPU build of torch. Set {TORCH_INDEX_VARIABLE} to one that does (default: {TORCH_INDEX})."
    if re.search(r"name resolution|NewConnection|ProxyError|timed out|Connection|unreachable|SSLError", text):
        return (
            "The package index can not be reached. Check the network; behind a mirror, set PIP_INDEX_URL and PIP_CERT."
        )
    if "No matching distribution" in text or "ResolutionImpossible" in text:
        return "The package index lacks something that pyproject.toml asks for. Behind a mirror, check PIP_INDEX_URL."
    return "Run it again; if it fails the same way, `rm -rf .venv` and read the log."


def answers(url: str) -> bool:
    """Whether a server answers there, with whatever. Asked before pip is, which would wait long for every package."""
    import http.client
    import ssl
    import urllib.error
    import urllib.request

    try:
        urllib.request.urlopen(urllib.request.Request(url + "/torch/", method="HEAD"), timeout=20).close()
    except urllib.error.HTTPError as error:
        return error.code < 500
    except urllib.error.URLError as error:
        return isinstance(error.reason, ssl.SSLError)  # pip may be set up with certificates that we do not know
    except (OSError, http.client.HTTPException):
        return False
    return True


def pip_install(
    run: Runner,
    requirement: str,
    extra: str,
    say: Callable[[str], None],
    index: str | None = None,
    reachable: Callable[[str], bool] = answers,
) -> None:
    """Install `requirement` editable. On CPU, torch may need PyTorch's own index: named only when plain pip lacks it.

    `index` (the environment variable's value) is used from the first try; "none" forbids any. Raises `InstallError`.
    """
    arguments = ["install", "--progress-bar", "off", "-e", requirement]
    named = index if index not in (None, "", "none") else None
    code, lines = run([*arguments, "--extra-index-url", named] if named else arguments)
    if code and extra == "cpu" and index in (None, "") and lacks_torch(lines):
        say(f"the CPU build of torch is not on the package index; trying again with {TORCH_INDEX}")
        if not reachable(TORCH_INDEX):
            raise InstallError(
                f"{TORCH_INDEX} can not be reached either.\n"
                f"  Check the network, or set {TORCH_INDEX_VARIABLE} to an index that has the CPU build of torch."
            )
        code, lines = run([*arguments, "--extra-index-url", TORCH_INDEX])
    if code:
        tail = "\n".join(f"    {line}" for line in lines[-12:] if line.strip())
        raise InstallError(f"pip failed (exit code {code}). Its last lines:\n{tail}\n  {remedy_for(lines)}")


def empty_venv(venv: Path) -> None:
    """Everything but our lock, which this process holds, and the note that something was begun."""
    for entry in venv.iterdir():
        if entry.name in (LOCK, BEGUN):
            continue
        if entry.is_dir() and not entry.is_symlink():
            shutil.rmtree(entry)
        else:
            entry.unlink()


def create_venv(venv: Path) -> None:
    try:
        import ensurepip  # noqa: F401
        import venv as builder
    except ImportError as error:
        version = "{}.{}".format(*sys.version_info[:2])
        raise InstallError(
            f"{sys.executable} has no `{error.name}` module. On Debian or Ubuntu: sudo apt-get install python{version}-venv; "
            "or name another Python: make install PYTHON=/path/to/python3"
        ) from error
    # Not `clear=True`, which would also remove the lock.
    builder.EnvBuilder(with_pip=True, symlinks=True).create(venv)


@contextlib.contextmanager
def locked(path: Path, say: Callable[[str], None], timeout: float = LOCK_TIMEOUT) -> Iterator[int]:
    """Hold the file's lock; yields its descriptor. The system releases it when the last holder dies, so none is stale."""
    with path.open("a+") as file:
        started, told = time.monotonic(), -HEARTBEAT
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                waited = time.monotonic() - started
                if waited > timeout:
                    raise InstallError(f"another installation has held {path} for {timeout:.0f} s: stop it") from None
                if waited - told >= HEARTBEAT:
                    file.seek(0)
                    say(f"waiting for another installation (process {file.read().strip() or '?'}), {waited:.0f} s")
                    told = waited
                time.sleep(0.2)
        file.truncate(0)
        file.write(str(os.getpid()))
        file.flush()
        yield file.fileno()


def check_space(venv: Path, fresh: bool) -> str:
    for place in (venv, Path(tempfile.gettempdir())) if fresh else ():
        free = shutil.disk_usage(place).free
        # pip unpacks below .venv; the temporary folder holds the downloads only.
        needed = NEEDED_BYTES if place == venv else NEEDED_BYTES // 2
        if free < needed:
            hint = "free some" if place == venv else "free some, or set TMPDIR to a folder on a larger disk"
            raise InstallError(f"{place} has {free / 1e9:.1f} GB free, but {needed / 1e9:.1f} GB are needed: {hint}")
    return f"{shutil.disk_usage(venv).free / 1e9:.0f} GB free"


def verify(venv: Path, progress: Progress) -> None:
    lines: list[str] = []
    command = [str(venv / "bin/python"), "-W", "ignore", "-c", VERIFY]
    code = stream(command, venv.parent, lines.append, lambda: progress.status("importing vLLM, Ray, Megatron"))
    if code == 0 and not (venv / "bin/r3async").exists():
        code, lines = 1, ["the command r3async was not installed"]
    if code:
        tail = "\n".join(f"    {line}" for line in lines[-12:] if line.strip())
        raise InstallError(
            f"what was installed does not import (exit code {code}):\n{tail}\n  The next call starts anew."
        )


def install(root: Path, extra: str | None, force: bool = False) -> None:
    """Bring `.venv` to what pyproject.toml asks for. Does nothing, in a tenth of a second, where that is so already."""
    venv = root / ".venv"
    found = inspect_venv(venv)
    extra = extra or (found.finished or {}).get("extra") or "cpu"
    wanted = wanted_for(root, extra)
    if not force and decide(found, wanted)[0] == "ready":
        return
    venv.mkdir(exist_ok=True)
    progress = Progress(5)
    with locked(venv / LOCK, progress.say) as lock:
        found = inspect_venv(venv)  # whoever held the lock may have done it all
        action, why = ("rebuild", "asked for") if force else decide(found, wanted)
        if action == "ready":
            return
        fresh = action == "rebuild"
        space = check_space(venv, fresh)
        verb = "installing" if fresh else "updating"
        progress.next(f"Python {sys.version.split()[0]}, {space}; {verb} .venv for {extra}: {why}")
        write_json(venv / BEGUN, {"packages": None if fresh else sorted(found.packages)})
        progress.next("creating the virtual environment" if fresh else "keeping the virtual environment")
        if fresh:
            empty_venv(venv)
            create_venv(venv)
            # pip resolves for a while before it touches anything; interrupted until then, nothing has to be redone.
            write_json(venv / BEGUN, {"packages": sorted(inspect_venv(venv).packages)})
        run = PipWatcher(venv, progress, venv / LOG, lock)
        if not any(name.startswith("pip-") for name in inspect_venv(venv).distributions):
            stream([str(venv / "bin/python"), "-m", "ensurepip"], root, run.on_line, run.on_silence, lock)
        size = "about 4 GB; " if fresh else ""
        progress.next(f"installing packages ({size}the whole of pip's output: {(venv / LOG).relative_to(root)})")
        pip_install(run, f"{root}[{extra},dev]", extra, progress.say, os.environ.get(TORCH_INDEX_VARIABLE))
        unwanted = unwanted_in(inspect_venv(venv), extra)
        names = ", ".join(unwanted)
        progress.next(f"removing {names}: they do not match the CPU torch" if unwanted else "nothing to remove")
        if unwanted and run(["uninstall", "-y", *unwanted])[0]:
            raise InstallError(f"pip could not remove {names}; see {venv / LOG}")
        progress.next("checking that everything imports")
        write_json(venv / BEGUN, {"packages": None})
        verify(venv, progress)
        distributions = sorted(inspect_venv(venv).distributions)
        record = {"root": str(root), "extra": extra, "digest": wanted.digest, "distributions": distributions}
        write_json(venv / FINISHED, record)
        (venv / BEGUN).unlink()
        progress.say(f"ready: {len(distributions)} packages in .venv")


def other_python() -> str | None:
    """A Python in our range elsewhere on the path. It is run to be sure: a version manager's shim may lead nowhere."""
    code = "import sys, ensurepip; print(sys.executable) if sys.version_info[:2] in ((3, 11), (3, 12)) else sys.exit(1)"
    for name in ("python3.12", "python3.11"):
        for folder in os.environ.get("PATH", "").split(os.pathsep):
            path = shutil.which(name, path=folder)
            if path is None:
                continue
            with contextlib.suppress(OSError, subprocess.SubprocessError):
                result = subprocess.run([path, "-c", code], capture_output=True, timeout=30)
                if result.returncode == 0:
                    return result.stdout.decode().strip()
    return None


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--extra", choices=["cpu", "gpu"], help="default: what .venv was installed for, else cpu")
    parser.add_argument("--force", action="store_true", help="start with an empty .venv")
    options = parser.parse_args()
    if not OLDEST <= sys.version_info[:2] <= NEWEST:
        better = other_python()
        if better:
            print(f"{sys.executable} is {sys.version.split()[0]}; using {better}", flush=True)
            os.execv(better, [better, "-m", "tools.install", *sys.argv[1:]])
        sys.stderr.write(
            f"r3async needs Python 3.11 or 3.12; {sys.executable} is {sys.version.split()[0]}, and there is no "
            "other on the path.\nInstall one, and name it: make install PYTHON=/path/to/python3.12\n"
        )
        return 1
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # `kill` ends as cleanly as Ctrl-C
    try:
        install(ROOT, options.extra, options.force)
    except InstallError as error:
        sys.stderr.write(f"\ninstallation failed: {error}\n")
        return 1
    except OSError as error:
        sys.stderr.write(f"\ninstallation failed: {error}\n  Check the rights and the space of {ROOT / '.venv'}.\n")
        return 1
    except KeyboardInterrupt:
        sys.stderr.write("\ninterrupted; run `make install` to go on\n")
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
