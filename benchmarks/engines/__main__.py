"""`python -m benchmarks.engines`; processes that import this module again load nothing."""

if __name__ == "__main__":
    from benchmarks.engines.main import main

    raise SystemExit(main())
