"""Algorithms: one small file each, registered by name.

base          what an algorithm is: advantages, a loss, and the signals it reports
losses        score function and clipped ratio, which several share
reference_kl  the KL penalty towards a reference model, for any algorithm
grpo (dapo, dr_grpo), reinforce (rloo), reinforce_plus_plus, gspo, cispo, gpg, ppo

docs/algorithms.md has a table of their equations. To add one, write a class with the members of
`asyncrl.trainer.algorithms.base.Algorithm` and a `from_config(config)`; name it in
`asyncrl.trainer.base.algorithm_registry`, or name its file: `trainer.algorithm:
my_algorithm.py:Mine`.
"""
