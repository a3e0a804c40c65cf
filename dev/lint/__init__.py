"""Lint rules that are specific to this repository."""
