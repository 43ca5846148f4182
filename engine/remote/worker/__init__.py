"""Runs in the process where the model runs."""
