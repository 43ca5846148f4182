"""Runs in the generator's process."""
