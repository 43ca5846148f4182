"""What the terminal shows of a run: the live view, the status, and how numbers are written."""
