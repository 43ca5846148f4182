"""What a user sees of a run: step records, Prometheus metrics, time lines, live view, report."""

if __name__ == "monitoring":
    raise ImportError(
        "asyncrl's package monitoring is imported as asyncrl.monitoring", name="monitoring"
    )
