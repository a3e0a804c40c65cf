"""The process that plays blocking environments: it reads a call, makes it and writes the reply."""

from __future__ import annotations

import contextlib
import signal
import socket
import struct
import sys
import time
from dataclasses import dataclass
from typing import Any, Literal

import msgspec

from r3async.config.user_code import import_object
from r3async.envs import Action, EnvironmentProtocolError, Message, StepResult
from r3async.envs.errors import ErrorSummary, summarize_error
from r3async.envs.returned import coerce_messages, require_step_result
from r3async.envs.seeding import seed_global_generators
from r3async.untrusted import decode_msgpack
from r3async.world.keeper import STOP_SIGNALS
from r3async.world.process_output import ignore_output_errors

_LENGTH_PREFIX = struct.Struct("!Q")
"""Length prefix of each message between the owner and its process."""


class WorkerCall(msgspec.Struct, frozen=True, omit_defaults=True):
    method: Literal["load", "reset", "step", "drop"]
    instance: int = 0
    seed: int | None = None
    action: Action | None = None
    path: str = ""
    arguments: dict[str, Any] = {}


class WorkerReply(msgspec.Struct, frozen=True, omit_defaults=True):
    """The reply to a `WorkerCall`.

    Attributes:
        oracle: The best answer to what was asked last, if the environment knows it.
        raised: The error that the environment raised.
        wrong: How the environment broke the protocol (`EnvironmentProtocolError`);
            empty if it did not.
    """

    messages: list[Message] = []
    result: StepResult | None = None
    oracle: str = ""
    raised: ErrorSummary | None = None
    wrong: str = ""


@dataclass
class EnvironmentInstance:
    """An environment in the middle of its episode."""

    environment: Any
    task_seed: int
    step_count: int = 0


class EnvironmentHost:
    """All environment instances that live in this process."""

    def __init__(self) -> None:
        self._constructor: Any = None
        self._arguments: dict[str, Any] = {}
        self._instances: dict[int, EnvironmentInstance] = {}

    def handle_call(self, call: WorkerCall) -> WorkerReply:
        """Handle one call. Errors of an environment become part of the reply and never raise,
        except `KeyboardInterrupt`."""
        try:
            return self._dispatch_call(call)
        except (Exception, SystemExit) as error:
            # An exit would end the other episodes of this process.
            if call.method == "reset":
                self._instances.pop(call.instance, None)
            raised = summarize_error(error)
            return WorkerReply(
                raised=raised,
                wrong=raised.line if isinstance(error, EnvironmentProtocolError) else "",
            )

    def _dispatch_call(self, call: WorkerCall) -> WorkerReply:
        match call.method:
            case "load":
                self._constructor = import_object(call.path)
                self._arguments = call.arguments
                return WorkerReply()
            case "reset":
                assert call.seed is not None
                seed_global_generators(call.seed)
                env = self._constructor(**self._arguments)
                self._instances[call.instance] = EnvironmentInstance(env, call.seed)
                first = coerce_messages(env.reset(call.seed), "reset()")
                return WorkerReply(messages=first, oracle=get_oracle_answer(env))
            case "step":
                instance = self._instances[call.instance]
                instance.step_count += 1
                seed_global_generators(instance.task_seed, instance.step_count)
                env = instance.environment
                result = require_step_result(env.step(call.action))
                # `done` may be a NumPy bool, which msgpack cannot encode.
                messages = coerce_messages(result.messages, "StepResult.messages")
                result = msgspec.structs.replace(result, done=bool(result.done), messages=messages)
                return WorkerReply(
                    result=result, oracle="" if result.done else get_oracle_answer(env)
                )
            case "drop":
                dropped = self._instances.pop(call.instance, None)
                if dropped is not None and hasattr(dropped.environment, "close"):
                    dropped.environment.close()
        return WorkerReply()


def send_message(channel: socket.socket, message: bytes, deadline: float | None = None) -> None:
    """Send all of `message`. Raises `TimeoutError` if this is not done by `deadline`, a time of
    `time.monotonic()`."""
    for part in (_LENGTH_PREFIX.pack(len(message)), message):
        channel.settimeout(_remaining_seconds(deadline))
        channel.sendall(part)  # the timeout covers the whole call


def receive_message(channel: socket.socket, deadline: float | None = None) -> bytes:
    """Receive a message of `send_message`. Raises `EOFError` if the other side ends first, and
    `TimeoutError` after `deadline`."""
    (length,) = _LENGTH_PREFIX.unpack(_receive_bytes(channel, _LENGTH_PREFIX.size, deadline))
    return _receive_bytes(channel, length, deadline)


def _receive_bytes(channel: socket.socket, count: int, deadline: float | None) -> bytes:
    received = bytearray()
    while len(received) < count:
        channel.settimeout(_remaining_seconds(deadline))
        part = channel.recv(min(count - len(received), 2**20))
        if not part:
            raise EOFError("the other side ended")
        received += part
    return bytes(received)


def _remaining_seconds(deadline: float | None) -> float | None:
    """Return the seconds until `deadline`, for `socket.settimeout`. Raises `TimeoutError` if
    there are none left."""
    if deadline is None:
        return None
    seconds = deadline - time.monotonic()
    if seconds <= 0:
        raise TimeoutError
    return seconds


def get_oracle_answer(env: Any) -> str:
    return env.oracle() if hasattr(env, "oracle") else ""


def main() -> None:
    """Serve calls until the owner ends this process. The command-line arguments are the module path
    (already set) and the descriptor of the pipe."""
    ignore_output_errors()  # an environment must not fail because it prints
    # Which may be sent to every process of a run; the programs that it starts obey them.
    for number in STOP_SIGNALS:
        signal.signal(number, lambda *_: None)
    channel = socket.socket(fileno=int(sys.argv[2]))
    player = EnvironmentHost()
    with contextlib.suppress(EOFError, OSError):
        while True:
            reply = player.handle_call(decode_msgpack(receive_message(channel), WorkerCall))
            send_message(channel, _encode_reply(reply))


def _encode_reply(reply: WorkerReply) -> bytes:
    """Encode a reply. A reply that cannot be encoded fails its own episode, not the process with
    all other episodes."""
    try:
        return msgspec.msgpack.encode(reply)
    except Exception as error:
        return msgspec.msgpack.encode(WorkerReply(raised=summarize_error(error)))
