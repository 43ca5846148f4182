"""`python -m benchmarks.controller`; processes that import this module again load nothing."""

if __name__ == "__main__":
    from benchmarks.controller.main import main

    raise SystemExit(main())
