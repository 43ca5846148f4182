"""Environments: what answers a policy between its turns, in worker processes."""
