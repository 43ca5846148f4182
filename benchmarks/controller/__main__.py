"""`python -m benchmarks.controller`."""

from benchmarks.controller.main import main

if __name__ == "__main__":
    main()
