"""Who writes the routes down: a proxy before a generator's engine, and the record of the learner's steps."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import msgspec
import numpy as np

from r3async.config import Config
from r3async.data.records import Sample
from r3async.data.routes import RoutingError, route_dtype
from r3async.data.versions import expand
from r3async.record.routes import EngineCall, RouteFile, TracePlan, TrainedRoutes, merge_traces, parse_id
from r3async.rollout.engines.base import Engine, Generation, GenerationRequest
from r3async.world import World
from r3async.world.appending import AppendFile
from r3async.world.real import REAL

if TYPE_CHECKING:
    from r3async.learner.base import MinibatchResult

LOAD_EVERY = 10
"""Steps from one record of the load per expert to the next."""


def recording(engine: Engine, run_dir: Path, generator_id: str, config: Config, *, world: World = REAL) -> Engine:
    """`engine`, writing down what it returns for the trajectories that `routing.trace` asks for; or `engine` itself."""
    if engine.routing is None or config.routing.trace == "off":
        return engine
    file = RouteFile(run_dir / "routes", f"engine-{generator_id}", world=world)
    return cast(Engine, _RecordingEngine(engine, file, TracePlan(config), world))


class _RecordingEngine:
    """Everything but `generate` is the engine's own."""

    def __init__(self, engine: Engine, file: RouteFile, plan: TracePlan, world: World):
        self._engine, self._file, self._plan, self._world = engine, file, plan, world

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    async def generate(self, request: GenerationRequest) -> Generation:
        """The engine's answer, recorded before anyone else has seen it: nothing of ours can have touched the rows. An aborted
        one is nobody's, and is not kept."""
        generation = await self._engine.generate(request)
        which = parse_id(request.request_id)
        if which is not None and generation.stop_reason != "abort" and self._plan.wants(request.request_id):
            rows = generation.routed_experts
            call = EngineCall(
                trajectory_id=which.trajectory_id,
                turn=which.number,
                time=self._world.clock.time(),
                routes_from=generation.routes_from,
                prompt_ids=request.prompt_ids,
                token_ids=generation.token_ids,
                logprobs=generation.logprobs,
                rows=np.zeros((0, 0, 0), np.uint8) if rows is None else rows,
                policy_version=expand(generation.version_spans, len(generation.token_ids)),
            )
            await self._world.threads.run(self._file.append, call)
        return generation


class StepTracer:
    """What the learner's routers did, step by step.

    `run_dir/routing.jsonl` gets an object a step, `{"step", "agreement": [L]}`, every `LOAD_EVERY`-th step also `"load":
    [[experts] * L]`, tokens of that step: 30 kB for 48 layers of 128 experts, where the agreement is 0.4 kB. Routes of the
    trajectories that `routing.trace` asks for go to `run_dir/routes`. Traces that contradict each other are reported to
    `report(event, **fields)`: they are no reason to end a run.
    """

    def __init__(self, run_dir: Path, config: Config, report: Callable[..., object], *, world: World = REAL):
        self._plan = TracePlan(config)
        self._lines = AppendFile(run_dir / "routing.jsonl", world=world)
        self._file = RouteFile(run_dir / "routes", "learner", world=world)
        self._report = report

    def wants(self, samples: Iterable[Sample]) -> bool:
        """Whether the step that trains these has to be traced."""
        return any(self._plan.wants(sample.sample_id) for sample in samples)

    def write(self, step: int, samples: Sequence[Sample], result: MinibatchResult) -> None:
        """Step `step`, from 1, trained `samples`. Blocks for as long as the disk does."""
        if not len(result.layer_agreement):
            return
        try:
            self._write_line(step, result)
            if result.traces:
                self._write_routes(step, samples, result)
        except RoutingError as error:
            self._report("routes_not_written", step=step, error=str(error))

    def _write_line(self, step: int, result: MinibatchResult) -> None:
        line: dict[str, Any] = {"step": step, "agreement": [round(float(share), 5) for share in result.layer_agreement]}
        if (step - 1) % LOAD_EVERY == 0:
            line["load"] = result.expert_load.tolist()
        self._lines.append(msgspec.json.encode(line))

    def _write_routes(self, step: int, samples: Sequence[Sample], result: MinibatchResult) -> None:
        layers, experts = result.expert_load.shape
        dtype = route_dtype(experts)
        tables = {sample.sample_id: sample.table for sample in samples}
        for trace in merge_traces(result.traces, layers):
            for index, sample_id in enumerate(trace.sample_ids):
                which = parse_id(sample_id)
                if which is None or not self._plan.wants(sample_id):
                    continue
                table, rows = tables[sample_id], slice(trace.cu_seqlens[index], trace.cu_seqlens[index + 1])
                columns = ("token_ids", "loss_mask", "rollout_logprobs", "policy_version", "turn", "rewards")
                self._file.append(
                    TrainedRoutes(
                        step,
                        sample_id,
                        which.trajectory_id,
                        **{name: table[name] for name in columns},
                        own=trace.own[rows].astype(dtype),
                        used=trace.used[rows].astype(dtype),
                        learner_logprobs=None if trace.logprobs is None else trace.logprobs[rows],
                    )
                )
