"""Samples to token-budget micro-batches."""
