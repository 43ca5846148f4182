"""Weights & Biases, TensorBoard and MLflow, in addition to metrics.jsonl.

    metrics.jsonl ───────┐
    evaluations.jsonl ───┼─► follow ─► one process per sink ─► W&B, TensorBoard or MLflow
    samples.jsonl ───────┘

A sink follows the files of a run, in a separate process that imports nothing of the run. So the
files are its queue, and a sink that fails, hangs or is killed costs the run only a warning
(docs/decisions/0063). `python -m asyncrl.monitoring.sinks` sends missing records later.

    config.py      the settings
    follow.py      the records that a sink has not had yet
    sink.py        the interface of a sink
    kinds/         one file per sink
    process.py     the loop, and the names of all numbers of a record
"""
