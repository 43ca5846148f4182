"""What messages quote of errors in a user's code. Import-light: worker processes load this file."""

from __future__ import annotations

import os
import sys
import traceback
from pathlib import Path

TRACEBACK_LINES = 8
"""Lines of the user's traceback that an error message quotes."""
MESSAGE_CHARACTERS = 4000
"""Longest message about a failure."""
_OWN_CODE = f"{Path(__file__).parents[1]}{os.sep}"
"""Where the frames are that call the user's code."""


def last_lines() -> str:
    """The end of the traceback of the exception that is being handled, from the user's code on."""
    error = sys.exception()
    if error is None:
        raise RuntimeError("no exception is being handled")
    shown = traceback.TracebackException.from_exception(error)
    theirs = [not frame.filename.startswith(_OWN_CODE) for frame in shown.stack]
    first = theirs.index(True) if any(theirs) else -1  # a built-in one: where it was raised
    frames = list(shown.stack)[first:]
    while True:  # whole frames, so that no line stands without the one that it belongs to
        shown.stack = traceback.StackSummary.from_list(frames)
        lines = "".join(shown.format()).strip().splitlines()
        if len(lines) <= TRACEBACK_LINES or len(frames) <= 1:
            return bounded("\n".join(lines[-TRACEBACK_LINES:]))
        del frames[0]


def bounded(text: str) -> str:
    """A message that can be encoded and is not too long."""
    text = text.encode("utf-8", "backslashreplace").decode()
    if len(text) <= MESSAGE_CHARACTERS:
        return text
    half = MESSAGE_CHARACTERS // 2
    return f"{text[:half]} ... {text[-half:]}"
