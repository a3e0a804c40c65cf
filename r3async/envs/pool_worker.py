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

from r3async.config.places import resolve_name
from r3async.envs import Action, Message, StepResult, WrongEnvironment, checked_messages, checked_result
from r3async.envs.raised import Raised, describe_raised
from r3async.untrusted import decode_msgpack
from r3async.world.processes import survive_full_disk

PR_SET_PDEATHSIG = 1
"""Of prctl(2)."""
_LENGTH = struct.Struct("!Q")
"""Stands before each message between the owner and its process."""


class Call(msgspec.Struct, frozen=True, omit_defaults=True):
    method: Literal["load", "reset", "step", "drop"]
    instance: int = 0
    seed: int | None = None
    action: Action | None = None
    path: str = ""
    arguments: dict[str, Any] = {}


class Reply(msgspec.Struct, frozen=True, omit_defaults=True):
    """`raised`: by the environment; `wrong`: by what we ask of one (`WrongEnvironment`). `oracle` is the best answer to what was
    asked last, if the environment knows it."""

    messages: list[Message] = []
    result: StepResult | None = None
    oracle: str = ""
    raised: Raised | None = None
    wrong: str = ""


class Player:
    """All instances that live in this process."""

    def __init__(self) -> None:
        self._kind: Any = None
        self._arguments: dict[str, Any] = {}
        self._instances: dict[int, Any] = {}

    def play(self, call: Call) -> Reply:
        """Never raises for what an environment does, but for `KeyboardInterrupt`."""
        try:
            return self._play(call)
        except (Exception, SystemExit) as error:  # whoever exits would end the other episodes of this process
            if call.method == "reset":
                self._instances.pop(call.instance, None)
            raised = describe_raised(error)
            return Reply(raised=raised, wrong=raised.line if isinstance(error, WrongEnvironment) else "")

    def _play(self, call: Call) -> Reply:
        match call.method:
            case "load":
                self._kind, self._arguments = resolve_name(call.path), call.arguments
                return Reply()
            case "reset":
                env = self._instances[call.instance] = self._kind(**self._arguments)
                first = checked_messages(env.reset(call.seed))
                return Reply(messages=first, oracle=oracle_of(env))
            case "step":
                env = self._instances[call.instance]
                result = checked_result(env.step(call.action))
                # What numpy says is done, msgpack does not know.
                result = msgspec.structs.replace(
                    result, done=bool(result.done), messages=checked_messages(result.messages)
                )
                return Reply(result=result, oracle="" if result.done else oracle_of(env))
            case "drop":
                close = getattr(self._instances.pop(call.instance, None), "close", None)
                if close is not None:
                    close()
        return Reply()


def send_message(channel: socket.socket, message: bytes, deadline: float | None = None) -> None:
    """Send all of `message`. Raises `TimeoutError` where that is not done at `deadline`, of `time.monotonic()`."""
    for part in (_LENGTH.pack(len(message)), message):
        channel.settimeout(_remaining(deadline))
        channel.sendall(part)  # its time limit holds for all of it


def receive_message(channel: socket.socket, deadline: float | None = None) -> bytes:
    """Receive what `send_message` sends. Raises `EOFError` if the other side ends before, and `TimeoutError` as that does."""
    (length,) = _LENGTH.unpack(_receive_bytes(channel, _LENGTH.size, deadline))
    return _receive_bytes(channel, length, deadline)


def _receive_bytes(channel: socket.socket, count: int, deadline: float | None) -> bytes:
    received = bytearray()
    while len(received) < count:
        channel.settimeout(_remaining(deadline))
        part = channel.recv(min(count - len(received), 2**20))
        if not part:
            raise EOFError("the other side ended")
        received += part
    return bytes(received)


def _remaining(deadline: float | None) -> float | None:
    """Return the seconds until `deadline`, for `socket.settimeout`. Raises `TimeoutError` if there are none left."""
    if deadline is None:
        return None
    if (seconds := deadline - time.monotonic()) <= 0:
        raise TimeoutError
    return seconds


def oracle_of(env: Any) -> str:
    return env.oracle() if hasattr(env, "oracle") else ""


def _end_by_the_kernel() -> None:
    """Where Linux runs this, the kernel kills this process when its owner ends: a process that is stopped cannot look."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def _end_with(owner: int, descriptor: int) -> None:
    """Ends this process when its owner has ended, also while an environment hangs: the pipe is read by nobody then."""
    poll = select.poll()
    poll.register(descriptor, select.POLLRDHUP)  # the end of the pipe, and not what comes through it
    while os.getppid() == owner:
        if poll.poll(1000):
            break
    os._exit(1)


def main() -> None:
    """Arguments: the module path (already set), the descriptor of the pipe, the owner's process id."""
    survive_full_disk()  # an environment that prints must not fail by it
    descriptor, owner = int(sys.argv[2]), int(sys.argv[3])
    _end_by_the_kernel()  # an owner that ended before is seen by `_end_with`
    threading.Thread(target=_end_with, args=(owner, descriptor), daemon=True).start()
    channel, player = socket.socket(fileno=descriptor), Player()
    with contextlib.suppress(EOFError, OSError):
        while True:
            reply = player.play(decode_msgpack(receive_message(channel), Call))
            send_message(channel, _encode_reply(reply))


def _encode_reply(reply: Reply) -> bytes:
    """What an environment said and no message can hold fails its episode, and not the process with all others."""
    try:
        return msgspec.msgpack.encode(reply)
    except Exception as error:
        return msgspec.msgpack.encode(Reply(raised=describe_raised(error)))
