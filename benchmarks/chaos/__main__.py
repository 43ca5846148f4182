"""`python -m benchmarks.chaos`."""

import sys

from benchmarks.chaos.main import main

if __name__ == "__main__":
    sys.exit(main())
