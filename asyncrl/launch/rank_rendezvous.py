"""The folder, in that of a run, in which the ranks of a trainer on several machines meet.

It has a file for each trainer. The controller removes it before and after the processes of the run.
"""

from __future__ import annotations

import shutil
from pathlib import Path

MEETINGS = ".ranks"


def make_place(meeting: Path) -> Path:
    """Make the folder of a meeting, which only this user can access, and return the meeting."""
    meeting.parent.mkdir(mode=0o700, exist_ok=True)
    return meeting


def remove_meetings(run: Path) -> None:
    """Remove what trainers have left in a run's folder. None is alive."""
    shutil.rmtree(run / MEETINGS, ignore_errors=True)
