"""The side of vLLM's engine-core process: drawing, scoring, drafting and loading weights there."""
