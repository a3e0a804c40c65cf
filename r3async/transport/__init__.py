"""Trajectories from generators to the learner: at least once, trained once."""

from r3async.transport.intake import RejectionError, TrajectoryLedger, TrajectoryStore
from r3async.transport.receiver import TrajectoryReceiver
from r3async.transport.sender import TrajectorySender
from r3async.transport.sockets import SenderRefusedError
from r3async.transport.wire import WireError, decode_trajectory, encode_trajectory
from r3async.world.keys import TransportError

__all__ = [
    "RejectionError",
    "SenderRefusedError",
    "TrajectoryLedger",
    "TrajectoryReceiver",
    "TrajectorySender",
    "TrajectoryStore",
    "TransportError",
    "WireError",
    "decode_trajectory",
    "encode_trajectory",
]
