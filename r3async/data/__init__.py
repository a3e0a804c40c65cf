"""Definitions of tokens, samples, trajectories and routes, and the containers that they travel in. Pure."""
