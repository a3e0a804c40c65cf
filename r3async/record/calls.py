"""How long engine calls and environments take: the spans that a cluster's speed is worked out from (`r3async simulate`)."""

from __future__ import annotations

from typing import cast

from r3async.record.routes import RouteId, parse_id
from r3async.record.timeline import Timeline
from r3async.rollout.engines.base import Engine, Generation, GenerationRequest


def timed(engine: Engine, timeline: Timeline) -> Engine:
    """`engine`, whose calls go to the timeline, and when it has any (`busy`); or `engine` itself, if that is off. Of each group
    the calls of one episode are measured."""
    return cast(Engine, _TimedEngine(engine, timeline)) if timeline.enabled else engine


class _TimedEngine:
    """Everything but `generate` is the engine's own."""

    def __init__(self, engine: Engine, timeline: Timeline):
        self._engine, self._timeline = engine, timeline
        self._running = 0
        self._busy_from = self._since = timeline.now()
        self._beside = 0.0
        """Running requests times seconds, up to `_since`."""
        self._answered: dict[str, tuple[RouteId, float, int]] = {}
        """By trajectory: its last call, when that was answered, and how many tokens the engine had of it then."""

    def __getattr__(self, name: str):
        return getattr(self._engine, name)

    async def generate(self, request: GenerationRequest) -> Generation:
        which = parse_id(request.request_id)
        self._changes(1)
        try:
            if which is None or which.episode_index:
                return await self._engine.generate(request)
            return await self._measured(which, request)
        finally:
            self._changes(-1)

    def _changes(self, more: int) -> float:
        """So many requests more run from now on. Returns now."""
        now = self._timeline.now()
        self._beside += self._running * (now - self._since)
        if not self._running:
            self._busy_from = now
        self._running, self._since = self._running + more, now
        if not self._running:
            self._timeline.add("busy", self._busy_from, now)
        return now

    async def _measured(self, which: RouteId, request: GenerationRequest) -> Generation:
        began, fed = self._changes(0), 0
        beside = self._beside
        before = self._answered.pop(which.trajectory_id, None)
        if before is not None and before[0].number == which.number - 1:
            self._timeline.add("environment", before[1], began)
            fed = before[2]
        generation = await self._engine.generate(request)
        ended, prompt, tokens = self._changes(0), len(request.prompt_ids), len(generation.token_ids)
        running = (self._beside - beside) / (ended - began) if ended > began else self._running
        self._timeline.add(
            "call", began, ended, turn=which.number, tokens=tokens, prompt=max(0, prompt - fed), running=running
        )
        self._answered[which.trajectory_id] = which, ended, prompt + tokens
        while len(self._answered) > 1024:  # their last answer has no call behind it
            del self._answered[next(iter(self._answered))]
        return generation
