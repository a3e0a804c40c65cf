"""Mutated messages, spool files and checkpoints into what reads them: nothing may crash, hang, grow or be mistaken.

    python -m dev fuzz --messages 1000000 --files 100000 --checkpoints 100000 --seed 0

runs all of it without a socket, in one process. Each message is answered with a reason, taken as exactly what was sent, or is
no more than a valid control message; each spool file gives back only trajectories that were written, and reports the rest;
each checkpoint is refused with a reason, and the one before it read, or is read as it was written.
"""
