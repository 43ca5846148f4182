"""`python -m monitoring.sinks`."""

import sys

from monitoring.sinks.process import main

sys.exit(main())
