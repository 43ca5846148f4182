"""The generator's side of vLLM: runs in the generator's process, talks to vLLM's core."""
