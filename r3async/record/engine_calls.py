"""An engine whose calls are spans of the timeline."""

from __future__ import annotations

from typing import Any, cast

from r3async.record.routes import EpisodeId, parse_episode_id
from r3async.record.timeline import Timeline
from r3async.rollout.engine import Engine, Generation, GenerationRequest


def time_engine_calls(engine: Engine, timeline: Timeline) -> Engine:
    """Wrap `engine` to write its calls to the timeline, and when it has requests (`busy`).

    In each group, the calls of one episode are measured. Returns `engine` itself if the
    timeline is not enabled.
    """
    return cast(Engine, _TimedEngine(engine, timeline)) if timeline.is_enabled else engine


class _TimedEngine:
    """An engine whose `generate` writes spans; every other attribute is the wrapped engine's."""

    def __init__(self, engine: Engine, timeline: Timeline):
        self._engine = engine
        self._timeline = timeline
        self._running = 0
        self._busy_from = self._counted_until = timeline.now()
        self._request_seconds = 0.0
        """Integral of the number of running requests over time, in request-seconds, up to
        `_counted_until`."""
        self._last_calls: dict[str, tuple[EpisodeId, float, int]] = {}
        """Last call of each trajectory, the time of its answer, and the tokens that the
        engine had by then."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    async def generate(self, request: GenerationRequest) -> Generation:
        which = parse_episode_id(request.request_id)
        self._change_running(1)
        try:
            if which is None or which.episode_index:
                return await self._engine.generate(request)
            return await self._generate_timed(which, request)
        finally:
            self._change_running(-1)

    def _change_running(self, delta: int) -> float:
        """Add `delta` to the number of running requests, and return the current time."""
        now = self._timeline.now()
        self._request_seconds += self._running * (now - self._counted_until)
        if not self._running:
            self._busy_from = now
        self._running = self._running + delta
        self._counted_until = now
        if not self._running:
            self._timeline.add_span("busy", self._busy_from, now)
        return now

    async def _generate_timed(
        self, episode_id: EpisodeId, request: GenerationRequest
    ) -> Generation:
        began = self._change_running(0)
        fed = 0
        beside = self._request_seconds
        before = self._last_calls.pop(episode_id.trajectory_id, None)
        if before is not None and before[0].sample_or_turn == episode_id.sample_or_turn - 1:
            self._timeline.add_span("environment", before[1], began)
            fed = before[2]
        generation = await self._engine.generate(request)
        ended = self._change_running(0)
        prompt = len(request.prompt_ids)
        tokens = len(generation.token_ids)
        running = (
            (self._request_seconds - beside) / (ended - began) if ended > began else self._running
        )
        self._timeline.add_span(
            "call",
            began,
            ended,
            turn=episode_id.sample_or_turn,
            tokens=tokens,
            prompt=max(0, prompt - fed),
            running=running,
        )
        self._last_calls[episode_id.trajectory_id] = episode_id, ended, prompt + tokens
        while len(self._last_calls) > 1024:  # nothing removes a trajectory after its last call
            del self._last_calls[next(iter(self._last_calls))]
        return generation
