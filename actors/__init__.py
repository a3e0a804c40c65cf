"""The actors of a run. They reach Ray through `r3async.world` alone."""
