"""`python -m benchmarks.paced`; processes that import this module again load nothing."""

if __name__ == "__main__":
    from benchmarks.paced.main import main

    raise SystemExit(main())
