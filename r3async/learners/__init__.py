"""Learner backends."""
