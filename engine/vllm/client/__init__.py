"""The generator's side: starts vLLM in a process of its own and talks to it."""
