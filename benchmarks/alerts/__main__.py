"""`python -m benchmarks.alerts`."""

from __future__ import annotations

import sys

from benchmarks.alerts.main import main

if __name__ == "__main__":
    sys.exit(main())
