"""Adapters for environments of other libraries, one small module each.

Each exports `adapt(rest, args) -> factory` (see `asyncrl.environments.registry`): `rest` is the
part of `environment.name` after the prefix. An adapter refuses an impossible configuration before a
sample begins, and its environments declare by `replay`, `snapshot` and `restore` how they go back,
if they can. Only an adapter imports its library.
"""
