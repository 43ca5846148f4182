"""`python -m benchmarks.pipeline`; processes that import this module again load nothing."""

if __name__ == "__main__":
    from benchmarks.pipeline.main import main

    raise SystemExit(main())
