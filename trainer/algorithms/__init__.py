"""Algorithms: one small file each, registered by name.

docs/algorithms.md has a table of their equations. To add one, write a class with the members of
`asyncrl.trainer.algorithms.base.Algorithm` and a `from_config(config)`; name it in
`asyncrl.trainer.base.algorithm_registry`, or name its file in `trainer.algorithm`.
"""
