"""`python -m benchmarks.exactness`."""

import sys

from benchmarks.exactness.main import main

if __name__ == "__main__":
    sys.exit(main())
