"""Caches of rollouts with other rules of search than a run's."""

from __future__ import annotations

from dataclasses import fields

from asyncrl.cache.config import CacheConfig, TreeRules
from asyncrl.cache.tree.rollout_tree import RolloutCache

_RULES = {one.name for one in fields(TreeRules)}


def cache_of(**settings: object) -> RolloutCache:
    """A cache with these settings of `CacheConfig` and of `TreeRules`."""
    rules = {key: settings.pop(key) for key in _RULES & settings.keys()}
    return RolloutCache(CacheConfig(**settings), TreeRules(**rules))  # type: ignore[arg-type]
