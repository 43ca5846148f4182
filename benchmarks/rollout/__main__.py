"""`python -m benchmarks.rollout`; processes that import this module again load nothing."""

if __name__ == "__main__":
    from benchmarks.rollout.main import main

    raise SystemExit(main())
