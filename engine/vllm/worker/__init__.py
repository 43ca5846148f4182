"""The side of vLLM's core: everything here runs inside the engine-core process."""
