"""What the project is developed with. Not in the wheel, and nothing in `r3async` imports it."""
