"""Environments, which answer a policy between its turns, run in worker processes."""
