"""Rollouts that processes share: rings in shared memory, peers, snapshots."""
