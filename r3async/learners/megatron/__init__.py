"""The megatron-core learner."""
