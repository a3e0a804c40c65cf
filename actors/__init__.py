"""The actors of a run, one module for each kind. Ray lives here, and in the launcher, and nowhere in r3async."""
