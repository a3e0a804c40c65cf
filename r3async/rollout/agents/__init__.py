"""Bring your own agent: an OpenAI-compatible endpoint that records what it serves as an episode."""
