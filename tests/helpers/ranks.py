"""Real process groups on gloo, with workers that stay alive, so that each test pays only for its own learner."""

import os
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.multiprocessing as mp

START_TIMEOUT, CALL_TIMEOUT = 120.0, 90.0
IMPORTED = ["r3async.learner.megatron.backend", "r3async.learner.torch.backend"]
"""Modules that all ranks need, which take five seconds: imported once, by the process from which they are forked."""


def _serve(rank: int, world: int, store: str, requests: Any, answers: Any) -> None:
    os.environ["OMP_NUM_THREADS"] = "1"
    import datetime

    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    timeout = datetime.timedelta(seconds=60)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world, timeout=timeout)
    answers.put((True, None))
    while (request := requests.get()) is not None:
        call, args = request
        try:
            answers.put((True, call(*args)))
        except BaseException as error:
            answers.put((False, f"{error!r}\n{traceback.format_exc()}"))
    dist.destroy_process_group()


class RankError(AssertionError):
    """The failure of a call on a rank; the message has its traceback."""


class Ranks:
    """A gloo process group of `world` processes. `call` runs a module-level function on all of them at once."""

    def __init__(self, world: int, directory: Path):
        context = mp.get_context("forkserver")
        context.set_forkserver_preload(IMPORTED)
        store = str(directory / f"store{world}")
        self._requests = [context.SimpleQueue() for _ in range(world)]
        self._answers = [context.Queue() for _ in range(world)]
        self._processes = [
            context.Process(target=_serve, args=(rank, world, store, *queues), daemon=True)
            for rank, queues in enumerate(zip(self._requests, self._answers, strict=True))
        ]
        for process in self._processes:
            process.start()
        self._collect(START_TIMEOUT)

    def call(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        """Return what each rank returns, in order of ranks. Raises `RankError` if one raised."""
        for requests in self._requests:
            requests.put((function, args))
        return self._collect(CALL_TIMEOUT)

    def _collect(self, timeout: float) -> list[Any]:
        results = [answers.get(timeout=timeout) for answers in self._answers]
        for rank, (good, value) in enumerate(results):
            if not good:
                raise RankError(f"rank {rank}: {value}")
        return [value for _, value in results]

    def close(self) -> None:
        """End the processes."""
        for requests in self._requests:
            requests.put(None)
        for process in self._processes:
            process.join(timeout=10)
            if process.is_alive():
                process.kill()
