"""`python -m benchmarks.live_audit`."""

import sys

from benchmarks.live_audit.main import main

if __name__ == "__main__":
    sys.exit(main())
