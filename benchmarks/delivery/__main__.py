"""`python -m benchmarks.delivery`."""

from benchmarks.delivery.main import main

if __name__ == "__main__":
    main()
