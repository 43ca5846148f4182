"""`python -m benchmarks.cache`; processes that import this module again load nothing."""

if __name__ == "__main__":
    from benchmarks.cache.main import main

    raise SystemExit(main())
