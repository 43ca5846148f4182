"""`python -m benchmarks.cache`."""

from benchmarks.cache.main import main

if __name__ == "__main__":
    main()
