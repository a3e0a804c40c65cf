"""Learner on megatron-core."""
