"""The process that plays blocking environments: reads a call, makes it, writes the reply; ends with its owner."""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import socket
import struct
import sys
import threading
import time
from typing import Any, Literal

import msgspec

from r3async.config.paths import import_object
from r3async.envs import Action, EnvironmentProtocolError, Message, StepResult, coerce_messages, require_step_result
from r3async.envs.errors import ErrorSummary, summarize_error
from r3async.untrusted import decode_msgpack
from r3async.world.processes import ignore_output_errors

PR_SET_PDEATHSIG = 1
"""Of prctl(2)."""
_LENGTH_PREFIX = struct.Struct("!Q")
"""Stands before each message between the owner and its process."""


class WorkerCall(msgspec.Struct, frozen=True, omit_defaults=True):
    method: Literal["load", "reset", "step", "drop"]
    instance: int = 0
    seed: int | None = None
    action: Action | None = None
    path: str = ""
    arguments: dict[str, Any] = {}


class WorkerReply(msgspec.Struct, frozen=True, omit_defaults=True):
    """`raised`: by the environment; `wrong`: by what we ask of one (`EnvironmentProtocolError`). `oracle` is the best answer
    to what was asked last, if the environment knows it."""

    messages: list[Message] = []
    result: StepResult | None = None
    oracle: str = ""
    raised: ErrorSummary | None = None
    wrong: str = ""


class EnvironmentHost:
    """All instances that live in this process."""

    def __init__(self) -> None:
        self._constructor: Any = None
        self._arguments: dict[str, Any] = {}
        self._instances: dict[int, Any] = {}

    def handle_call(self, call: WorkerCall) -> WorkerReply:
        """Never raises for what an environment does, but for `KeyboardInterrupt`."""
        try:
            return self._dispatch_call(call)
        except (Exception, SystemExit) as error:  # whoever exits would end the other episodes of this process
            if call.method == "reset":
                self._instances.pop(call.instance, None)
            raised = summarize_error(error)
            return WorkerReply(raised=raised, wrong=raised.line if isinstance(error, EnvironmentProtocolError) else "")

    def _dispatch_call(self, call: WorkerCall) -> WorkerReply:
        match call.method:
            case "load":
                self._constructor, self._arguments = import_object(call.path), call.arguments
                return WorkerReply()
            case "reset":
                env = self._instances[call.instance] = self._constructor(**self._arguments)
                first = coerce_messages(env.reset(call.seed))
                return WorkerReply(messages=first, oracle=get_oracle_answer(env))
            case "step":
                env = self._instances[call.instance]
                result = require_step_result(env.step(call.action))
                # What numpy says is done, msgpack does not know.
                result = msgspec.structs.replace(
                    result, done=bool(result.done), messages=coerce_messages(result.messages)
                )
                return WorkerReply(result=result, oracle="" if result.done else get_oracle_answer(env))
            case "drop":
                close = getattr(self._instances.pop(call.instance, None), "close", None)
                if close is not None:
                    close()
        return WorkerReply()


def send_message(channel: socket.socket, message: bytes, deadline: float | None = None) -> None:
    """Send all of `message`. Raises `TimeoutError` where that is not done at `deadline`, of `time.monotonic()`."""
    for part in (_LENGTH_PREFIX.pack(len(message)), message):
        channel.settimeout(_remaining_seconds(deadline))
        channel.sendall(part)  # its time limit holds for all of it


def receive_message(channel: socket.socket, deadline: float | None = None) -> bytes:
    """Receive what `send_message` sends. Raises `EOFError` if the other side ends before, and `TimeoutError` as that does."""
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
    """Return the seconds until `deadline`, for `socket.settimeout`. Raises `TimeoutError` if there are none left."""
    if deadline is None:
        return None
    if (seconds := deadline - time.monotonic()) <= 0:
        raise TimeoutError
    return seconds


def get_oracle_answer(env: Any) -> str:
    return env.oracle() if hasattr(env, "oracle") else ""


def _request_death_signal() -> None:
    """Where Linux runs this, the kernel kills this process when its owner ends: a process that is stopped cannot look."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def _exit_with_owner(owner: int, descriptor: int) -> None:
    """Ends this process when its owner has ended, also while an environment hangs: the pipe is read by nobody then."""
    poll = select.poll()
    poll.register(descriptor, select.POLLRDHUP)  # the end of the pipe, and not what comes through it
    while os.getppid() == owner:
        if poll.poll(1000):
            break
    os._exit(1)


def main() -> None:
    """Arguments: the module path (already set), the descriptor of the pipe, the owner's process id."""
    ignore_output_errors()  # an environment that prints must not fail by it
    descriptor, owner = int(sys.argv[2]), int(sys.argv[3])
    _request_death_signal()  # an owner that ended before is seen by `_exit_with_owner`
    threading.Thread(target=_exit_with_owner, args=(owner, descriptor), daemon=True).start()
    channel, player = socket.socket(fileno=descriptor), EnvironmentHost()
    with contextlib.suppress(EOFError, OSError):
        while True:
            reply = player.handle_call(decode_msgpack(receive_message(channel), WorkerCall))
            send_message(channel, _encode_reply(reply))


def _encode_reply(reply: WorkerReply) -> bytes:
    """What an environment said and no message can hold fails its episode, and not the process with all others."""
    try:
        return msgspec.msgpack.encode(reply)
    except Exception as error:
        return msgspec.msgpack.encode(WorkerReply(raised=summarize_error(error)))
