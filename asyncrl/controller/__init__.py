"""The controller's process: one run, from its configuration to its result.

It conducts: which sample is generated where, what a step trains on, what restarts. The processes
that it starts are in `fleet`, the commands of users in `steering`.
"""
