"""Launchers: start, watch and end the processes of a run, and divide the machine among them.

Imports nothing: a reward worker's supervisor, which must start quickly, loads this package.
"""
