"""What a user sees of a run: metrics, time lines, the live view and the report."""
