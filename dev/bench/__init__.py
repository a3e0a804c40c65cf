"""Benchmarks of the project's own parts: `python -m dev bench NAME [--json]`."""
