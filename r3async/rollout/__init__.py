"""The multi-turn rollout loop, token-in/token-out."""
