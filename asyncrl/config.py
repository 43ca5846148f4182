"""The whole configuration of a run, composed of each package's own `Config`.

It is read from one YAML file and dotted overrides (`--set engine.kind=vllm`). Unknown keys and
impossible combinations are refused with the path of the key and what would be right. A field's
docstring is its documentation for users: see `asyncrl.config_reference`.
"""

from __future__ import annotations

import typing
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Literal, Self

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from pydantic_core import ErrorDetails

from asyncrl.errors import ConfigError
from asyncrl.rewards.config import RewardConfig
from asyncrl.suggestions import nearest
from asyncrl.tasks.config import ModelConfig, TaskConfig
from cache.config import CacheConfig
from engine.config import EngineConfig, SamplingConfig
from monitoring.config import MonitoringConfig
from scheduler.config import SchedulerConfig
from trainer.config import TrainerConfig


class RunSection(BaseModel):
    """Name, length, seed and folder of the run."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    name: str = Field(default="run", pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")
    """Name of the run and of its folder: letters, digits, dot, dash, underscore."""
    steps: int = Field(default=100, ge=1)
    """Optimizer steps."""
    seed: int = 0
    """Seed of the data order, the sampling and the trainer."""
    directory: str = "runs"
    """Folder in which the run's own folder is created."""


class EvaluationConfig(BaseModel):
    """Evaluation on held-out prompts before and after training, sampled as in training."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    prompts: int = Field(default=256, ge=1)
    """Number of held-out prompts, taken from the start of the evaluation set."""
    samples: int = Field(default=1, ge=1)
    """Samples per prompt."""
    threshold: float = 0.5
    """A sample counts as correct if its reward is above this."""
    timeout_seconds: float = Field(default=600.0, gt=0)
    """Longest wait for one evaluation."""


class LauncherConfig(BaseModel):
    """How the processes of a run are started and supervised."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    kind: Literal["local"] = "local"
    """`local`: child processes on this machine."""
    generators: int = Field(default=1, ge=1)
    """Number of generator processes."""
    threads: int | None = Field(default=None, ge=1)
    """Threads of each process for tensor operations; null: the machine's cores are divided."""
    pin_cores: bool = False
    """Pin each generator and the trainer to `threads` cores of its own. The controller and the
    reward workers use a core that is left over or else the trainer's, never a generator's."""
    startup_seconds: float = Field(default=300.0, gt=0)
    """Longest wait for a process to become ready."""
    silence_seconds: float = Field(default=120.0, gt=0)
    """A process that reports nothing for this long is killed and counts as dead."""
    stop_seconds: float = Field(default=60.0, gt=0)
    """Longest wait for a process to end after it was asked to. Then it is killed."""
    checkpoint_seconds: float = Field(default=600.0, gt=0)
    """Additional time for the trainer to end, because it saves a checkpoint."""
    max_restarts: int = Field(default=3, ge=0)
    """Most restarts of dead generators, counted over all generators together."""


class RunConfig(BaseModel):
    """The configuration of a run: one field per section."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    run: RunSection = RunSection()
    task: TaskConfig = TaskConfig()
    model: ModelConfig = ModelConfig()
    rewards: RewardConfig = RewardConfig()
    sampling: SamplingConfig = SamplingConfig()
    engine: EngineConfig = EngineConfig()
    cache: CacheConfig = CacheConfig()
    scheduler: SchedulerConfig = SchedulerConfig()
    trainer: TrainerConfig = TrainerConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    launcher: LauncherConfig = LauncherConfig()
    monitoring: MonitoringConfig = MonitoringConfig()

    @model_validator(mode="after")
    def _lengths_fit(self) -> Self:
        if self.sampling.max_tokens >= self.engine.max_model_len:
            raise ValueError(
                f"sampling.max_tokens ({self.sampling.max_tokens}) leaves no room for a prompt in "
                f"engine.max_model_len ({self.engine.max_model_len}); raise engine.max_model_len"
            )
        return self

    @model_validator(mode="after")
    def _verification_has_stored_probabilities(self) -> Self:
        if self.scheduler.on_update == "verify" and self.engine.top_k_logprobs == 0:
            raise ValueError(
                "engine.top_k_logprobs: 0 does not work with scheduler.on_update: verify, which "
                "accepts tokens by the stored top K of the distributions that they were drawn "
                "from; it must be at least 1 (8 is usual)"
            )
        return self

    @property
    def directory(self) -> Path:
        """The run's folder."""
        return Path(self.run.directory) / self.run.name


