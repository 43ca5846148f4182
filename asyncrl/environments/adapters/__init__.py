"""Adapters for environments of other libraries, one small module each.

python_tools   functions with type hints, as tools of the model
gymnasium      environments of Gymnasium with text or discrete actions
trl            classes for TRL's `environment_factory`
openenv        clients of OpenEnv servers
verifiers      environments of the library `verifiers`

Each exports `adapt(rest, args) -> factory` (see `asyncrl.environments.registry`): `rest` is the
part of `environment.name` after the prefix. An adapter refuses an impossible configuration before a
sample begins, and its environments declare by `replay`, `snapshot` and `restore` how they go back,
if they can. Only an adapter imports its library.
"""
