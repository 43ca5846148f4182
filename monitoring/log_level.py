"""How much a process writes to its log (`monitoring.log_level`)."""

from __future__ import annotations

import logging
from typing import Literal

LogLevel = Literal["debug", "info", "warning", "error"]


def set_log_level(level: LogLevel) -> None:
    """Have asyncrl log from this level on. Packages of others stay as they are."""
    logging.getLogger("asyncrl").setLevel(level.upper())
