"""Weights & Biases, TensorBoard and MLflow, in addition to metrics.jsonl.

    metrics.jsonl ───────┐
    evaluations.jsonl ───┼─► follow ─► one process per sink ─► W&B, TensorBoard or MLflow
    samples.jsonl ───────┘

A sink follows the files of a run, in a process of its own that imports nothing of the run. So it
has the names and steps of metrics.jsonl, the files are its queue, and a sink that fails, hangs or
is killed costs the run nothing but a warning (docs/decisions/0063). `python -m
asyncrl.monitoring.sinks` sends what is missing later.

    config.py      the settings
    numbers.py     the names of all numbers of a record   (pure)
    follow.py      the records that a sink has not had yet
    sink.py        what a sink must do
    kinds/         one file per sink
    process.py     the loop
"""
