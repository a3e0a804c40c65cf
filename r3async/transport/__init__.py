"""Trajectories from generators to the learner: at least once, trained once."""

from r3async.transport.intake import Ledger, Refuse, Store
from r3async.transport.receiver import Receiver
from r3async.transport.sender import Sender
from r3async.transport.sockets import TransportRefused
from r3async.transport.wire import WireError, decode_trajectory, encode_trajectory
from r3async.world.keys import TransportError

__all__ = [
    "Ledger",
    "Receiver",
    "Refuse",
    "Sender",
    "Store",
    "TransportError",
    "TransportRefused",
    "WireError",
    "decode_trajectory",
    "encode_trajectory",
]
