"""Measurements: each module compares side by side in one run and writes JSON."""
