"""The event log of a run: `run_dir/events.jsonl`, JSON lines that all processes of
the run append to.

Each line is one object: `time` (unix seconds), `level`, `role` (the process that logged it),
`event` (a fixed name), then the fields of that event. structlog is wrapped, never configured
globally, so other users of structlog in the process are not affected.
"""

from __future__ import annotations

import contextlib
import json
import logging
import sys
import time
from collections.abc import Callable, MutableMapping
from pathlib import Path
from typing import Any

import msgspec
import structlog

from r3async.untrusted import MalformedError, decode_json_object, decode_utf8
from r3async.world import World
from r3async.world.appending import AppendFile, RecordFlusher
from r3async.world.real import REAL_WORLD

EVENTS_FILE = "events.jsonl"


def _encode_fallback(value: Any) -> Any:
    """Convert a value that msgspec cannot encode: NumPy and torch scalars by value,
    anything else to text.

    No event is ever rejected.
    """
    item = getattr(value, "item", None)
    if item is not None and getattr(value, "ndim", None) == 0:
        return item()
    return str(value) if isinstance(value, (Path, BaseException)) else repr(value)


_encoder = msgspec.json.Encoder(enc_hook=_encode_fallback)


def _encode_event(event: dict[str, Any]) -> bytes:
    try:
        line = _encoder.encode(event)
        if not line.isascii():
            # Msgspec writes lone surrogates (of a file name, say) as they are, and no reader
            # accepts such a line.
            decode_utf8(line)
        return line
    except Exception:
        # Text that is not UTF-8, a key that is not a string, an object that contains itself.
        plain = {
            str(key): value if key == "time" else ascii(value).strip("'")
            for key, value in event.items()
        }
        return json.dumps(plain).encode()


class _EventRenderer:
    """The last structlog processor: renders an event as one line of JSON and adds the time."""

    def __init__(self, clock: Callable[[], float]):
        self._clock = clock

    def __call__(
        self, _: Any, method: str, event: MutableMapping[str, Any]
    ) -> tuple[tuple[bytes], dict[str, Any]]:
        line = {
            "time": self._clock(),
            "level": method,
            "role": event.pop("role", ""),
            "event": event.pop("event", ""),
        }
        line.update(event)
        return (_encode_event(line),), {}


class _EventWriter:
    """The structlog logger that writes rendered lines; structlog calls the method named after
    the event's level."""

    def __init__(self, file: AppendFile, console: bool, unsent: list[bytes] | None):
        self._file = file
        self._console = console
        self._unsent = unsent

    def _write_line(self, line: bytes) -> None:
        self._file.append(line)
        if self._unsent is not None:
            self._unsent.append(line)
        if self._console:
            with contextlib.suppress(OSError, MalformedError):
                sys.stderr.write(format_event(decode_json_object(line)) + "\n")

    debug = info = warning = warn = error = critical = exception = fatal = msg = log = _write_line


def open_event_log(
    run_dir: Path,
    role: str,
    *,
    world: World = REAL_WORLD,
    console: bool = False,
    keeper: RecordFlusher | None = None,
    unsent: list[bytes] | None = None,
) -> Any:
    """Return a structlog bound logger for one process of a run:
    `events.info("weights_installed", version=3)`.

    Each call writes one line before it returns. If the disk refuses the line, `keeper` holds it,
    and reports the failure to this logger. Threads and processes may share the file. `.bind(…)`
    adds fields to every line; `.exception(…)` adds the traceback as text.

    Args:
        run_dir: Directory of the run, which holds the event log.
        role: Name of the process, on every line.
        console: Show each line on stderr too.
        keeper: The process's record flusher; defaults to that of `world`.
        unsent: Each rendered line is added to it, for who sends the lines elsewhere.
    """
    keeper = world.record_flusher if keeper is None else keeper
    logger = structlog.wrap_logger(
        _EventWriter(
            AppendFile(Path(run_dir) / EVENTS_FILE, world=world, flusher=keeper), console, unsent
        ),
        processors=[structlog.processors.format_exc_info, _EventRenderer(world.clock.time)],
        wrapper_class=structlog.make_filtering_bound_logger(logging.DEBUG),
        context_class=dict,
        cache_logger_on_first_use=True,
    )
    bound = logger.bind(role=role)
    keeper.set_event_reporter(bound.warning)
    return bound


def format_event_details(event: dict[str, Any]) -> str:
    """Format the fields of an event as `key=value …`, without the fields that every event has."""
    common = ("time", "level", "role", "event", "exception")
    return " ".join(
        f"{key}={_format_value(value)}" for key, value in event.items() if key not in common
    )


def _format_value(value: Any) -> str:
    if isinstance(value, str):
        return value if value and " " not in value else json.dumps(value, ensure_ascii=False)
    return f"{value:.6g}" if isinstance(value, float) else msgspec.json.encode(value).decode()


def format_event(event: dict[str, Any], details: str | None = None) -> str:
    """Format an event as one line for a terminal, with its traceback below. `details` replaces
    the event's fields."""
    details = format_event_details(event) if details is None else details
    clock = time.strftime("%H:%M:%S", time.localtime(event.get("time", 0.0)))
    text = (
        f"{clock} {event.get('level', ''):7} {event.get('role', '')}: "
        f"{event.get('event', '')} {details}"
    )
    return text.rstrip() + (f"\n{event['exception']}" if event.get("exception") else "")
