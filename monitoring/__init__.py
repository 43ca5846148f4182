"""Everything a user sees of a run: records, Prometheus metrics, timelines, live view, report."""

if __name__ == "monitoring":
    raise ImportError(
        "asyncrl's package monitoring is imported as asyncrl.monitoring", name="monitoring"
    )
