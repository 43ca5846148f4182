"""The fault that a run has now: the text of a file, which an environment variable names."""

from __future__ import annotations

import os
from pathlib import Path

VARIABLE = "ASYNCRL_ALERTS_FAULT"


def present() -> str:
    """The fault, empty if there is none."""
    try:
        return Path(os.environ[VARIABLE]).read_text(encoding="utf-8")
    except FileNotFoundError:
        return ""
