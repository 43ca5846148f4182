"""`python -m benchmarks.engines`."""

import sys

from benchmarks.engines.main import main

if __name__ == "__main__":
    sys.exit(main())
