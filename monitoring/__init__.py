"""What a user sees of a run: step records, Prometheus metrics, time lines, live view, report."""
