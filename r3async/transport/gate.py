"""The learner's door: lets in only peers whose key is known, and counts the others.

libzmq asks a ZAP handler (rfc.zeromq.org/spec/27) inside the same context about each CURVE handshake that is sound: the
peer has the learner's public key, and proved that it has the secret of its own. A peer without a key, or with another
learner's, never gets that far; the socket's monitor tells of it. Neither is told anything of the run.
"""

from __future__ import annotations

import struct
from collections import Counter
from typing import Any

import zmq

from r3async.transport.keys import ServerKeys
from r3async.transport.sockets import LoopSocket

ZAP = "inproc://zeromq.zap.01"
FAILED = zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_AUTH
EVENT = struct.Struct("=HI")

NO_KEY = "no key shown"
OTHER_LEARNER = "the key of another learner"
UNKNOWN_KEY = "a key that is not known here"
BROKEN = "a broken handshake"

# Values of zmq.h: ZMQ_PROTOCOL_ERROR_ZMTP_CRYPTOGRAPHIC and _MECHANISM_MISMATCH.
CRYPTOGRAPHIC = 0x11000001
MECHANISM_MISMATCH = 0x11000002


class Gate:
    """Guards one server socket of `context`, from before it binds until `close`. `refused` counts by reason."""

    def __init__(self, context: zmq.Context[Any], server: zmq.Socket[bytes], keys: ServerKeys, refused: Counter[str]):
        self._keys, self._refused = keys, refused
        handler = context.socket(zmq.REP)
        handler.linger = 0
        handler.bind(ZAP)
        self._zap = LoopSocket(handler, self._answer)
        server.zap_domain = b"r3async"
        keys.apply(server)
        self._server = server
        self._monitor = LoopSocket(server.get_monitor_socket(FAILED), self._note)

    def close(self) -> None:
        """Before the server's socket is closed. Idempotent."""
        if not self._server.closed:
            self._server.disable_monitor()
        self._monitor.close()
        self._zap.close()

    def _answer(self, frames: list[zmq.Frame]) -> None:
        version, request, *rest = (f.bytes for f in frames)
        # domain, address, identity, mechanism, credentials
        known = len(rest) >= 5 and rest[3] == b"CURVE" and rest[4] in self._keys.allowed
        if not known:
            self._refused[UNKNOWN_KEY] += 1
        status = (b"200", b"OK", b"generator") if known else (b"400", b"unknown key", b"")
        self._zap.send([version, request, *status, b""])

    def _note(self, frames: list[zmq.Frame]) -> None:
        event, value = EVENT.unpack(frames[0].bytes)
        if event == zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL:
            self._refused[{MECHANISM_MISMATCH: NO_KEY, CRYPTOGRAPHIC: OTHER_LEARNER}.get(value, BROKEN)] += 1
        elif event == zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL:
            self._refused[NO_KEY] += 1  # It left first: a client without keys notices the mismatch as soon as this end.


class Knock:
    """A client's side: `denied` says why the learner does not let this key in, once that is certain."""

    def __init__(self, client: zmq.Socket[bytes]):
        self.denied = ""
        self._client = client
        self._monitor = LoopSocket(client.get_monitor_socket(FAILED), self._note)

    def close(self) -> None:
        """Before the client's socket is closed. Idempotent."""
        if not self._client.closed:
            self._client.disable_monitor()
        self._monitor.close()

    def _note(self, frames: list[zmq.Frame]) -> None:
        event, value = EVENT.unpack(frames[0].bytes)
        if event == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
            self.denied = "this key: with `transport.keys`, its `.public` file has to be in the learner's directory"
        elif event == zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL and value == MECHANISM_MISMATCH:
            self.denied = "this connection: what listens there has no keys, so it is no learner of this version"
