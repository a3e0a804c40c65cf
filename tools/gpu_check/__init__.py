"""Checks that only a GPU can answer, in parts of a few minutes, the most informative first:
`r3async doctor --gpu`."""
