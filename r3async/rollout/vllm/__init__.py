"""The vLLM rollout engine: the client in the generator's process, the engine core's process,
and its workers."""
