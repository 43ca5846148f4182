"""`python -m benchmarks.exactness_loop`."""

import sys

from benchmarks.exactness_loop.main import main

if __name__ == "__main__":
    sys.exit(main())
