"""What the worker extensions and their clocks are called. Imports no vLLM."""

OURS = "benchmarks.vllm_host.timed_worker.TimedExtension"
PLAIN = "benchmarks.vllm_host.timed_worker.PlainExtension"
"""What `worker_extension_cls` names."""

SAMPLER, DRAW = "sampler", "draw"
"""The draw is arithmetic on logits, which a GPU does; the sampler is what is around it."""
