"""`python -m benchmarks.exactness`; processes that import this module again load nothing."""

if __name__ == "__main__":
    from benchmarks.exactness.main import main

    raise SystemExit(main())
