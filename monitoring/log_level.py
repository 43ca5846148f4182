"""How much a process writes to its log (`monitoring.log_level`)."""

from __future__ import annotations

import logging
from typing import Literal

LogLevel = Literal["debug", "info", "warning", "error"]

_OURS = ("asyncrl", "cache", "engine", "monitoring", "rollout", "scheduler", "trainer", "wire")


def set_log_level(level: LogLevel) -> None:
    """Have asyncrl's packages log from this level on. Those of others stay as they are."""
    for name in _OURS:
        logging.getLogger(name).setLevel(level.upper())
