"""`python -m benchmarks.rollout`."""

import sys

from benchmarks.rollout.main import main

if __name__ == "__main__":
    sys.exit(main())
