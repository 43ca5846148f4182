"""`python -m benchmarks.paced`."""

import sys

from benchmarks.paced.main import main

if __name__ == "__main__":
    sys.exit(main())
