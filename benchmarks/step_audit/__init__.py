"""Recomputes the steps of real runs from what their folders say. See `__main__`."""
