"""Asks tasks of reasoning-gym in a process of the pool, from a process of its own: `python -m … NAME …`."""

import asyncio
import json
import os
import sys
from typing import Any

from r3async.config import EnvConfig
from r3async.envs.pool import EnvironmentWorker
from r3async.envs.pool_worker import WorkerCall

PATH = "r3async.envs.adapters.reasoning_gym_tasks:ReasoningGymEnvironment"
SETTINGS: dict[str, dict[str, Any]] = {"composite": {"datasets": [{"name": "ransom_note"}, {"name": "ab"}]}}


async def ask_tasks(names: list[str]) -> dict[str, list[str]]:
    """Return what each task asks, and the package's own answer."""
    asked = {}
    worker = EnvironmentWorker(PATH, {"task": names[0]}, EnvConfig(name="reasoning-gym", start_timeout=120.0))
    for name in names:
        arguments = {"task": name, **SETTINGS.get(name, {})}
        await worker.submit_call(WorkerCall("load", path=PATH, arguments=arguments))
        reply = await worker.submit_call(WorkerCall("reset", worker.register_instance(), seed=2**40 + 5))
        asked[name] = [reply.messages[0].content, reply.oracle]
    worker.stop()
    return asked


if __name__ == "__main__":
    # This process has a hash seed, but not as its user's choice, which would be that of the pool's processes too.
    del os.environ["PYTHONHASHSEED"]
    print(json.dumps(asyncio.run(ask_tasks(sys.argv[1:]))))
