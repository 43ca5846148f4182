"""A run's files of records: metrics.jsonl, samples, spans and timelines."""
