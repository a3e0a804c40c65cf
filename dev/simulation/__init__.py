"""Deterministic simulation: every process of a run on one event loop, in virtual
time, from one seed."""
