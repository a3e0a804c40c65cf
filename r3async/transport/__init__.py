"""Transport of trajectories from generators to the learner: delivered at least
once, trained once."""

from r3async.data.wire import decode_trajectory, encode_trajectory
from r3async.data.wire_frames import WireError
from r3async.transport.ledger import TrajectoryLedger
from r3async.transport.null_socket import SenderRefusedError
from r3async.transport.receiver import ReceivedTrajectory, TrajectoryReceiver
from r3async.transport.sender import TrajectorySender
from r3async.transport.trajectory_store import TrajectoryStore
from r3async.world.curve_keys import TransportError

__all__ = [
    "ReceivedTrajectory",
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
