"""The day that chat templates get, which stays the same for the whole run."""

from __future__ import annotations

import contextlib
from datetime import date
from typing import Any

from asyncrl.config.run_config import RunConfig, load_config
from asyncrl.tasks.templates.variables import today

_KEY = "chat_template_date"


def with_date(config: RunConfig) -> RunConfig:
    """The configuration with today as the day of chat templates, if it names none."""
    if config.task.chat_template_date is not None:
        return config
    return _on(config, today())


def with_recorded_date(config: RunConfig) -> RunConfig:
    """The configuration with the day on which the run that is resumed began.

    Raises ConfigError: the run's own configuration is damaged.
    """
    recorded = None
    with contextlib.suppress(OSError):  # opening the run's folder says what cannot be read
        recorded = load_config(config.directory / "config.yaml").task.chat_template_date
    if config.task.chat_template_date is not None or recorded is None:
        return config
    return _on(config, recorded)


def forget_unnamed(previous: dict[str, Any], current: dict[str, Any]) -> None:
    """Two dumped configurations without the day, if only one of them names it."""
    tasks = previous["task"], current["task"]
    if None in (one[_KEY] for one in tasks):
        for one in tasks:
            one[_KEY] = None


def _on(config: RunConfig, day: date) -> RunConfig:
    return config.model_copy(update={"task": config.task.model_copy(update={_KEY: day})})
