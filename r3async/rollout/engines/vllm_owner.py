"""No process of an engine outlives the engine's owner: not the engine core, and not what it starts.

Imports nothing that takes time: the watch begins before the process does anything else.
"""

from __future__ import annotations

import os
import select
import threading
import time
from collections.abc import Mapping
from typing import Any


class OwnerBoundConfig(dict[str, Any]):
    """vLLM's `additional_config`; every process that it is unpickled in ends with process `owner_pid`.

    vLLM hands its whole configuration to each process it spawns, before that process does anything else. A hook in
    the worker would come too late: an owner that is killed during the start would leave its engine waiting.
    """

    def __init__(self, owner_pid: int, values: Mapping[str, Any]):
        super().__init__(values)
        self.owner_pid = owner_pid

    def __reduce__(self) -> tuple[Any, ...]:
        return _restore_owner_bound, (self.owner_pid, dict(self))


def _restore_owner_bound(owner_pid: int, values: dict[str, Any]) -> OwnerBoundConfig:
    if owner_pid != os.getpid():
        exit_with_owner(owner_pid)
        from r3async.rollout.engines.vllm_cpu import patch_vllm_for_cpu

        patch_vllm_for_cpu()
    return OwnerBoundConfig(owner_pid, values)


def exit_with_owner(owner_pid: int) -> None:
    """Start a daemon thread that ends this process as soon as process `owner_pid` has ended, however that happened.

    A worker sits in a subprocess of its own; if its owner is killed before it can clean up, nobody else would
    ever end the worker.
    """

    def watch_owner() -> None:
        _wait_for_exit(owner_pid)
        os._exit(1)

    threading.Thread(target=watch_owner, name="r3async-owner-watch", daemon=True).start()


def _wait_for_exit(pid: int) -> None:
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    except (AttributeError, OSError):  # not Linux, or an old kernel or sandbox
        while _process_exists(pid):
            time.sleep(1.0)
        return
    poller = select.poll()
    poller.register(descriptor, select.POLLIN)
    while not poller.poll(60_000):
        pass


def _process_exists(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True
