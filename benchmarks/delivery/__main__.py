"""`python -m benchmarks.delivery`; processes that import this module again load nothing."""

if __name__ == "__main__":
    from benchmarks.delivery.main import main

    raise SystemExit(main())
