"""`python -m benchmarks.hostile`; processes that import this module again load nothing."""

if __name__ == "__main__":
    from benchmarks.hostile.main import main

    raise SystemExit(main())
