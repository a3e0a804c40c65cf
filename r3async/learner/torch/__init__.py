"""Learner on transformers, with FSDP2."""
