"""Simulation: the whole system under one seed, and what a cluster would do."""
