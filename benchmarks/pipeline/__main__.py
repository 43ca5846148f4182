"""`python -m benchmarks.pipeline`."""

import sys

from benchmarks.pipeline.main import main

if __name__ == "__main__":
    sys.exit(main())
