"""Held-out accuracy: during a run on its generators, and with `asyncrl eval`."""
