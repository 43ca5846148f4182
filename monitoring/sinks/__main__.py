"""`python -m asyncrl.monitoring.sinks`."""

import sys

from asyncrl.monitoring.sinks.process import main

sys.exit(main())
