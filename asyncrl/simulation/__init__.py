"""Simulates a cluster: the scheduler of a live run (`world`) with simulated generators."""
