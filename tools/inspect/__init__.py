"""`r3async inspect`: look into a run, a spool, a checkpoint or a message."""
