"""Checkpoints on disk: written atomically, read by any number of ranks, and exported."""
