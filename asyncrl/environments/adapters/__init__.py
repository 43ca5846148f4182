"""Environments of other libraries, as they are: each adapter is one small module.

python_tools   functions with type hints, as tools of the model
gymnasium      environments of Gymnasium with text or discrete actions
trl            classes for TRL's `environment_factory`
openenv        clients of OpenEnv servers
verifiers      environments of the library `verifiers`

Each exports `adapt(rest, args) -> factory` (`asyncrl.environments.registry`): `rest` is what
follows the prefix in `environment.name`. It refuses what cannot work before a sample begins, and
its environments say in `replay`, `snapshot` and `restore` how they go back, or that they cannot.
Import-light: a library is imported by its adapter only.
"""
