"""Faults that only a GPU shows, to see that the tests on the emulated device do."""

from __future__ import annotations


def plant_fault(name: str) -> None:
    """Plant a fault into this process."""
    raise ValueError(name)
