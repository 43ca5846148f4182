"""`python -m benchmarks.chaos`; processes that import this module again load nothing."""

if __name__ == "__main__":
    from benchmarks.chaos.main import main

    raise SystemExit(main())
