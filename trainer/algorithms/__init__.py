"""Algorithms: one small file each, registered by name.

base          what an algorithm is: advantages, a loss, and the signals it reports
registry      names and where their classes lie; imports no torch
factory       the configured algorithm, with its penalty
grpo, reinforce
reference_kl  the KL penalty towards the initial model, for any algorithm

To add one, write a class with the members of `trainer.algorithms.base.Algorithm` and a
`from_config(config)`, and give it a name in `registry`. The signals that it declares reach
metrics.jsonl, Prometheus and the report without further changes.
"""
