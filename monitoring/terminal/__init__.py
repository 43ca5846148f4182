"""A run in the terminal: the live view, the status, and how numbers are written."""