def load_config(path: Path | None, overrides: Sequence[str] = ()) -> RunConfig:
    """Read a YAML file, apply `key.path=value` overrides and validate the result.

    Without a file the overrides apply to the defaults.

    Raises:
        ConfigError: the file is missing or not a mapping, a key is unknown, or a value is
            impossible.
    """
    values = {} if path is None else _read(path)
    for override in overrides:
        _apply(values, override)
    return parse_config(values, source="the defaults" if path is None else str(path))


def _read(path: Path) -> dict[str, Any]:
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError as error:
        near = nearest(path.name, [p.name for p in path.parent.glob("*.yaml")])
        raise ConfigError(f"no configuration file at {path}.{near}") from error
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read the configuration {path}: {error}") from error
    try:
        values = yaml.safe_load(text) or {}
    except yaml.YAMLError as error:
        raise ConfigError(f"{path} is not valid YAML: {error}") from error
    if not isinstance(values, dict):
        raise ConfigError(f"{path} must be a mapping of sections (run:, engine:, ...) to settings")
    return values


def parse_config(values: dict[str, Any], *, source: str) -> RunConfig:
    """Validate plain values. Errors (ConfigError) refer to them as `source`."""
    try:
        return RunConfig.model_validate(values)
    except ValidationError as error:
        lines = "\n".join(f"  {_explain(detail)}" for detail in error.errors())
        raise ConfigError(f"{source} does not describe a run:\n{lines}") from error


def dump_config(config: RunConfig) -> str:
    """The whole configuration as YAML, defaults included; `load_config` reads it back."""
    return yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False)


def _apply(values: dict[str, Any], override: str) -> None:
    key, separator, text = override.partition("=")
    if not separator or not key.strip():
        raise ConfigError(f"--set {override!r}: write it as key.path=value")
    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ConfigError(f"--set {override!r}: the value is not valid YAML: {error}") from error
    *sections, last = key.strip().split(".")
    place = values
    for section in sections:
        inner = place.setdefault(section, {})
        if inner is None:
            inner = place[section] = {}
        if not isinstance(inner, dict):
            raise ConfigError(f"--set {override!r}: {section} is a value, not a section")
        place = inner
    place[last] = value


def _explain(detail: ErrorDetails) -> str:
    location = detail["loc"]
    path = ".".join(str(part) for part in location) or "the configuration"
    if detail["type"] == "extra_forbidden":
        names = _field_names(RunConfig, location[:-1])
        return f"{path}: there is no such key.{nearest(str(location[-1]), names)}"
    message = detail["msg"].removeprefix("Value error, ")
    given = detail["input"]
    shown = "" if isinstance(given, dict | BaseModel) else f" (given: {given!r})"
    return f"{path}: {message}{shown}"


def _field_names(model: type[BaseModel], location: Iterable[int | str]) -> list[str]:
    current: Any = model
    for part in location:
        if isinstance(part, int):
            continue
        field = current.model_fields.get(part)
        if field is None:
            return []
        current = _model_in(field.annotation)
        if current is None:
            return []
    return list(current.model_fields)


def _model_in(annotation: Any) -> type[BaseModel] | None:
    """The pydantic model inside `X`, `X | None` or `list[X]`."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    for inner in typing.get_args(annotation):
        found = _model_in(inner)
        if found is not None:
            return found
    return None
