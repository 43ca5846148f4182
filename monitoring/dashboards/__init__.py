"""The Grafana dashboard, made from the declarations in `asyncrl.monitoring.metrics.metrics`."""
