"""A server for the Tinker API over one model: `r3async tinker`.

Everything that it keeps is in runs/NAME: the key, saved weights, sampled sequences, events. The
same command serves them again.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import signal
from collections.abc import Sequence
from pathlib import Path

import typer

from r3async.checkpoint.run_lock import RunLock
from r3async.config import Config, ConfigError, config_from_dict
from r3async.config.load import apply_overrides, refuse_literal_secrets
from r3async.learner import LearnerError
from r3async.record.events import open_event_log
from r3async.rollout.engine import EngineError
from r3async.rollout.renderer import read_generation_stops
from r3async.tinker.engine_backend import EngineBackend
from r3async.tinker.server import KEY_PREFIX, TinkerServer
from r3async.tinker.service import TinkerService
from r3async.world.files import make_directory, read_file, replace_file
from r3async.world.real import REAL_WORLD

from .hub import resolve_hub_model
from .preflight import check_start

DEFAULT_NAME = "tinker"
KEY_VARIABLE = "TINKER_API_KEY"
KEY_FILE = "key"
ADAPTERS = {"rank": 32, "deliver": "adapter", "targets": ["self_attn"]}
"""The SDK's default rank, for several clients at once."""


def build_tinker_config(model: str, overrides: Sequence[str]) -> Config:
    """Return the settings of a server of `model`. Raises `ConfigError`."""
    base = config_from_dict(
        {
            "name": DEFAULT_NAME,
            "model": {"path": model},
            "learner": {"lora": ADAPTERS},
            "episode": {"max_prompt_tokens": 1},  # nothing reads it: a request says its lengths
        }
    )
    config = apply_overrides(base, overrides, "tinker")
    refuse_literal_secrets(config, overrides)
    lora = config.learner.lora
    if lora.rank and not lora.delivers_adapters:
        raise ConfigError(
            '`learner.lora.deliver` = "merged" would be a whole model for each client: set it to '
            '"adapter", or train all weights (`learner.lora.rank` = 0)'
        )
    if config.learner.offload_moments and lora.rank:
        raise ConfigError(
            "`learner.offload_moments` saves memory of whole models, and adapters change places "
            "with their moments: set it to false"
        )
    if config.routing.replay != "rollout":
        raise ConfigError('`routing.replay` must be "rollout": clients train on recorded routes')
    if config.routing.gates != "learner":
        raise ConfigError('`routing.gates` must be "learner": the server keeps no gates')
    return config


def serve_tinker(config: Config, served_name: str, host: str, port: int, runs: Path) -> None:
    """Serve until Ctrl-C or SIGTERM. Raises `ConfigError` or `LearnerError` with a remedy."""
    config = resolve_hub_model(config, download=True)
    for line in check_start(config, runs, "tinker").notes:
        typer.echo(line, err=True)
    directory = (runs / config.name).absolute()
    make_directory(directory)
    lock = RunLock(directory)
    try:
        if not asyncio.run(lock.acquire_exclusive(0.0)):
            raise ConfigError(f"{directory} is in use: choose another name (name=...)")
        lock.acquire_shared()  # with the learner's ranks
        asyncio.run(_serve(config, served_name, host, port, directory))
    except EngineError as error:
        raise LearnerError(str(error)) from error
    finally:
        lock.close()


async def _serve(config: Config, served_name: str, host: str, port: int, directory: Path) -> None:
    stopped = asyncio.Event()
    loop = asyncio.get_running_loop()

    def stop(number: signal.Signals) -> None:
        stopped.set()
        loop.remove_signal_handler(number)  # a second one ends the process at once

    def listen() -> None:
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, stop, number)

    listen()
    events = open_event_log(directory, "tinker")
    model = Path(config.model.path)
    backend = EngineBackend(
        config,
        model,
        served_name,
        _find_end_tokens(model),
        directory,
        report_event=events.warning,
    )
    service = TinkerService(backend, directory, REAL_WORLD, report_event=events.warning)
    server = TinkerServer(service, key=_read_key(directory), host=host, port=port)
    waiting = asyncio.create_task(stopped.wait())
    starting = asyncio.create_task(backend.start())
    typer.echo("loading the model", err=True)
    try:
        await asyncio.wait([waiting, starting], return_when=asyncio.FIRST_COMPLETED)
        if starting.done():
            await starting
            listen()  # again: Ray, which several ranks start, puts a handler of its own there
            await server.start()
            events.info("learner_started", url=server.base_url, model=served_name)
            typer.echo(_describe_exports(server.base_url, directory))
            await waiting
        else:
            starting.cancel()
            await asyncio.wait([starting])
        events.info("run_finished", stopped=True)
    finally:
        await server.stop()
        await backend.stop()
        REAL_WORLD.actors.leave_cluster()


def _read_key(directory: Path) -> str:
    """Return the key of the environment, or the directory's own, which is made if there is none."""
    given = os.environ.get(KEY_VARIABLE, "")
    if given:
        return given
    path = directory / KEY_FILE
    if REAL_WORLD.files.stat(path) is None:
        replace_file(path, (KEY_PREFIX + secrets.token_urlsafe(32)).encode(), 0o600)
    return read_file(path).decode().strip()


def _describe_exports(url: str, directory: Path) -> str:
    """Return the line that sets a client's variables."""
    line = f"export TINKER_BASE_URL={url}"
    if os.environ.get(KEY_VARIABLE):
        return f"{line}  # and {KEY_VARIABLE} as it is here"
    return f'{line} {KEY_VARIABLE}="$(cat {directory / KEY_FILE})"'


def _find_end_tokens(model: Path) -> tuple[int, ...]:
    from transformers import AutoTokenizer

    own = AutoTokenizer.from_pretrained(model).eos_token_id
    ends = [*([] if own is None else [own]), *read_generation_stops(model)]
    return tuple(dict.fromkeys(ends))
