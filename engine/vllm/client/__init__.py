"""The generator's side: starts vLLM in a separate process and communicates with it."""
