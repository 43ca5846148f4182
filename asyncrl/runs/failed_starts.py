"""Folders of runs that failed at their start: `RUNS/NAME.failed-TIME`, kept for their logs.

A user's mistake that only shows once processes run (a reward function that raises, an engine that
refuses its settings) frees the run's name, so that the corrected command can be repeated. Often
only the logs explain the mistake, so they are kept.
"""

import re
import shutil
import time
from pathlib import Path

KEPT = 3
"""Failed starts that are kept of each run name; older ones are deleted."""

_NAME = re.compile(r".+\.failed-\d{8}-\d{6}(?:-\d+)?")


def is_one(folder: Path) -> bool:
    """Return True if a folder's name is that of a failed start."""
    return _NAME.fullmatch(folder.name) is not None


def set_aside(folder: Path) -> Path | None:
    """Move a run's folder aside and return its new path; delete it if it lacks logs (None)."""
    if not any(file.stat().st_size for file in (folder / "logs").glob("*")):
        shutil.rmtree(folder)
        return None
    before = sorted(
        (path for path in folder.parent.glob(f"{folder.name}.failed-*") if is_one(path)),
        key=lambda path: path.stat().st_mtime,
    )
    for old in before[: max(0, len(before) - KEPT + 1)]:
        shutil.rmtree(old)
    stamp = time.strftime("%Y%m%d-%H%M%S")  # noqa: TID251 - the name of a folder
    target = folder.with_name(f"{folder.name}.failed-{stamp}")
    number = 1
    while target.exists():  # two failed starts within a second
        number += 1
        target = folder.with_name(f"{folder.name}.failed-{stamp}-{number}")
    return folder.rename(target)
