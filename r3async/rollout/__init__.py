"""The multi-turn loop, token-in/token-out."""
