"""`python -m benchmarks.live_audit`; processes that import this module again load nothing."""

if __name__ == "__main__":
    from benchmarks.live_audit.main import main

    raise SystemExit(main())
