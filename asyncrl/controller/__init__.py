"""The controller's process: one run, from its configuration to its result.

It decides which sample is generated where, what a step trains on, and what restarts.
"""
