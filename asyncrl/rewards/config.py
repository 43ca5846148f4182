"""Configuration of the rewards (`rewards:`)."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from asyncrl.paths import LocalPath
from wire.limits import WEEK_SECONDS


class RewardFunctionConfig(BaseModel):
    """One term of the reward: a function, its weight and its arguments."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    name: LocalPath = Field(default="arithmetic", min_length=1)
    """`exact_match`, `math_verify`, `format`, `arithmetic`, or a function of your own, given as
    `my.module:function` or `path/to/file.py:function`."""
    weight: float = Field(default=1.0, ge=-1e6, le=1e6)
    """Factor of this term in the sum."""
    args: dict[str, Any] = {}
    """Keyword arguments for the function, in addition to prompt, response and example."""


class RewardConfig(BaseModel):
    """How responses are scored: a weighted sum of functions, in worker processes."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    functions: tuple[RewardFunctionConfig, ...] = Field(
        default=(RewardFunctionConfig(),), min_length=1
    )
    """The terms; the reward is the sum of weight times value."""
    timeout_seconds: float = Field(default=10.0, gt=0, le=WEEK_SECONDS)
    """Longest time for scoring one response, all terms together. Then the process is killed."""
    startup_seconds: float = Field(default=60.0, gt=0, le=WEEK_SECONDS)
    """Longest time for a worker process to import the functions."""
    workers: int = Field(default=1, ge=1, le=256)
    """Worker processes. Each scores one response at a time."""
    on_error: Literal["stop", "zero"] = "stop"
    """What happens when a function raises, hangs or returns no number. `stop`: the run ends with
    its error. `zero`: the response gets the reward 0; the failure is logged and counted."""
