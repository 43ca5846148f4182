"""`python -m benchmarks.vocabulary`; processes that import this module again load nothing."""

if __name__ == "__main__":
    from benchmarks.vocabulary.main import main

    raise SystemExit(main())
