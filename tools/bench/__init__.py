"""Benchmarks of the project's own parts: `r3async bench NAME [--json]`."""
