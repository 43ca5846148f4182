"""`python -m benchmarks.rewards_audit`."""

from __future__ import annotations

import sys

from benchmarks.rewards_audit.main import main

if __name__ == "__main__":
    sys.exit(main())
