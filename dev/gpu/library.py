"""Compiles and loads `device.cpp`, without which torch's CPU build refuses tensors of a device
`cuda`. Does not import torch."""

from __future__ import annotations

import ctypes
import hashlib
import importlib.metadata
import importlib.util
import shutil
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path

from r3async.tools.local_cache import find_cache_directory

SOURCE = Path(__file__).with_name("device.cpp")
COMPILERS = ("g++", "clang++")


class NoCompilerError(RuntimeError):
    """There is no C++ compiler on this machine."""


def find_compiler() -> str:
    """Return the path of a C++ compiler. Raises `NoCompilerError`."""
    for name in COMPILERS:
        path = shutil.which(name)
        if path:
            return path
    raise NoCompilerError(
        f"the emulated device needs a C++ compiler, and there is none of {', '.join(COMPILERS)}"
    )


def compile_library() -> Path:
    """Return the shared library for this torch, compiled if the user's cache does not have it yet
    (half a minute).

    Raises `NoCompilerError`.
    """
    torch = _find_torch()
    key = hashlib.sha256(SOURCE.read_bytes())
    key.update(f"{importlib.metadata.version('torch')} {torch} {sys.version_info[:2]}".encode())
    library = find_cache_directory() / f"emulated-cuda-{key.hexdigest()[:16]}.so"
    if library.exists():
        return library
    compiler = find_compiler()
    library.parent.mkdir(parents=True, exist_ok=True)
    # Several processes may compile at once: each renames a complete file.
    with tempfile.TemporaryDirectory(dir=library.parent) as directory:
        made = Path(directory) / library.name
        include = [f"-isystem{torch / 'include' / part}" for part in ("", "torch/csrc/api/include")]
        options = ["-O0", "-std=c++20", "-fPIC", "-shared", *include, str(SOURCE), "-o", str(made)]
        linked = [f"-L{torch / 'lib'}", "-lc10", "-ltorch_cpu", f"-Wl,-rpath,{torch / 'lib'}"]
        done = subprocess.run([compiler, *options, *linked], capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(f"{SOURCE} does not compile:\n{done.stderr[-4000:]}")
        made.replace(library)
    return library


@cache
def load_library() -> None:
    """Load the library into this process, in which torch must not have been imported: it asks for
    its devices once."""
    if "torch" in sys.modules:
        raise RuntimeError("the emulated device has to be loaded before torch is imported")
    ctypes.CDLL(str(compile_library()), mode=ctypes.RTLD_GLOBAL)


def _find_torch() -> Path:
    found = importlib.util.find_spec("torch")
    return Path(str(found and found.origin)).parent
