"""`r3async sweep`: many runs from one plan file, and one report of them."""
