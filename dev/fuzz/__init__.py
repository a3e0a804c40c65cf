"""Fuzzing of the readers of messages, spool files and checkpoints. None may crash, hang, grow or
mistake its input.

    python -m dev fuzz --messages 1000000 --files 100000 --checkpoints 100000 --seed 0

runs everything without a socket, in one process. Each mutated message is refused with a reason, or
taken as exactly what was sent, or is just a valid control message. Each spool file returns only
trajectories that were written, and the rest is reported. Each checkpoint is read as it was written,
or is refused with a reason and the one before it is read.
"""
