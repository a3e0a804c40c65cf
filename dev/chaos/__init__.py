"""Fault injection into a real run, and the accounting of what it trained: `python -m dev chaos`.
Processes are killed; messages are delayed and damaged."""
