"""The code that runs in vLLM's engine-core process: drawing, scoring, drafting, new weights."""
