"""Held-out accuracy: one round of a run, and the `asyncrl eval` command."""
