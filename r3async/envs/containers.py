"""Places that keep their state between commands: a Docker container, and a sandbox that has
folders at the top of its file system as a container has. `Sandbox` by itself has a new container
for each command."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import shlex
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Self

from r3async.envs import EnvironmentFailed
from r3async.envs.sandbox import (
    KILL_SECONDS,
    CommandLimits,
    CommandResult,
    Sandbox,
    run_bounded,
    run_quietly,
)

START_SECONDS = 60.0
"""Seconds that a container of a present image may take to start, and one of Docker's own
commands to end."""
PULL_SECONDS = 600.0
_KILLED_EXIT_CODE = 137
_name_counter = itertools.count()


class Container:
    """A running container of an image. `await Container.start(...)` makes one; `close` removes it.

    Its main process reads a pipe of ours, so it also ends when this process does. What a command
    leaves in the background runs on.
    """

    def __init__(self, name: str, limits: CommandLimits, client: asyncio.subprocess.Process):
        self._name = name
        self._limits = limits
        self._client = client

    @classmethod
    async def start(cls, image: str, limits: CommandLimits) -> Self:
        name = f"r3async-{os.getpid()}-{next(_name_counter)}"
        memory = f"{limits.memory_mib}m"
        client = await asyncio.create_subprocess_exec(
            *(
                "docker",
                "run",
                "--interactive",
                "--rm",
                "--pull",
                "never",
                "--name",
                name,
                "--entrypoint",
                "cat",
            ),
            *(
                "--network",
                "bridge" if limits.network else "none",
                "--pids-limit",
                str(limits.processes),
            ),
            *("--memory", memory, "--memory-swap", memory, image),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.PIPE,
        )
        made = cls(name, limits, client)
        try:
            await asyncio.wait_for(made._wait_until_running(image), START_SECONDS)
        except BaseException as error:
            await made.close()
            if isinstance(error, TimeoutError):
                raise EnvironmentFailed(
                    f"a container of {image} took longer than {START_SECONDS:g} s to start"
                ) from error
            raise
        return made

    async def _wait_until_running(self, image: str) -> None:
        asked = ("docker", "container", "inspect", "--format", "{{.State.Running}}", self._name)
        while (await run_bounded(asked, START_SECONDS, 4096)).output.strip() != "true":
            if self._client.returncode is not None:
                assert self._client.stderr is not None
                said = (await self._client.stderr.read()).decode(errors="replace")
                raise EnvironmentFailed(
                    f"a container of {image} cannot be started: {said.strip()[-2000:]}"
                )
            await asyncio.sleep(0.05)

    async def run(self, command: str, seconds: float, user: str = "") -> CommandResult:
        """Run a command in a shell until it ends, or its time is over."""
        begun = time.monotonic()
        as_user = ("--user", user) if user else ()
        in_order = f"exec 2>&1; {command}"  # Docker relays two streams, in no order
        words = (
            "docker",
            "exec",
            *as_user,
            self._name,
            "timeout",
            "-s",
            "KILL",
            f"{seconds:g}",
            "sh",
            "-c",
            in_order,
        )
        result = await run_bounded(words, seconds + KILL_SECONDS, self._limits.output_bytes)
        if result.exit_code == _KILLED_EXIT_CODE and time.monotonic() - begun >= seconds:
            return CommandResult(None, result.output)
        return result

    async def unpack(self, archive: bytes, folder: str) -> None:
        """Unpack a tar archive in a folder, which is made."""
        await self.run(f"mkdir -p {shlex.quote(folder)}", START_SECONDS, "0")
        process = await asyncio.create_subprocess_exec(
            *("docker", "cp", "-", f"{self._name}:{folder}"),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.PIPE,
        )
        try:
            _, said = await asyncio.wait_for(process.communicate(archive), START_SECONDS)
        finally:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
        if process.returncode:
            raise EnvironmentFailed(
                f"files cannot be copied into a container: {said.decode(errors='replace').strip()}"
            )

    async def close(self) -> None:
        """Remove the container. Idempotent."""
        if self._client.stdin is not None:
            self._client.stdin.close()
        await run_quietly("docker", "rm", "--force", self._name)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._client.wait(), KILL_SECONDS)


class SandboxContainer:
    """A sandbox of this machine with the interface of `Container`. What a command leaves in the
    background ends with it, and all commands have one user."""

    def __init__(self, sandbox: Sandbox):
        self._sandbox = sandbox

    @classmethod
    async def start(cls, limits: CommandLimits, top_folders: Sequence[str]) -> Self:
        return cls(await Sandbox.open(limits, top_folders=top_folders))

    async def run(self, command: str, seconds: float, user: str = "") -> CommandResult:
        return await self._sandbox.run(command, seconds)

    async def unpack(self, archive: bytes, folder: str) -> None:
        await self._sandbox.write({f"{folder.lstrip('/')}/.archive.tar": archive})
        command = (
            f"cd {shlex.quote(folder)} && tar --no-same-owner -xf .archive.tar && rm .archive.tar"
        )
        unpacked = await self._sandbox.run(command)
        if unpacked.exit_code != 0:
            raise EnvironmentFailed(
                f"files cannot be unpacked in the sandbox: {unpacked.format_for_policy()}"
            )

    async def close(self) -> None:
        await self._sandbox.close()


async def find_docker_problem() -> str:
    """Return why this machine cannot run containers; empty if it can."""
    asked = await run_bounded(
        ("docker", "version", "--format", "{{.Server.Version}}"), START_SECONDS, 2048
    )
    return "" if asked.exit_code == 0 else asked.output.strip() or "docker does not answer"


async def fetch_image(image: str) -> str:
    """Pull an image, unless it is here."""
    if (await run_bounded(("docker", "image", "inspect", image), START_SECONDS, 64)).exit_code != 0:
        await _run_or_fail(("docker", "pull", "--quiet", image), PULL_SECONDS)
    return image


async def build_image(folder: Path, tag: str, seconds: float) -> str:
    """Build the image of a folder with a Dockerfile; Docker keeps what it has built before."""
    await _run_or_fail(
        ("docker", "build", "--quiet", "--force-rm", "--tag", tag, str(folder)), seconds
    )
    return tag


async def _run_or_fail(words: tuple[str, ...], seconds: float) -> None:
    result = await run_bounded(words, seconds, 4096)
    if result.exit_code != 0:
        raise EnvironmentFailed(f"`{' '.join(words)}` failed:\n{result.format_for_policy()}")
