"""Passes the run's sampling settings to the worker processes of agents and of verifiers."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import PurePath

from asyncrl.engine.config import SamplingConfig
from asyncrl.environments.agents.openai_messages import POLICY, PolicySettings
from asyncrl.environments.config import EnvironmentConfig


def with_policy(
    environment: EnvironmentConfig, sampling: SamplingConfig, model: str, stop_tokens: Sequence[int]
) -> EnvironmentConfig:
    """Return the environment with the policy's settings among its arguments, if it compares them.

    The last part of `model`, a path or id, becomes the model's name for clients; `stop_tokens` are
    ids that end a turn.
    """
    if not (environment.name or "").startswith(("agent:", "verifiers:")):
        return environment
    policy = PolicySettings(
        model=PurePath(model).name,
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        min_p=sampling.min_p,
        stop=tuple(sampling.stop),
        stop_tokens=tuple(stop_tokens),
        max_tokens=sampling.max_tokens,
    )
    args = environment.args | {POLICY: dataclasses.asdict(policy)}
    return environment.model_copy(update={"args": args})
