"""Publish, deliver and verify weights."""
