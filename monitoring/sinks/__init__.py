"""Weights & Biases, TensorBoard and MLflow, in addition to metrics.jsonl.

    metrics.jsonl, evaluations.jsonl, samples.jsonl ─► follow ─► one process per sink

A sink follows the files of a run, in a separate process that imports nothing of the run. So the
files are its queue, and a sink that fails, hangs or is killed costs the run only a warning
(docs/decisions/0063). `python -m asyncrl.monitoring.sinks` sends missing records later.
"""
