"""Prometheus metrics of every process, and how they are found and scraped."""
