"""Configuration of the environment (`environment:`), and its rules with other sections."""

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import PurePath
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from asyncrl.cache.config import CacheConfig
from asyncrl.engine.config import SamplingConfig
from asyncrl.environments.agents.openai_messages import POLICY, PolicySettings
from asyncrl.environments.tool_formats import ToolFormat
from asyncrl.plain_values import Arguments
from asyncrl.rewards.config import RewardConfig
from asyncrl.wire.transport.paths import MAX_TOKENS, WEEK_SECONDS, FunctionName, LocalPath


class EnvironmentConfig(BaseModel):
    """The environment that answers the policy; without a name, a sample is one turn."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    name: FunctionName | None = Field(default=None, min_length=1)
    """`calculator`, `guessing`, `code_repair`, your own class, given as `my.module:Class` or
    `path/to/file.py:Class`, or an adapter's prefix with its argument. null: no environment. With
    one, `rewards.functions` is empty unless it is given."""
    args: Arguments = {}
    """Keyword arguments of each environment."""
    python: LocalPath | None = Field(default=None, min_length=1)
    """Python interpreter of the workers, for packages that conflict with asyncrl's, such as
    `.venv-verifiers/bin/python`. It needs Python 3.11 or newer and msgspec; asyncrl itself is taken
    from this installation. A relative path starts at the current directory. null: this interpreter.
    """
    reward_weight: float = Field(default=1.0, ge=-1e6, le=1e6)
    """Weight of the sum of the step rewards in a sample's reward, next to `rewards.functions`."""
    max_turns: int = Field(default=16, ge=1, le=10_000)
    """Maximum number of policy turns in a sample. After the last one the sample is truncated
    (finish reason `length`)."""
    max_turn_tokens: int | None = Field(default=None, ge=1, le=MAX_TOKENS)
    """Maximum number of generated tokens in a turn, at most `sampling.max_tokens`. The environment
    answers a turn that reaches it as it is, and the sample continues. null: no such limit."""
    max_observation_tokens: int = Field(default=4096, ge=1, le=MAX_TOKENS)
    """Longest observation in tokens, including the text that the chat template puts around it. A
    longer one is a failure of the environment. A new conversation is bounded by
    `sampling.max_tokens` instead."""
    tool_format: ToolFormat = "auto"
    """Form of the model's tool calls: `hermes` (Qwen, Hermes), `llama` (Llama 3.1), `mistral`, or
    `json`, an object with `name` and `arguments`. `auto`: as its chat template says."""
    history: Literal["keep", "template"] = "keep"
    """Handling of chat templates that change earlier turns (Qwen3 removes their reasoning). `keep`:
    keep the generated tokens, and log it. `template`: continue in a new context with the template's
    version, which costs a prefill where it differs."""
    workers: int = Field(default=1, ge=1, le=256)
    """Worker processes per generator. Each runs many environments at once: those with async
    methods in one event loop, others in a thread each."""
    sessions: int = Field(default=64, ge=1, le=4096)
    """Maximum number of open environments in a worker; other samples wait. Environments of finished
    samples that can only go back by `restore` are not counted."""
    reset_timeout_seconds: float = Field(default=60.0, gt=0, le=WEEK_SECONDS)
    """Time limit for making an environment and its `reset`."""
    step_timeout_seconds: float = Field(default=30.0, gt=0, le=WEEK_SECONDS)
    """Time limit for `step`, `snapshot` or `restore`; `rewards.on_error` applies to a failure."""

    @property
    def total_sessions(self) -> int:
        """Maximum number of open environments of a generator; 0 without environments."""
        return 0 if self.name is None else self.workers * self.sessions


def with_default_functions(values: Any) -> Any:
    """Drop the default reward functions from unvalidated values if an environment is named."""
    if not isinstance(values, Mapping):
        return values
    environment, rewards = values.get("environment"), values.get("rewards")
    named = environment.get("name") if isinstance(environment, Mapping) else None
    if isinstance(environment, EnvironmentConfig):
        named = environment.name
    given = {} if rewards is None else rewards
    if named is None or not isinstance(given, Mapping) or "functions" in given:
        return values
    return {**values, "rewards": {**given, "functions": []}}


def refuse_contradictions(
    environment: EnvironmentConfig,
    rewards: RewardConfig,
    cache: CacheConfig,
    sampling: SamplingConfig,
) -> None:
    """Refuse contradictory sections. Raises ValueError."""
    limit = environment.max_turn_tokens
    if limit is not None and limit > sampling.max_tokens:
        raise ValueError(
            f"environment.max_turn_tokens ({limit}) has no effect: all turns of a sample together "
            f"have at most sampling.max_tokens ({sampling.max_tokens}) tokens"
        )
    if environment.name is None and not rewards.functions:
        raise ValueError(
            "rewards.functions: [] without environment.name leaves no reward; name one of them"
        )
    if environment.name is not None and cache.reuse == "lenient":
        raise ValueError(
            "cache.reuse: lenient does not work with environment.name, as answers of an earlier "
            "epoch may differ from those of now. Use cache.reuse: drafts"
        )
    if (environment.name or "").startswith("python_tools:") and not rewards.functions:
        raise ValueError(
            "environment.name: python_tools does not give a reward, and rewards.functions is "
            "empty; name a function, as in rewards: {functions: [{name: exact_match}]}"
        )
    if environment.name is not None and not rewards.functions and not environment.reward_weight:
        raise ValueError(
            "environment.reward_weight: 0 with empty rewards.functions makes every reward 0; name "
            "a function, or remove reward_weight"
        )


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
        max_tokens=environment.max_turn_tokens or sampling.max_tokens,
    )
    args = environment.args | {POLICY: dataclasses.asdict(policy)}
    return environment.model_copy(update={"args": args})
