"""`r3async doctor --gpu`: what can only be known on a GPU, in parts of a few minutes, the most telling first."""
