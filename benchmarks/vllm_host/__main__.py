"""`python -m benchmarks.vllm_host`; processes that import this module again load nothing."""

if __name__ == "__main__":
    from benchmarks.vllm_host.main import main

    raise SystemExit(main())
