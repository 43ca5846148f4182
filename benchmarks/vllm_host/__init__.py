"""What the generator costs vLLM: see `benchmarks.vllm_host.main`."""
