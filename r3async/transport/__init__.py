"""Transport of trajectories from generators to the learner: delivered at least
once, trained once."""

from r3async.data.wire import decode_trajectory, encode_trajectory
from r3async.data.wire_frames import WireError
from r3async.transport.intake import RejectionError, TrajectoryConsumer, TrajectoryStore
from r3async.transport.ledger import TrajectoryLedger
from r3async.transport.receiver import TrajectoryReceiver
from r3async.transport.sender import TrajectorySender
from r3async.transport.sockets import SenderRefusedError
from r3async.world.curve_keys import TransportError

__all__ = [
    "RejectionError",
    "SenderRefusedError",
    "TrajectoryConsumer",
    "TrajectoryLedger",
    "TrajectoryReceiver",
    "TrajectorySender",
    "TrajectoryStore",
    "TransportError",
    "WireError",
    "decode_trajectory",
    "encode_trajectory",
]
