"""Ray lives here, and in the launcher, and nowhere in r3async."""
