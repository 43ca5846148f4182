"""`python -m benchmarks.hostile`."""

import sys

from benchmarks.hostile.main import main

if __name__ == "__main__":
    sys.exit(main())
