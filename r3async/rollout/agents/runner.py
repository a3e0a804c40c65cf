"""Episodes played by an agent, for whoever plays leases or evaluates."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec

from r3async.config import EnvConfig, EpisodeConfig, ServingConfig
from r3async.data.records import Trajectory
from r3async.rollout.agents.agents import Agent, is_agent, make_agent
from r3async.rollout.agents.server import AgentServer
from r3async.rollout.calls import EpisodeError
from r3async.rollout.chat import ChatRenderer
from r3async.rollout.engines.base import Engine
from r3async.rollout.episode import EpisodeTask
from r3async.world import World
from r3async.world.appending import RETRY_SECONDS
from r3async.world.files import replace_file
from r3async.world.real import REAL

Play = Callable[[EpisodeTask], Awaitable[Trajectory]]


class AgentRunner:
    """Opens a session for each episode and lets the agent play it."""

    def __init__(self, agent: Agent, server: AgentServer):
        self._agent, self._server = agent, server

    async def play(self, task: EpisodeTask) -> Trajectory:
        """Until the agent ends, or `episode.timeout` is over.

        An agent that fails because it was refused more turns or a longer context has played its episode, if its reward is known.
        Else what it raised is raised; `EpisodeError` for an episode without an answer or a reward; and what the engine raised,
        if that failed, whatever the agent made of it. Cancelling takes the episode from the agent.
        """
        session = self._server.open(task)
        settings, reason = self._server.settings, "stop"
        reward: float | None = None
        error: Exception | None = None
        try:
            async with asyncio.timeout(settings.timeout) as limit:
                reward = await self._agent(self._server, session)
        except Exception as raised:
            if isinstance(raised, TimeoutError) and limit.expired():
                reason = "timeout"
            else:
                error = raised
        finally:
            self._server.close(session)
        if session.failure is not None:
            raise session.failure
        if error is not None and not (session.limit and session.worth_known):
            raise error
        if reward is not None:
            try:
                session.reward(reward)
            except ValueError as wrong:
                raise EpisodeError(f"the agent of episode {task.trajectory_id}: {wrong}") from wrong
        if reason == "timeout" and not session.worth_known:
            raise EpisodeError(
                f"episode {task.trajectory_id} took longer than episode.timeout = {settings.timeout} s and has no reward; the "
                f"agent had {session.turns} answers"
            )
        return session.trajectory((session.limit or reason) if reason == "stop" else reason)


@asynccontextmanager
async def agent_player(
    env: EnvConfig,
    engine: Engine,
    renderer: ChatRenderer,
    episode: EpisodeConfig,
    serving: ServingConfig,
    *,
    generator_id: str = "",
    report: Callable[..., object] = lambda event, **fields: None,
    directory: Path | None = None,
    world: World = REAL,
) -> AsyncIterator[Play | None]:
    """What plays episodes of `env` if that is an agent; None if it is an environment. The endpoint is up meanwhile, also for an
    environment if `serving.enabled`; then its address is in `directory/serving-ID.json`, for its owner only, with its token if
    that was made here: one of `serving.token` is known to who set it, and is written nowhere.
    """
    agent = make_agent(env) if is_agent(env) else None
    if agent is None and not serving.enabled:
        yield None
        return
    clock = world.clock.time
    server = AgentServer(engine, renderer, episode, serving, generator_id=generator_id, report=report, clock=clock)
    await server.start()
    writing: asyncio.Task[None] | None = None
    try:
        if serving.enabled and directory is not None:
            made = {} if serving.token else {"token": server.token}
            told = msgspec.json.encode({"base_url": server.base_url, **made})
            path = directory / f"serving-{generator_id}.json"
            writing = asyncio.create_task(_write_private(path, told, report, world))
            await asyncio.wait([writing], timeout=RETRY_SECONDS)
        yield AgentRunner(agent, server).play if agent is not None else None
    finally:
        if writing is not None:
            writing.cancel()
        await server.stop()


async def _write_private(path: Path, data: bytes, report: Callable[..., object], world: World) -> None:
    """For its owner only; tried again until the disk takes it."""
    failed = False
    while True:
        try:
            return await world.threads.run(replace_file, path, data, 0o600, files=world.files)
        except OSError as error:
            if not failed:
                report("serving_address_not_written", file=str(path), error=str(error))
            failed = True
            await asyncio.sleep(RETRY_SECONDS)
