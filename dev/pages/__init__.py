"""Generators of the docs pages and files that are made from code or data."""
