"""Which run an order is for, where the user does not name one."""

from __future__ import annotations

import contextlib
from pathlib import Path

from asyncrl.errors import UserError
from asyncrl.runs.directory import find_run, is_alive


def find_run_for_order(name: str | None, directory: Path) -> Path:
    """The folder of the run that an order is for: the one named, or the only active one.

    Raises:
        UserError: there is no such run, or several are active and none is named.
    """
    if name is not None:
        return find_run(name, directory)
    active = sorted(path.parent for path in directory.glob("*/run.json") if _is_alive(path.parent))
    if len(active) > 1:
        names = ", ".join(path.name for path in active)
        raise UserError(
            f"{len(active)} runs in {directory} are active: {names}. Name the one that is meant, "
            f"as in `asyncrl stop {active[0].name}`"
        )
    return active[0] if active else find_run(None, directory)


def _is_alive(path: Path) -> bool:
    with contextlib.suppress(OSError):  # of another user
        return is_alive(path)
    return False
