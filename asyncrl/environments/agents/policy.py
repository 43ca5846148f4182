"""Tells the worker processes of agents and of verifiers how the run draws tokens."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import PurePath

from asyncrl.engine.config import SamplingConfig
from asyncrl.environments.agents.openai_messages import POLICY, PolicySettings
from asyncrl.environments.config import EnvironmentConfig


def with_policy(
    environment: EnvironmentConfig,
    sampling: SamplingConfig,
    model: str,
    stop_tokens: Sequence[int],
) -> EnvironmentConfig:
    """The environment with the policy's settings among its arguments, if it compares them.

    Args:
        environment: of the run.
        sampling: of the run.
        model: its path or id; the last part of it is the model's name for clients.
        stop_tokens: ids that end a turn.
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
