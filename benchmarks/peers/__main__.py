"""`python -m benchmarks.peers`; processes that import this module again load nothing."""

if __name__ == "__main__":
    from benchmarks.peers.main import main

    raise SystemExit(main())
