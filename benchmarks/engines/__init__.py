"""The three engines side by side, in one table."""
