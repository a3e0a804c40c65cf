"""No process of an engine outlives the engine's owner: not the core, nor what the core starts.

This file imports nothing slow, because the watch begins before the process does anything else.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from r3async.rollout.vllm.scratch import name_shared_memory
from r3async.world.kept_programs import exit_with_owner


class OwnerBoundConfig(dict[str, Any]):
    """A value for vLLM's `additional_config` that ends every process in which it is unpickled with
    process `owner_pid`.

    vLLM hands its whole configuration to each process it spawns, before that process does anything
    else. A hook in the worker would come too late: an owner that is killed during the start would
    leave its engine waiting.
    """

    def __init__(self, owner_pid: int, values: Mapping[str, Any] | None = None):
        super().__init__(values or {})
        self.owner_pid = owner_pid

    def __reduce__(self) -> tuple[Any, ...]:
        return _restore_owner_bound, (self.owner_pid, dict(self))


def _restore_owner_bound(owner_pid: int, values: dict[str, Any]) -> OwnerBoundConfig:
    if owner_pid != os.getpid():
        exit_with_owner(owner_pid)
        name_shared_memory()
        from r3async.rollout.vllm.cpu_patches import patch_vllm_for_cpu
        from r3async.rollout.vllm.route_recording import GATES_KEY, record_gates

        patch_vllm_for_cpu()
        if values.get(GATES_KEY):
            record_gates()
    return OwnerBoundConfig(owner_pid, values)
