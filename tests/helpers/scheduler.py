"""The engine's scheduler, which also records what it feeds, and preempts on request; imported in the engine's
process."""

import re
import time

import msgspec
from vllm.v1.core.sched.interface import PauseState

from r3async.rollout.vllm.core import BufferingScheduler
from r3async.weights.manifest import WeightManifest
from tests.helpers.worker_extensions import ComparedExtension

FEEDS: dict[str, list[tuple[int, int, int]]] = {}
"""Feeds of each request, in order: version of the loaded weights, first position and the one after the last."""
SAMPLED: dict[str, int] = {}
"""Number of sampled tokens of each request so far; an ended request keeps its last number."""
PREEMPTED: list[tuple[str, int, int]] = []
"""Preemptions: the request, and the numbers of positions fed and tokens sampled at that time."""
_loaded = -1


class ObservedScheduler(BufferingScheduler):
    """A scheduler that acts on commands in request ids, once each, so that a test hits a moment however busy the
    machine is.

    `preempt@N` preempts the request, and `hold@N` pauses the engine (until an installation, or a test, resumes it), as
    soon as N of its positions have been fed; `hold@preemption` pauses the engine when the request is preempted.
    """

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self._done: set[tuple[str, str]] = set()

    def schedule(self, *args, **kwargs):
        for request in list(self.running):
            if self._now(request, "preempt"):
                self.running.remove(request)
                self._preempt_request(request, time.monotonic())
                # vLLM does the same when it preempts and resumes in one step.
                self.prev_step_scheduled_req_ids.discard(request.request_id)
            if self._now(request, "hold"):
                self.set_pause_state(PauseState.PAUSED_ALL)
        output = super().schedule(*args, **kwargs)
        for name, count in output.num_scheduled_tokens.items():
            stop = self.requests[name].num_computed_tokens
            FEEDS.setdefault(name, []).append((_loaded, stop - count, stop))
        return output

    def update_from_output(self, output, *args, **kwargs):
        requests = [self.requests[name] for name in output.num_scheduled_tokens if name in self.requests]
        outputs = super().update_from_output(output, *args, **kwargs)
        SAMPLED.update({request.request_id: request.num_output_tokens for request in requests})
        return outputs

    def _preempt_request(self, request, *args, **kwargs):
        PREEMPTED.append((request.request_id, request.num_computed_tokens, request.num_output_tokens))
        if "hold@preemption" in request.request_id and self._once(request, "preemption"):
            self.set_pause_state(PauseState.PAUSED_ALL)
        super()._preempt_request(request, *args, **kwargs)

    def _now(self, request, what: str) -> bool:
        at = re.search(rf"{what}@(\d+)", request.request_id)
        return bool(at) and request.num_computed_tokens >= int(at[1]) and self._once(request, what)

    def _once(self, request, what: str) -> bool:
        """Return True the first time, for the caller's request: one that starts afresh is another one to the
        scheduler."""
        key = request.request_id.partition("#")[0], what
        if key in self._done:
            return False
        self._done.add(key)
        return True


class ObservingExtension(ComparedExtension):
    """A worker in the scheduler's process: it knows the weights, and returns the records."""

    def r3_install_version(self, manifest: bytes) -> tuple[int, int]:
        global _loaded
        holds = super().r3_install_version(manifest)
        _loaded = msgspec.msgpack.decode(manifest, type=WeightManifest).version
        return holds

    def r3_sampled(self, name: str) -> int:
        """Return the number of tokens sampled by the newest request that has `name` in its id."""
        return next((count for key, count in reversed(SAMPLED.items()) if name in key), 0)

    def r3_feeds(self) -> bytes:
        return msgspec.msgpack.encode((FEEDS, PREEMPTED))


class PlantingExtension(ObservingExtension):
    """A worker in which a test changes what it holds."""

    def r3_plant_in_adapter(self, module: str, slot: int) -> None:
        manager = self.model_runner.lora_manager._adapter_manager
        manager.modules[module].lora_b_stacked[0][slot, 0, 1, 2] += 0.5

    def r3_plant_in_weights(self, parameter: str) -> None:
        dict(self.model_runner.get_model().named_parameters())[parameter].data.view(-1)[7] += 0.5

    def r3_adapters(self) -> list[int]:
        return sorted(self.list_loras())
