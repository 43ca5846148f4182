"""Checkpoints on disk: written whole or not at all, read by any number of ranks, and exported."""
