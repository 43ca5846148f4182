"""Algorithms: one small file each, registered by name.

base          what an algorithm is: advantages, a loss, and the signals it reports
registry      names, where their classes lie, and their defaults; imports no torch
factory       the configured algorithm, with its correction and its penalty
losses        score function and clipped ratio, which several share
overlong      shaping of rewards by length, for any algorithm
reference_kl  the KL penalty towards a reference model, for any algorithm
grpo, dr_grpo, dapo, reinforce, rloo, reinforce_plus_plus, gspo, cispo, gpg

docs/algorithms.md has a table of their equations. To add one, write a class with the members of
`asyncrl.trainer.algorithms.base.Algorithm` and a `from_config(config)`, and give it a name in
`registry`, or name it by its file: `trainer.algorithm: my_algorithm.py:Mine`. The signals that it
declares reach metrics.jsonl, Prometheus and the report without further changes.
"""
