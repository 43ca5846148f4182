"""`python -m benchmarks.exactness_loop`; processes that import this module again load nothing."""

if __name__ == "__main__":
    from benchmarks.exactness_loop.main import main

    raise SystemExit(main())
