"""Trajectories from generators to the learner: at least once, trained once."""
