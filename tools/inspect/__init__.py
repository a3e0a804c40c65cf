"""Look into a run, a spool, a checkpoint or a message: `r3async inspect`."""
