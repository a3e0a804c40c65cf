"""Plays a generator's episodes with an agent, over the endpoint that it opens for it."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
from collections.abc import AsyncIterator
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import msgspec

from r3async.config import EnvConfig, EpisodeConfig, ServingConfig
from r3async.data.tokens import Trajectory
from r3async.rollout.agents import PlayAgent, PlayEpisode, is_agent, make_agent
from r3async.rollout.episode import EpisodeError, EpisodeTask
from r3async.rollout.play_context import PlayContext
from r3async.world import EventReporter, World
from r3async.world.appending import RETRY_SECONDS
from r3async.world.files import replace_file
from r3async.world.real import REAL_WORLD

if TYPE_CHECKING:
    from r3async.rollout.endpoint.server import AgentServer


async def play_with_agent(agent: PlayAgent, server: AgentServer, task: EpisodeTask) -> Trajectory:
    """Open a session for the episode and let the agent play it until it ends, or until
    `episode.timeout` is over.

    An agent that fails because it was refused more turns or a longer context has played its
    episode, if the reward is known. Otherwise its exception is raised. Raises `EpisodeError` for an
    episode without an answer or a reward, and the engine's error if the engine failed, whatever the
    agent made of it. Cancelling takes the episode from the agent.
    """
    session = server.open_session(task)
    settings = server.settings
    reason = "stop"
    reward: float | None = None
    error: Exception | None = None
    try:
        async with asyncio.timeout(settings.timeout) as limit:
            reward = await agent(server, session)
    except Exception as raised:
        if isinstance(raised, TimeoutError) and limit.expired():
            reason = "timeout"
        else:
            error = raised
    finally:
        server.close_session(session)
    if session.engine_failure is not None:
        raise session.engine_failure
    if error is not None and not (session.exceeded_limit and session.has_effective_reward):
        raise error
    if reward is not None:
        try:
            session.set_reward(reward)
        except ValueError as wrong:
            raise EpisodeError(f"the agent of episode {task.trajectory_id}: {wrong}") from wrong
    if reason == "timeout" and not session.has_effective_reward:
        raise EpisodeError(
            f"episode {task.trajectory_id} took longer than episode.timeout = {settings.timeout} s "
            f"and has no reward; the agent had {session.turn_count} answers"
        )
    return session.build_trajectory(
        (session.exceeded_limit or reason) if reason == "stop" else reason
    )


@contextlib.asynccontextmanager
async def open_agent_player(
    env: EnvConfig,
    settings: EpisodeConfig,
    serving: ServingConfig,
    context: PlayContext,
    *,
    directory: Path | None = None,
    world: World = REAL_WORLD,
) -> AsyncIterator[PlayEpisode | None]:
    """Serve the endpoint and yield the function that plays episodes of `env`, or None if `env`
    is an environment.

    The endpoint is up for an agent, and for an environment if `serving.enabled`. If
    `serving.enabled`, its address is written to `directory/serving-ID.json`, readable by its owner
    only. The file holds the token if it was generated here; a token set with `serving.token` is
    written nowhere.
    """
    agent = make_agent(env) if is_agent(env) else None
    if agent is None and not serving.enabled:
        yield None
        return
    # Imported here because aiohttp takes a while to import, and commands that serve nothing import
    # this module too.
    from r3async.rollout.endpoint.server import AgentServer

    server = AgentServer(settings, serving, context)
    await server.start()
    _bypass_proxy(str(urlsplit(server.base_url).hostname))
    writing: asyncio.Task[None] | None = None
    try:
        if serving.enabled and directory is not None:
            made = {} if serving.token else {"token": server.token}
            address = msgspec.json.encode({"base_url": server.base_url, **made})
            path = directory / f"serving-{context.generator_id}.json"
            writing = asyncio.create_task(
                _write_private_file(path, address, context.report_event, world)
            )
            await asyncio.wait([writing], timeout=RETRY_SECONDS)
        yield functools.partial(play_with_agent, agent, server) if agent is not None else None
    finally:
        if writing is not None:
            writing.cancel()
        await server.stop()


def _bypass_proxy(host: str) -> None:
    """Exempt `host` from proxies, for agents in this process and for the programs that it starts.

    A proxy (HTTP_PROXY) would look for the endpoint on its own machine.
    """
    for name in ("NO_PROXY", "no_proxy"):
        known = [each for each in os.environ.get(name, "").split(",") if each]
        if host not in known:
            os.environ[name] = ",".join([*known, host])


async def _write_private_file(
    path: Path, data: bytes, report_event: EventReporter, world: World
) -> None:
    """Write a file that only its owner can read, retrying until the disk accepts it."""
    failed = False
    while True:
        try:
            return await world.threads.run(replace_file, path, data, 0o600, files=world.files)
        except OSError as error:
            if not failed:
                report_event("serving_address_not_written", file=str(path), error=str(error))
            failed = True
            await asyncio.sleep(RETRY_SECONDS)
