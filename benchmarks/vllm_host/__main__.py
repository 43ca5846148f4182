"""`python -m benchmarks.vllm_host`."""

from benchmarks.vllm_host.main import main

if __name__ == "__main__":
    main()
