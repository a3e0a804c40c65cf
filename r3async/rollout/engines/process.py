"""Child processes of an engine: what they inherit, and which they are."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

import psutil


def lineage(pid: int) -> Iterator[psutil.Process]:
    """Process `pid` and its ancestors below this process."""
    process = psutil.Process(pid)
    while process is not None and process.pid != os.getpid():
        yield process
        process = process.parent()


@contextlib.contextmanager
def inherited_environment() -> Iterator[os._Environ[str]]:
    """Environment variables set inside are inherited by processes started inside, and taken back at the end."""
    before = dict(os.environ)
    try:
        yield os.environ
    finally:
        for name in set(os.environ) | set(before):
            if name not in before:
                os.environ.pop(name, None)
            elif os.environ.get(name) != before[name]:
                os.environ[name] = before[name]
