"""The learner backend on transformers, with FSDP2."""
