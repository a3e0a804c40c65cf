"""Make many runs from one plan file, and one report of them: `r3async sweep`."""
