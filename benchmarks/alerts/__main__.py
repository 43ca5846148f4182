"""`python -m benchmarks.alerts`; processes that import this module again load nothing."""

if __name__ == "__main__":
    from benchmarks.alerts.main import main

    raise SystemExit(main())
