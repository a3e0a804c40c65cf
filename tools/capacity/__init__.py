"""Predict how fast a cluster would train: `r3async plan PRESET --capacity`."""
