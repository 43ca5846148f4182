"""The date for chat templates, which stays the same for the whole run."""

import contextlib
from datetime import date
from typing import Any

from asyncrl.config.run_config import RunConfig, load_config
from asyncrl.tasks.templates.variables import today

_KEY = "chat_template_date"


def with_date(config: RunConfig) -> RunConfig:
    """Return the configuration with today as the date for chat templates, if it is not set."""
    if config.task.chat_template_date is not None:
        return config
    return _on(config, today())


def with_recorded_date(config: RunConfig) -> RunConfig:
    """Return the configuration with the date of the resumed run's start. Raises ConfigError."""
    recorded = None
    with contextlib.suppress(OSError):  # opening the run's folder says what cannot be read
        recorded = load_config(config.directory / "config.yaml").task.chat_template_date
    if config.task.chat_template_date is not None or recorded is None:
        return config
    return _on(config, recorded)


def forget_unnamed(previous: dict[str, Any], current: dict[str, Any]) -> None:
    """Remove the date from two dumped configurations if only one of them sets it."""
    tasks = previous["task"], current["task"]
    if None in (one[_KEY] for one in tasks):
        for one in tasks:
            one[_KEY] = None


def _on(config: RunConfig, day: date) -> RunConfig:
    return config.model_copy(update={"task": config.task.model_copy(update={_KEY: day})})
