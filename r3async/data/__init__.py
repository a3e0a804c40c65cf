"""Definitions of tokens, samples, trajectories and routes, and the containers that they travel in.
Pure, but for containers and model directories, whose files are an argument."""
