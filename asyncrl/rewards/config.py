"""Configuration of the rewards (`rewards:`)."""

from typing import Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from asyncrl.plain_values import Arguments
from asyncrl.rewards.code import TOTAL_SECONDS as CODE_SECONDS
from asyncrl.wire.transport.paths import WEEK_SECONDS, FunctionName


class RewardFunctionConfig(BaseModel):
    """One term of the reward: a function, its weight and its arguments."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    name: FunctionName = Field(default="arithmetic", min_length=1)
    """`exact_match`, `math_verify`, `format`, `arithmetic`, `code`, `reward_model`, `judge`
    (docs/rewards.md), or your own function, given as `my.module:function` or
    `path/to/file.py:function`."""
    weight: float = Field(default=1.0, ge=-1e6, le=1e6)
    """Factor of this term in the sum."""
    args: Arguments = {}
    """Keyword arguments for the function, in addition to prompt, response and example."""


class RewardConfig(BaseModel):
    """The scoring of responses: a weighted sum of functions, in worker processes."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    functions: tuple[RewardFunctionConfig, ...] = (RewardFunctionConfig(),)
    """The terms; the reward is the sum of weight times value. May be empty with an environment
    (`environment.name`), which is the default there."""
    timeout_seconds: float = Field(default=10.0, gt=0, le=WEEK_SECONDS)
    """Longest time for scoring one response, all terms together. After it, the process is killed
    with all that it has started; an async function is cancelled first."""
    startup_seconds: float = Field(default=60.0, gt=0, le=WEEK_SECONDS)
    """Longest time for a worker process to import the functions."""
    workers: int = Field(default=1, ge=1, le=256)
    """Worker processes. Each scores one response at a time; with async functions, `concurrency`."""
    concurrency: int = Field(default=16, ge=1, le=1024)
    """Maximum number of concurrent calls of async functions in one worker process."""
    max_attempts: int = Field(default=3, ge=1, le=10)
    """Maximum number of processes that score a response, if they die. A function that raises or
    hangs is not called again."""
    max_processes: int = Field(default=256, ge=1, le=32768)
    """Maximum number of processes of one worker, including those that its functions start; threads
    are not counted. A worker with more is killed."""
    on_error: Literal["stop", "zero"] = "stop"
    """Handling of a function that raises, hangs, does not return a finite number or loses its
    process `max_attempts` times. `stop`: the run ends with its error. `zero`: the response gets the
    reward 0; failures are counted by function and reason, and the first ones logged."""

    @model_validator(mode="after")
    def _code_ends_in_time(self) -> Self:
        for function in self.functions:
            total = function.args.get("total_seconds", CODE_SECONDS)
            late = isinstance(total, int | float) and total >= self.timeout_seconds
            if late and function.name == "code":
                raise ValueError(
                    f"rewards.timeout_seconds ({self.timeout_seconds:g}) must be above the time "
                    f"limit of the reward `code`, args.total_seconds ({total:g}): a slow program "
                    "fails its tests, but a slow reward fails the run"
                )
        return self

    @property
    def labels(self) -> tuple[str, ...]:
        """A short and unique name for each function, for metrics: `score` for `my.py:score`."""
        short = [function.name.rpartition(":")[2] for function in self.functions]
        names: list[str] = []
        for function, name in zip(self.functions, short, strict=True):
            full = name if short.count(name) == 1 else function.name
            again = sum(taken == full or taken.startswith(f"{full}#") for taken in names)
            names.append(f"{full}#{again + 1}" if again else full)
        return tuple(names)
