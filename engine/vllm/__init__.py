"""vLLM as a generator. Importing this package does not import vLLM: it loads with the engine."""
