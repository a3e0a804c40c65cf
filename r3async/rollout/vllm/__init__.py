"""vLLM as the engine: the client beside the generator, the core process, and its worker."""
