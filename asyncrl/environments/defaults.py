"""How `environment:` and the other sections of a configuration go together."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from asyncrl.cache.config import CacheConfig
from asyncrl.environments.config import EnvironmentConfig
from asyncrl.rewards.config import RewardConfig


def with_default_functions(values: Any) -> Any:
    """The values of a configuration: an environment's reward is the only one unless others are set.

    Args:
        values: as they are read, before they are checked.
    """
    if not isinstance(values, Mapping):
        return values
    environment, rewards = values.get("environment"), values.get("rewards")
    named = environment.get("name") if isinstance(environment, Mapping) else None
    if isinstance(environment, EnvironmentConfig):
        named = environment.name
    if named is None or not (rewards is None or isinstance(rewards, Mapping)):
        return values
    if rewards is not None and "functions" in rewards:
        return values
    return {**values, "rewards": {**(rewards or {}), "functions": []}}


def refuse_contradictions(
    environment: EnvironmentConfig, rewards: RewardConfig, cache: CacheConfig
) -> None:
    """Refuse sections that do not go together. Raises ValueError."""
    if environment.name is None and not rewards.functions:
        raise ValueError(
            "rewards.functions: [] leaves nothing to reward; name a function, or an environment "
            "(environment.name)"
        )
    if environment.name is not None and cache.reuse == "lenient":
        raise ValueError(
            "cache.reuse: lenient does not work with environment.name: what an environment "
            "answered in an earlier epoch is not its answer now. Use cache.reuse: drafts"
        )
    if (environment.name or "").startswith("python_tools:") and not rewards.functions:
        raise ValueError(
            "environment.name: python_tools gives no reward of its own, and rewards.functions is "
            "empty: every reward would be 0; name a function, as in rewards: {functions: [{name: "
            "exact_match}]}"
        )
    if environment.name is not None and not rewards.functions and not environment.reward_weight:
        raise ValueError(
            "environment.reward_weight: 0 leaves nothing to reward, since rewards.functions is "
            "empty: every reward would be 0; name a function, or leave reward_weight out"
        )
